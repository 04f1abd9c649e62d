"""Prompt lookup: the index against a search of the whole context, and its replay."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import InputError
from runtime.ngram import NgramIndex, simulate_lookup

# Few different tokens make repetitions common
contexts = st.lists(st.integers(0, 2), max_size=40)
bounds = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


def search(tokens: Sequence[int], ngram_min: int, ngram_max: int, length: int) -> list[int]:
    """Looks at every place of the context, latest first, and copies token by token from there."""
    for n in range(min(ngram_max, len(tokens)), ngram_min - 1, -1):
        suffix = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == suffix:
                copied = list(tokens)
                for place in range(length):
                    copied.append(copied[start + n + place])
                return copied[len(tokens) :]
    return []


def index_of(tokens: Sequence[int], ngram_min: int, ngram_max: int) -> NgramIndex:
    index = NgramIndex(ngram_min, ngram_max)
    index.extend(tokens)
    return index


@given(tokens=contexts, bound=bounds, length=st.integers(0, 8))
def test_a_proposal_equals_a_search_of_the_whole_context(
    tokens: list[int], bound: list[int], length: int
) -> None:
    index = NgramIndex(*bound)
    for count in range(len(tokens) + 1):
        assert len(index) == count
        assert index.propose(length) == search(tokens[:count], *bound, length)
        index.extend(tokens[count : count + 1])


@given(tokens=contexts, cut=st.integers(0, 40), bound=bounds)
def test_it_does_not_matter_how_tokens_are_grouped(
    tokens: list[int], cut: int, bound: list[int]
) -> None:
    index = index_of(tokens[:cut], *bound)
    index.extend(tokens[cut:])
    assert index.propose(6) == index_of(tokens, *bound).propose(6)


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    tokens = [1, 2, 3, 7, 9, 3, 8, 1, 2, 3]
    assert index_of(tokens, 1, 3).propose(2) == [7, 9]
    assert index_of(tokens, 1, 1).propose(2) == [8, 1]


def test_the_latest_occurrence_wins() -> None:
    assert index_of([1, 2, 5, 1, 2, 6, 1, 2], 1, 2).propose(1) == [6]


def test_a_suffix_that_is_new_proposes_nothing() -> None:
    assert index_of([1, 2, 3], 1, 3).propose(4) == []
    assert index_of([1, 2, 1], 2, 3).propose(4) == []
    assert NgramIndex(1, 3).propose(4) == []


def test_a_proposal_goes_on_past_the_end_of_the_context() -> None:
    assert index_of([4, 5, 4], 1, 2).propose(5) == [5, 4, 5, 4, 5]
    assert index_of([4, 4, 4, 4], 1, 2).propose(3) == [4, 4, 4]
    assert index_of([1, 2, 3, 1, 2, 3, 1], 1, 4).propose(8) == [2, 3, 1, 2, 3, 1, 2, 3]


def test_a_loop_is_accepted_whole() -> None:
    tokens = [1, 2] * 10
    assert simulate_lookup(tokens, 4, 1, 3, 7) == [(7, 7), (7, 7)]


@given(tokens=contexts, bound=bounds, length=st.integers(0, 8))
def test_a_proposal_is_whole_or_empty(tokens: list[int], bound: list[int], length: int) -> None:
    assert len(index_of(tokens, *bound).propose(length)) in (0, length)


@pytest.mark.parametrize("length", [0, -3])
def test_no_length_means_no_proposal(length: int) -> None:
    assert index_of([1, 1, 1], 1, 2).propose(length) == []


@given(tokens=contexts, left=contexts, right=contexts, bound=bounds)
def test_a_clone_and_its_original_go_separate_ways(
    tokens: list[int], left: list[int], right: list[int], bound: list[int]
) -> None:
    original = index_of(tokens, *bound)
    copy = original.clone()
    original.extend(left)
    copy.extend(right)
    assert original.propose(6) == search([*tokens, *left], *bound, 6)
    assert copy.propose(6) == search([*tokens, *right], *bound, 6)


def naive_replay(
    tokens: list[int], start: int, bound: list[int], length: int
) -> list[tuple[int, int]]:
    cycles: list[tuple[int, int]] = []
    context = tokens[:start]
    while len(context) < len(tokens):
        rest = tokens[len(context) :]
        draft = search(context, *bound, length)[: len(rest) - 1]
        accepted = max(n for n in range(len(draft) + 1) if draft[:n] == rest[:n])
        cycles.append((len(draft), accepted))
        context = context + rest[: accepted + 1]
    return cycles


@given(tokens=contexts, start=st.integers(0, 40), bound=bounds, length=st.integers(0, 8))
def test_a_replay_equals_the_naive_one_and_commits_every_token(
    tokens: list[int], start: int, bound: list[int], length: int
) -> None:
    start = min(start, len(tokens))
    cycles = simulate_lookup(tokens, start, *bound, length)
    assert cycles == naive_replay(tokens, start, bound, length)
    assert sum(accepted + 1 for _, accepted in cycles) == len(tokens) - start


def test_a_copied_passage_is_accepted_whole() -> None:
    tokens = [*range(10), *range(10)]
    assert simulate_lookup(tokens, 10, 1, 2, 4) == [(0, 0), (4, 4), (3, 3)]


@pytest.mark.parametrize(("ngram_min", "ngram_max"), [(0, 2), (3, 2), (-1, -1)])
def test_lengths_out_of_order_are_refused(ngram_min: int, ngram_max: int) -> None:
    with pytest.raises(InputError, match=f"found {ngram_min} to {ngram_max}"):
        NgramIndex(ngram_min, ngram_max)


@pytest.mark.parametrize("start", [-1, 4])
def test_a_replay_from_outside_the_tokens_is_refused(start: int) -> None:
    with pytest.raises(InputError, match="expected 0 to 3"):
        simulate_lookup([1, 2, 3], start, 1, 2, 4)
