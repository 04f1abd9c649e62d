"""Sampling: greedy, warpers, and noise that depends on nothing but seed and position."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from profiles.errors import FulcrumError, InputError
from runtime.sampling import GREEDY, Sampling, choose, kept_tokens, ranked

Floats = NDArray[np.float32]

# A small grid of values makes ties common
logit_rows = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=40).map(
    lambda row: np.array(row, dtype=np.float32)
)
seeds = st.integers(0, 2**64 - 1)
temperatures = st.sampled_from([0.001, 0.1, 0.7, 1.0, 3.0, 1000.0])
shares = st.floats(0.01, 1.0)


def random_logits(rows: int, vocab: int, spread: float = 3.0) -> Floats:
    return (np.random.default_rng(5).standard_normal((rows, vocab)) * spread).astype(np.float32)


def one(row: Floats, position: int, sampling: Sampling) -> int:
    return int(choose(row[None], [position], sampling)[0])


def reference_kept(row: Floats, sampling: Sampling) -> list[int]:
    """Sorts everything, then adds up one by one."""
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    offsets = (row - row.max()) / np.float32(sampling.temperature)
    weights = np.exp(offsets)
    target = sampling.top_p * weights[sorted(ranked)].sum(dtype=np.float64)
    kept: list[int] = []
    mass = 0.0
    for token in ranked:
        if sampling.top_p < 1 and mass >= target:
            break
        kept.append(token)
        mass += float(weights[token])
    return sorted(kept)


def reference_choice(row: Floats, position: int, sampling: Sampling) -> int:
    """Gumbel noise for every token, in float64."""
    key = np.array([sampling.seed, position], dtype=np.uint64)
    uniform = np.random.Philox(key=key).random_raw(len(row)).astype(np.float64) / 2**64 + 2.0**-65
    noise = -np.log(-np.log1p(-np.minimum(uniform, 1 - 2.0**-53)))
    scores = (row.astype(np.float64) - float(row.max())) / sampling.temperature + noise
    return max(reference_kept(row, sampling), key=lambda token: (scores[token], -token))


@given(row=logit_rows, seed=seeds)
def test_temperature_zero_is_argmax_with_the_lowest_id_on_ties(row: Floats, seed: int) -> None:
    expected = min(range(len(row)), key=lambda i: (-row[i], i))
    assert one(row, 3, Sampling(seed=seed, top_k=2, top_p=0.5)) == expected


def test_greedy_answers_each_row_of_a_batch() -> None:
    logits = random_logits(7, 50)
    chosen = choose(logits, range(7), GREEDY)
    assert chosen.dtype == np.int64
    assert chosen.tolist() == [int(row.argmax()) for row in logits]


@given(
    row=logit_rows,
    position=st.integers(0, 2**40),
    seed=seeds,
    temperature=temperatures,
    top_k=st.integers(0, 50),
    top_p=shares,
)
def test_the_choice_equals_noise_added_to_every_token(
    row: Floats, position: int, seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(temperature, top_k, top_p, seed)
    assert one(row, position, sampling) == reference_choice(row, position, sampling)


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 30.0])
def test_a_large_vocabulary_chooses_as_the_slow_reference(spread: float) -> None:
    logits = random_logits(20, 5000, spread)
    for position, row in enumerate(logits):
        sampling = Sampling(0.8, seed=9)
        assert one(row, position, sampling) == reference_choice(row, position, sampling)


@given(row=logit_rows, temperature=temperatures, top_k=st.integers(0, 50), top_p=shares)
def test_top_k_and_top_p_keep_exactly_the_reference_set(
    row: Floats, temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    kept = kept_tokens(row, sampling)
    everything = list(range(len(row)))
    assert (everything if kept is None else kept.tolist()) == reference_kept(row, sampling)


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("top_k", [0, 600])
def test_top_p_of_a_large_vocabulary_keeps_the_reference_set(
    spread: float, top_p: float, top_k: int
) -> None:
    row = np.round(random_logits(1, 3000, spread)[0], 1)
    sampling = Sampling(1.0, top_k, top_p)
    kept = kept_tokens(row, sampling)
    assert kept is not None
    assert kept.tolist() == reference_kept(row, sampling)


def test_top_k_breaks_ties_by_id() -> None:
    row = np.array([1, 2, 1, 2, 1], dtype=np.float32)
    kept = kept_tokens(row, Sampling(1.0, top_k=3))
    assert kept is not None
    assert kept.tolist() == [0, 1, 3]


def test_top_p_stops_at_the_token_that_reaches_the_share() -> None:
    row = np.log(np.array([0.125, 0.5, 0.25, 0.125])).astype(np.float32)
    kept = kept_tokens(row, Sampling(1.0, top_p=0.7))
    assert kept is not None
    assert kept.tolist() == [1, 2]


def test_warpers_that_are_off_keep_everything() -> None:
    row = random_logits(1, 9)[0]
    assert kept_tokens(row, Sampling(1.0)) is None
    assert kept_tokens(row, Sampling(1.0, top_k=9)) is None


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_tokens_are_distributed_as_softmax(temperature: float, seed: int) -> None:
    row = np.array([0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5], dtype=np.float32)
    count = 8_000
    logits = np.broadcast_to(row, (count, len(row)))
    chosen = choose(logits, range(count), Sampling(temperature, seed=seed))
    weights = np.exp(row.astype(np.float64) / temperature)
    expected = count * weights / weights.sum()
    counts = np.bincount(chosen, minlength=len(row))
    # 0.999 quantile of chi-square with 7 degrees of freedom
    assert chi_square(counts, expected) < 24.32


def test_tokens_after_top_k_are_distributed_as_the_renormalised_softmax() -> None:
    row = np.array([3.0, 1.0, 2.0, 2.5, 0.0], dtype=np.float32)
    count = 8_000
    logits = np.broadcast_to(row, (count, len(row)))
    chosen = choose(logits, range(count), Sampling(1.0, top_k=3, seed=4))
    counts = np.bincount(chosen, minlength=len(row))
    assert counts[[1, 4]].tolist() == [0, 0]
    kept = [0, 2, 3]
    weights = np.exp(row[kept].astype(np.float64))
    # 0.999 quantile with 2 degrees of freedom
    assert chi_square(counts[kept], count * weights / weights.sum()) < 13.82


def test_choices_at_neighbouring_positions_are_independent() -> None:
    count = 16_000
    logits = np.zeros((count, 4), dtype=np.float32)
    chosen = choose(logits, range(count), Sampling(1.0, seed=3))
    pairs = np.bincount(4 * chosen[:-1:2] + chosen[1::2], minlength=16)
    # 0.999 quantile with 15 degrees of freedom
    assert chi_square(pairs, np.full(16, count / 2 / 16)) < 37.70


@given(
    order=st.permutations(range(8)),
    temperature=temperatures,
    top_k=st.integers(0, 60),
    top_p=shares,
)
def test_a_row_does_not_depend_on_its_company(
    order: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    logits = random_logits(8, 50)
    positions = [100 + row for row in range(8)]
    sampling = Sampling(temperature, top_k, top_p, seed=7)
    together = choose(logits, positions, sampling)
    shuffled = choose(logits[order], [positions[row] for row in order], sampling)
    strided = choose(np.asfortranarray(logits), positions, sampling)
    alone = [one(row, position, sampling) for row, position in zip(logits, positions, strict=True)]
    assert together.tolist() == alone == strided.tolist()
    assert shuffled.tolist() == [alone[row] for row in order]


def test_seeds_and_positions_give_different_noise() -> None:
    logits = np.zeros((50, 1000), dtype=np.float32)
    runs = [choose(logits, range(50), Sampling(1.0, seed=seed)).tolist() for seed in range(4)]
    assert len({tuple(run) for run in runs}) == 4
    assert all(len(set(run)) > 40 for run in runs)
    assert choose(logits, range(50), Sampling(1.0, seed=2)).tolist() == runs[2]


def test_a_token_outside_the_kept_set_does_not_change_the_noise_of_the_others() -> None:
    row = np.zeros(100, dtype=np.float32)
    row[40:] = -np.inf
    for position in range(50):
        whole = one(row, position, Sampling(1.0, seed=1))
        assert whole < 40
        assert whole == one(row, position, Sampling(1.0, top_k=40, seed=1))
        assert whole == one(row[:40], position, Sampling(1.0, seed=1))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(1.0, 5, 0.9)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_logit_names_its_position(sampling: Sampling, value: float) -> None:
    logits = random_logits(3, 20)
    logits[1, 11] = value
    with pytest.raises(FulcrumError, match=f"position 71: .*logit {value}"):
        choose(logits, [70, 71, 72], sampling)


def test_a_row_without_a_possible_token_is_refused() -> None:
    with pytest.raises(FulcrumError, match="position 4"):
        choose(np.full((1, 5), -np.inf, dtype=np.float32), [4], Sampling(1.0))


@pytest.mark.parametrize("temperature", [0.001, 1.0, 1000.0])
def test_extreme_logits_raise_no_warning(temperature: float) -> None:
    row = np.array([-3e38, 3e38, 0, -np.inf], dtype=np.float32)
    assert one(row, 0, Sampling(temperature)) == 1
    assert one(row, 0, Sampling(temperature, 3, 0.9)) == 1


def test_no_rows_give_no_tokens() -> None:
    assert choose(np.zeros((0, 5), dtype=np.float32), [], Sampling(1.0)).shape == (0,)


def test_positions_must_match_the_rows() -> None:
    with pytest.raises(ValueError, match="2 positions"):
        choose(np.zeros((1, 5), dtype=np.float32), [1, 2], GREEDY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", 1e-9),
        ("temperature", 1e9),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InputError) as caught:
        msgspec.structs.replace(GREEDY, **{field: value})
    assert caught.value.where == field
    assert caught.value.expected


@given(
    row=logit_rows,
    position=st.integers(0, 2**40),
    seed=seeds,
    temperature=st.one_of(st.just(0.0), temperatures),
    top_k=st.integers(0, 50),
    top_p=shares,
    count=st.integers(1, 8),
)
def test_the_candidate_of_rank_0_is_the_token_that_would_be_chosen(
    row, position, seed, temperature, top_k, top_p, count
):
    sampling = Sampling(temperature, top_k, top_p, seed)
    found = ranked(row, position, sampling, count)
    assert found.ids[0] == one(row, position, sampling)
    assert len(set(found.ids)) == len(found.ids) <= count
    assert list(found.probabilities) == sorted(found.probabilities, reverse=True)
    assert sum(found.probabilities) <= 1 + 1e-6


@given(row=logit_rows, position=st.integers(0, 2**40), seed=seeds, temperature=temperatures)
def test_every_rank_is_what_would_be_chosen_without_those_before(row, position, seed, temperature):
    sampling = Sampling(temperature, seed=seed)
    left = row.copy()
    for token in ranked(row, position, sampling, 5).ids:
        assert token == one(left, position, sampling)
        left[token] = -np.inf


def test_greedy_candidates_are_the_largest_logits_of_equals_the_first():
    found = ranked(np.array([1, 3, 2, 3, -np.inf], np.float32), 0, GREEDY, 9)
    assert found.ids == (1, 3, 2, 0)
    weights = np.exp([3.0, 3.0, 2.0, 1.0])
    assert found.probabilities == pytest.approx(weights / weights.sum(), rel=1e-5)


def test_candidates_of_a_damaged_row_are_refused():
    with pytest.raises(FulcrumError, match="position 4"):
        ranked(np.array([1, np.nan], np.float32), 4, GREEDY, 2)


@pytest.mark.parametrize("temperature", [0.001, 0.05, 0.8, 5.0])
@pytest.mark.parametrize("warped", [{}, {"top_p": 0.9}, {"top_k": 300}])
def test_candidates_of_a_large_vocabulary_are_those_of_noise_added_to_every_token(
    temperature, warped
):
    for position, row in enumerate(random_logits(20, 20_000)):
        sampling = Sampling(temperature, seed=11, **warped)
        kept = kept_tokens(row, sampling)
        ids = np.arange(len(row)) if kept is None else kept
        generator = np.random.Philox(key=np.array([11, position], dtype=np.uint64))
        uniform = generator.random_raw(len(row))[ids].astype(np.float64) * 2.0**-64
        scores = row[ids].astype(np.float64) / temperature - np.log(-np.log1p(-uniform))
        order = np.argsort(-scores, kind="stable")[:6]
        shares = np.exp(scores[order] - scores.max()) / np.exp(scores - scores.max()).sum()
        found = ranked(row, position, sampling, 6)
        assert found.ids == tuple(ids[order])
        assert found.probabilities == pytest.approx(shares, rel=1e-4, abs=1e-12)


@given(
    seed=st.integers(0, 999),
    length=st.integers(1, 3000),
    values=st.sampled_from([1, 2, 5, 50, 10**6]),
    count=st.integers(1, 80),
)
def test_the_largest_of_a_long_row_are_found_also_among_equals(
    seed: int, length: int, values: int, count: int
) -> None:
    row = np.random.default_rng(seed).integers(0, values, length).astype(np.float32)
    expected = sorted(range(length), key=lambda token: (-row[token], token))[:count]
    assert list(ranked(row, 0, GREEDY, count).ids) == expected
