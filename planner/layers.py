"""Which sub-layers draft: a knapsack over the 2L residual blocks (KnapSpec, section 3).

Keeping a sub-layer costs its time and is worth what leaving it out loses. For each budget the best
set is found exactly; which of the sets drafts is decided later, by measured agreement. Single
losses do not simply add up, so two surrogates of value propose.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from planner.agreement import SkipLoss
from profiles.words import SubLayerId

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Budgets of a draft, as shares of the time of all sub-layers."""
VALUE_SCALE = 1_000_000
NANOSECONDS = 1_000


class Surrogate(StrEnum):
    """What a sub-layer is taken to be worth, so that the sum over a set means something."""

    AGREEMENT = "agreement"
    """Negative log share of next tokens that stay the same when it is left out."""
    LOG_LOSS = "log loss"
    """Growth of the next token's negative log probability when it is left out."""


class Proposal(msgspec.Struct, frozen=True):
    """A set of sub-layers to leave out, and why it was proposed."""

    skipped: tuple[SubLayerId, ...]
    surrogate: Surrogate
    share: float
    """Budget that it was solved for."""


def values(losses: Sequence[SkipLoss], surrogate: Surrogate) -> list[float]:
    """Worth of keeping each sub-layer, at least 0."""
    if surrogate is Surrogate.LOG_LOSS:
        return [loss.log_loss for loss in losses]
    return [-math.log((loss.hits + 0.5) / (loss.positions + 0.5)) for loss in losses]


def best_kept(worth: Sequence[float], costs_us: Sequence[float], budget_us: float) -> list[int]:
    """Indices to keep, of most total worth within ``budget_us``; solved to optimality.

    Worth counts in millionths, time in nanoseconds.
    """
    from ortools.algorithms.python import knapsack_solver

    kinds = knapsack_solver.SolverType
    solver = knapsack_solver.KnapsackSolver(
        kinds.KNAPSACK_MULTIDIMENSION_BRANCH_AND_BOUND_SOLVER, "sub-layers"
    )
    weights = [round(cost * NANOSECONDS) for cost in costs_us]
    # One more millionth each: among equals, keep rather than skip.
    profits = [round(value * VALUE_SCALE) + 1 for value in worth]
    solver.init(profits, [weights], [math.floor(budget_us * NANOSECONDS)])
    solver.solve()
    return [i for i in range(len(profits)) if solver.best_solution_contains(i)]


def propose(losses: Sequence[SkipLoss], costs_us: Sequence[float]) -> list[Proposal]:
    """The best set of every budget under every surrogate, each set once, full target excluded."""
    total = sum(costs_us)
    found: dict[tuple[SubLayerId, ...], Proposal] = {}
    for share in SHARES:
        for surrogate in Surrogate:
            kept = set(best_kept(values(losses, surrogate), costs_us, share * total))
            skipped = tuple(SubLayerId(i) for i in range(len(costs_us)) if i not in kept)
            if skipped and len(kept) > 0:
                found.setdefault(skipped, Proposal(skipped, surrogate, share))
    return list(found.values())
