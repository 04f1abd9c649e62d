"""The knapsack against every subset, and what its proposals promise."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.agreement import SkipLoss
from planner.layers import NANOSECONDS, SHARES, VALUE_SCALE, Surrogate, best_kept, propose, values

WORTH = st.floats(0, 3).map(lambda x: round(x, 6))
COST = st.integers(1, 60_000).map(lambda ns: ns / NANOSECONDS)


def profit(worth: Sequence[float], kept: Sequence[int]) -> int:
    """The objective in the solver's own integers."""
    return sum(round(worth[i] * VALUE_SCALE) + 1 for i in kept)


def best_of_all_subsets(worth: Sequence[float], costs: Sequence[float], budget: float) -> int:
    """The objective's optimum by trying every subset."""
    limit, most = int(budget * NANOSECONDS), 0
    weights = [round(cost * NANOSECONDS) for cost in costs]
    for size in range(len(worth) + 1):
        for kept in itertools.combinations(range(len(worth)), size):
            if sum(weights[i] for i in kept) <= limit:
                most = max(most, profit(worth, kept))
    return most


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WORTH, COST), min_size=1, max_size=10), st.floats(0.05, 1))
def test_the_knapsack_equals_brute_force(items: list[tuple[float, float]], share: float) -> None:
    worth, costs = [w for w, _ in items], [c for _, c in items]
    budget = share * sum(costs)
    kept = best_kept(worth, costs, budget)
    assert sum(round(costs[i] * NANOSECONDS) for i in kept) <= int(budget * NANOSECONDS)
    assert profit(worth, kept) == best_of_all_subsets(worth, costs, budget)


@pytest.mark.parametrize("count", [12, 16])
def test_the_knapsack_equals_brute_force_on_whole_models(count: int) -> None:
    worth = [(i * 7919 % 101) / 50 for i in range(count)]
    costs = [3.0 if i % 2 else 1.0 for i in range(count)]
    for share in (0.3, 0.6, 0.9):
        kept = best_kept(worth, costs, share * sum(costs))
        assert profit(worth, kept) == best_of_all_subsets(worth, costs, share * sum(costs))


def test_worth_is_never_negative_and_grows_with_the_damage() -> None:
    losses = [SkipLoss(100, 100, 0.0), SkipLoss(60, 100, 0.7), SkipLoss(0, 100, 9.0)]
    for surrogate in Surrogate:
        worth = values(losses, surrogate)
        assert worth == sorted(worth)
        assert worth[0] >= 0


def test_proposals_differ_skip_something_and_keep_the_vital_sub_layer() -> None:
    losses = [
        SkipLoss(5 if i == 3 else 95 - i, 100, 4.0 if i == 3 else 0.01 * i) for i in range(12)
    ]
    proposals = propose(losses, [1.0, 2.0] * 6)
    assert 1 < len(proposals) <= len(SHARES) * len(Surrogate)
    assert len({p.skipped for p in proposals}) == len(proposals)
    for proposal in proposals:
        assert proposal.skipped
        assert 3 not in proposal.skipped
        kept = sum((1.0, 2.0)[i % 2] for i in range(12) if i not in proposal.skipped)
        assert kept <= proposal.share * 18 + 1e-9
