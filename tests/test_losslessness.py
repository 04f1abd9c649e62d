"""All that drafts, in all shapes, over all residencies: the tokens of plain decoding in memory."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless_plans import (
    FORMATS,
    PAIR,
    PERFECT,
    PROMPTS,
    RESIDENCIES,
    SAMPLINGS,
    SHAPES,
    SOURCES,
    Opened,
    Plain,
    cycle_of,
    streamed,
    tokens,
    variant,
)
from tiny_models import MHA, QWEN2, QWEN3, VOCAB

from profiles.errors import InputError
from profiles.words import Format
from runtime.cycle import Decoding, Draft
from runtime.kv_cache import KvCache
from runtime.plan_cycles import OFF, Cycle, HeadOrder
from runtime.plan_types import WIDEST_PASS
from runtime.sampling import GREEDY, Sampling
from runtime.session import FinishReason, Session
from runtime.tree import ROOT, TokenTree

LOOP = PROMPTS["loop"]
STREAMED = RESIDENCIES["60 %"]


@pytest.fixture(scope="module")
def plain(opened: Opened) -> Plain:
    return Plain(opened)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("source", SOURCES)
def test_every_draft_in_every_shape_gives_the_tokens_of_plain_decoding(
    opened: Opened, plain: Plain, source: str, residency: str, fmt: Format
) -> None:
    recipe = variant(format=fmt, residency=RESIDENCIES[residency])
    session = opened(recipe)
    drafted = accepted = 0
    # The rest by turns: the other way round in the other format, one further in each residency
    rest = list(itertools.product(HeadOrder, SAMPLINGS.values(), PROMPTS.values()))
    offset = 6 * FORMATS.index(fmt) + list(RESIDENCIES).index(residency)
    for index, shape in enumerate(SHAPES):
        head, sampling, prompt = rest[(5 * index + offset) % len(rest)]
        cycle = cycle_of(source, shape, head)
        found = tokens(session, prompt, sampling=sampling, cycle=cycle)
        assert found == plain(recipe, prompt, sampling), (cycle, sampling, prompt)
        drafted += session.finished().stats.drafted
        accepted += session.finished().stats.accepted
    assert drafted > accepted > 20, "drafts that are never right, or never wrong, prove little"


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from([MHA, QWEN2, QWEN3]),
    fmt=st.sampled_from(FORMATS),
    residency=st.sampled_from([None, streamed(0, 3, slots=1), streamed(0, 1, 2, 3)]),
    source=st.sampled_from(list(SOURCES)),
    form=st.sampled_from(list(SHAPES)),
    head=st.sampled_from(HeadOrder),
    prompt=st.lists(st.integers(3, 9), min_size=1, max_size=70),
    count=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_request_of_any_family_gives_the_tokens_of_plain_decoding(
    opened, plain, shape, fmt, residency, source, form, head, prompt, count, temperature, seed
) -> None:
    recipe = variant(
        *(PAIR,), shape=shape, format=fmt, residency=residency, masks=((2,),), faint=(2, 3)
    )
    sampling, cycle = Sampling(temperature=temperature, seed=seed), cycle_of(source, form, head)
    found = tokens(*(opened(recipe), prompt), sampling=sampling, cycle=cycle, max_new_tokens=count)
    assert found == plain(recipe, prompt, sampling, count)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("residency", [None, STREAMED], ids=["in memory", "streamed"])
def test_a_twin_of_the_target_is_always_right(
    opened: Opened, residency: Any, sampling: Sampling
) -> None:
    session = opened(variant(PERFECT, residency=residency))
    for shape in ("chain of 1", "chain of 4", "chain of 8", "deep chain", "online, chain"):
        for head in HeadOrder:
            cycle = cycle_of("model", shape, head)
            tokens(session, LOOP, sampling=sampling, cycle=cycle, max_new_tokens=41)
            stats = session.finished().stats
            assert stats.accepted == stats.drafted > 0, shape
            assert stats.cycles == -(-41 // (cycle.length + 1))


class Watched:
    """A decoding whose cache can be looked at."""

    def __init__(self, session: Session, cycle: Cycle) -> None:
        plan = session.plan
        self.cache = KvCache(plan.model, plan.kv.growth_tokens, plan.context + WIDEST_PASS)
        self.run = Decoding(plan, session._target, self.cache, LOOP, GREEDY, cycle, session._draft)
        self.run.prefill()

    def bits(self, first: int, end: int) -> tuple[bytes, bytes]:
        keys, values = self.cache.keys, self.cache.values
        return keys[:, :, first:end].tobytes(), values[:, :, first:end].tobytes()


@pytest.mark.parametrize("form", SHAPES)
def test_a_draft_is_as_large_as_it_may_be(opened: Opened, form: str) -> None:
    cycle = cycle_of("model", form)
    with_model = Watched(opened(PAIR), cycle)
    drafted = max(with_model.run.step(100).drafted for _ in range(4))
    assert drafted == cycle.length or (form == "online, careful" and drafted > 4)


def tree_without(wrong_at_every_depth: set[int], template: Any) -> Callable[..., Draft]:
    """A replacement of ``Decoding._draft``: the template, of tokens that are all wrong."""
    fitting = [token for token in range(VOCAB) if token not in wrong_at_every_depth]

    def draft(run: Decoding, _cycle: Cycle, _depth: int) -> Draft:
        tree, nodes = TokenTree(run.tokens[-1]), [ROOT]
        for parent, rank in zip(template.parents, template.ranks, strict=True):
            nodes.append(tree.add(nodes[parent], fitting[rank]))
        return Draft(tree)

    return draft


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("residency", [None, STREAMED], ids=["in memory", "streamed"])
def test_a_cycle_that_rejects_everything_adds_one_row_and_changes_no_bit(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, residency: Any, fmt: Format
) -> None:
    session = opened(variant(format=fmt, residency=residency))
    plain = Watched(session, OFF)
    for _ in range(20):
        plain.run.step(10**6)
    right = set(plain.run.tokens)
    for template in session.plan.trees:
        fast = Watched(session, cycle_of("model", "bushy"))
        monkeypatch.setattr(Decoding, "_draft", tree_without(right, template))
        for _ in range(5):
            length = fast.cache.length
            before = fast.bits(0, length)
            assert fast.run.step(10**6).accepted == 0
            assert fast.cache.length == length + 1
            assert fast.bits(0, length) == before
        assert fast.bits(0, fast.cache.length) == plain.bits(0, fast.cache.length)


FORMS = ("chain of 8", "comb", "binary", "online, wide")
BOTH = pytest.mark.parametrize("residency", [None, STREAMED], ids=["in memory", "streamed"])


@BOTH
@pytest.mark.parametrize("place", [0, 9])
def test_an_end_within_a_tree_ends_the_text(opened: Opened, residency: Any, place: int) -> None:
    free = tokens(opened(PERFECT), LOOP, max_new_tokens=40, cycle=OFF)
    eos = free[place]
    session = opened(variant(PERFECT, residency=residency, eos_ids=(eos,)))
    for source, form in itertools.product(SOURCES, FORMS):
        cycle = cycle_of(source, form)
        found = tokens(session, LOOP, cycle=cycle, max_new_tokens=40)
        assert found == free[: free.index(eos) + 1]
        assert session.finished().finish_reason is FinishReason.EOS
        on = tokens(session, LOOP, cycle=cycle, max_new_tokens=40, ignore_eos=True)
        assert on == free


@BOTH
def test_a_limit_within_a_tree_cuts_it(opened: Opened, residency: Any) -> None:
    session = opened(variant(PERFECT, residency=residency))
    free = tokens(session, LOOP, cycle=OFF)
    for form in FORMS:
        for count in (1, 2, 3, 5, 8, 13):
            found = tokens(session, LOOP, cycle=cycle_of("model", form), max_new_tokens=count)
            assert found == free[:count]


@BOTH
def test_the_end_of_the_context_cuts_a_tree(opened: Opened, residency: Any) -> None:
    session = opened(variant(PERFECT, residency=residency, context=48))
    for room in (1, 2, 7, 25):
        prompt = (LOOP * 4)[: 48 - room]
        expected = tokens(session, prompt, cycle=OFF, max_new_tokens=None)
        assert len(expected) == room
        for source, form in itertools.product(SOURCES, FORMS):
            cycle = cycle_of(source, form)
            assert tokens(session, prompt, cycle=cycle, max_new_tokens=None) == expected
            assert session.finished().finish_reason is FinishReason.CONTEXT


@BOTH
@settings(max_examples=12, deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from([*SOURCES, "off"]),
            st.sampled_from(FORMS),
            st.lists(st.integers(3, 60), max_size=12),
            st.integers(1, 20),
            st.sampled_from([0, 0, 0, 5, 40]),
        ),
        min_size=2,
        max_size=6,
    ),
    temperature=st.sampled_from([0.0, 0.9]),
)
def test_a_conversation_reuses_rows_whatever_drafted_them(
    opened, plain, residency, turns, temperature
) -> None:
    recipe, sampling = variant(residency=residency), Sampling(temperature=temperature, seed=3)
    session, text = opened(recipe), list(LOOP)
    for source, form, said, count, dropped in turns:
        # Now and then the conversation goes back, and its draft's rows with it
        text = text[: max(len(text) - dropped, 1)] + said
        cycle = OFF if source == "off" else cycle_of(source, form)
        found = tokens(session, text, cycle=cycle, sampling=sampling, max_new_tokens=count)
        assert found == plain(recipe, text, sampling, count)
        text += found


def test_buckets_that_draft_between_others_that_do_not(opened: Opened, plain: Plain) -> None:
    kinds = [
        *(cycle_of("model", "binary"), OFF, cycle_of("model", "online, wide"), OFF),
        *(cycle_of("skip", "comb"), cycle_of("ngram", "bushy"), OFF, cycle_of("model", "comb")),
    ]
    cycles = tuple((14 * index, cycle) for index, cycle in enumerate(kinds))
    for residency in (None, STREAMED):
        recipe = variant(cycles=cycles, residency=residency)
        for sampling in SAMPLINGS.values():
            found = tokens(opened(recipe), LOOP, sampling=sampling, max_new_tokens=120)
            assert found == plain(recipe, LOOP, sampling, 120)
            stats = opened(recipe).finished().stats
            assert 0 < stats.speculating_cycles < stats.cycles


@BOTH
def test_a_stop_string_ends_every_shape_at_the_same_place(opened: Opened, residency: Any) -> None:
    session = opened(variant(PERFECT, residency=residency))
    text = session.generate("return self", max_new_tokens=40, cycle=OFF).text
    for stop in ("1 of", "and", " return"):
        assert stop in text
        expected = session.generate("return self", max_new_tokens=40, cycle=OFF, stop=stop)
        assert expected.finish_reason is FinishReason.STOP
        for source, form in itertools.product(SOURCES, FORMS):
            found = session.generate(
                "return self", max_new_tokens=40, cycle=cycle_of(source, form), stop=stop
            )
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)


@BOTH
def test_a_session_closed_in_mid_stream_leaves_nothing_to_the_next(
    compiled: Callable[..., Any], plain: Plain, residency: Any
) -> None:
    recipe = variant(residency=residency)
    for form in ("binary", "online, wide"):
        cycle = cycle_of("model", form)
        session = Session(compiled(recipe))
        stream = session.stream_ids(LOOP, cycle=cycle)
        next(stream)
        session.close()
        with pytest.raises(InputError, match="closed"):
            next(stream)
        with Session(compiled(recipe)) as again:
            # Given up in the middle, too
            stream = again.stream_ids(LOOP[:5], cycle=cycle)
            next(stream)
            stream.close()
            assert tokens(again, LOOP, cycle=cycle) == plain(recipe, LOOP, GREEDY)


def chi_square_limit(freedom: int, deviations: float = 3.7) -> float:
    """What a right chi-square exceeds once in ten thousand (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + deviations * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("form", ["chain of 4", "binary", "online, wide"])
def test_sampled_tokens_are_distributed_as_the_target_says(opened: Opened, form: str) -> None:
    session, seeds, temperature, kept = opened(PAIR), 500, 1.2, 4
    cycle = cycle_of("model", form)
    pairs = Counter(
        tokens(
            *(session, LOOP),
            cycle=cycle,
            max_new_tokens=3,
            sampling=Sampling(temperature=temperature, top_k=kept, seed=seed),
        )[:2]
        for seed in range(seeds)
    )

    def expected(text: Sequence[int]) -> dict[int, float]:
        logits = session.logits_at(text).astype(np.float64) / temperature
        likeliest = np.argsort(-logits, kind="stable")[:kept]
        weights = np.exp(logits[likeliest] - logits.max())
        return dict(zip(likeliest.tolist(), (weights / weights.sum()).tolist(), strict=True))

    joint = {
        (one, other): seeds * chance * then
        for one, chance in expected(LOOP).items()
        for other, then in expected([*LOOP, one]).items()
    }
    assert set(pairs) <= set(joint)
    # Cells of few are one cell
    cells = {pair: mean for pair, mean in joint.items() if mean >= 8}
    rare, met = seeds - sum(cells.values()), seeds - sum(pairs[pair] for pair in cells)
    squares = [(pairs[pair] - mean) ** 2 / mean for pair, mean in cells.items()]
    squares += [(met - rare) ** 2 / rare] if rare > 1 else []
    assert len(cells) >= 4
    assert sum(squares) < chi_square_limit(len(squares) - 1)
