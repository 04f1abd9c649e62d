"""Static trees against every tree that there is, on small instances."""

import bisect
import itertools
import time
from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.draft_acceptance import RankCounts
from planner.tree_table import TreeTable
from planner.trees import (
    TreeLimits,
    expected_tokens,
    greedy_tree,
    level_widths,
    priced,
    rank_rates,
    search_trees,
)
from runtime.plan_cycles import TreeTemplate

Shape = tuple["Shape", ...]
"""A tree as the tuple of its children's trees."""


@cache
def shapes(nodes: int, depth: int, branch: int) -> tuple[Shape, ...]:
    """All trees of exactly ``nodes`` nodes below the root."""
    if nodes == 0:
        return ((),)
    if depth == 0:
        return ()
    return tuple(forests(nodes, depth, branch))


def forests(nodes: int, depth: int, branch: int) -> Iterator[Shape]:
    if nodes == 0:
        yield ()
    elif branch > 0:
        for first in range(nodes):
            for child in shapes(first, depth - 1, BRANCH):
                for rest in forests(nodes - 1 - first, depth, branch - 1):
                    yield (child, *rest)


BRANCH, DEPTH, NODES = 3, 3, 6


def template_of(shape: Shape) -> TreeTemplate:
    parents: list[int] = []
    ranks: list[int] = []
    queue = [(0, shape)]
    for node, children in queue:
        for rank, child in enumerate(children):
            parents.append(node)
            ranks.append(rank)
            queue.append((len(parents), child))
    return TreeTemplate(tuple(parents), tuple(ranks))


EVERY = [template_of(s) for n in range(NODES + 1) for s in shapes(n, DEPTH, BRANCH)]


class StepCosts(msgspec.Struct):
    """Passes by padded width; with ``curve`` a drafting pass costs what it says of its rows."""

    draft_pass: float = 10.0
    draft_row: float = 1.0
    verify: float = 60.0
    row: float = 2.0
    flash: float = 0.0
    curve: tuple[float, ...] = ()
    steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)

    def draft_us(self, rows: int, /) -> float:
        if self.curve:
            return self.curve[min(rows, len(self.curve)) - 1]
        return self.draft_pass + self.draft_row * rows

    def cycle_us(self, draft_us: float, rows: int, /) -> float:
        width = self.steps[bisect.bisect_left(self.steps, rows)]
        return max(draft_us + self.verify + self.row * width, self.flash)


shares = st.integers(0, 20).map(lambda n: n / 20)
rates = st.lists(
    st.tuples(shares, shares, shares).map(lambda r: tuple(x / max(sum(r), 1) for x in r)),
    min_size=1,
    max_size=4,
)
sorted_rates = rates.map(lambda rows: [tuple(sorted(row, reverse=True)) for row in rows])
affine = st.builds(
    StepCosts,
    draft_pass=st.sampled_from([0.5, 5.0, 20.0]),
    draft_row=st.sampled_from([0.0, 1.0, 10.0]),
    verify=st.sampled_from([5.0, 60.0]),
    row=st.sampled_from([0.1, 3.0]),
    flash=st.sampled_from([0.0, 120.0]),
)
uneven = st.lists(st.integers(1, 30).map(float), min_size=6, max_size=6).map(
    lambda curve: StepCosts(curve=tuple(itertools.accumulate(curve)))
)


@settings(max_examples=40)
@given(acceptance=st.one_of(rates, sorted_rates))
def test_the_table_equals_the_best_of_all_trees(acceptance):
    table = TreeTable(acceptance, NODES, DEPTH, BRANCH)
    known = [
        (
            len(widths := level_widths(t)),
            len(t.parents),
            sum(widths),
            expected_tokens(t, acceptance),
        )
        for t in EVERY
    ]
    for depth, nodes, internal in itertools.product(*map(range, table.tokens.shape)):
        best = max(g for d, n, i, g in known if d <= depth and n <= nodes and i <= internal)
        assert table.tokens[depth, nodes, internal] == pytest.approx(best, rel=1e-5)
        template = table.template(depth, nodes, internal)
        widths = level_widths(template)
        assert len(widths) <= depth
        assert len(template.parents) <= nodes
        assert sum(widths) <= internal
        assert expected_tokens(template, acceptance) == pytest.approx(best, rel=1e-5)


def ordered(template: TreeTemplate) -> bool:
    """A parent before its children, siblings of all ranks below."""
    seen: dict[int, list[int]] = {}
    for node, (parent, rank) in enumerate(zip(template.parents, template.ranks, strict=True), 1):
        if parent >= node:
            return False
        seen.setdefault(parent, []).append(rank)
    return all(sorted(ranks) == list(range(len(ranks))) for ranks in seen.values())


@settings(max_examples=40)
@given(acceptance=st.one_of(rates, sorted_rates), costs=affine, branch=st.integers(1, BRANCH))
def test_the_search_finds_the_best_of_all_trees_where_drafting_is_affine(acceptance, costs, branch):
    found = search_trees(acceptance, costs, TreeLimits(NODES, DEPTH, branch))
    fitting = [t for t in EVERY if t.parents and max(t.ranks) < branch]
    best = max(priced(t, acceptance, costs, "any").per_us for t in fitting)
    assert found.gap == 0
    assert found.best.per_us == pytest.approx(best, rel=1e-5)
    assert found.best.template in fitting
    assert ordered(found.best.template)


@settings(max_examples=40)
@given(acceptance=st.one_of(rates, sorted_rates), costs=uneven)
def test_the_gap_holds_where_drafting_costs_what_it_will(acceptance, costs):
    found = search_trees(acceptance, costs, TreeLimits(NODES, DEPTH, BRANCH))
    best = max(priced(t, acceptance, costs, "any").per_us for t in EVERY if t.parents)
    assert found.best.per_us <= best * (1 + 1e-9)
    assert best <= found.best.per_us * (1 + found.gap) * (1 + 1e-5)


@settings(max_examples=30)
@given(
    acceptance=st.one_of(rates, sorted_rates),
    costs=st.one_of(affine, uneven),
    nodes=st.integers(1, 20),
    depth=st.integers(1, 6),
)
def test_the_search_is_never_below_the_greedy_tree(acceptance, costs, nodes, depth):
    limits = TreeLimits(nodes, depth, BRANCH)
    greedy = greedy_tree(acceptance, costs, limits)
    assert ordered(greedy.template)
    assert 1 <= greedy.nodes <= nodes
    assert greedy.depth <= depth
    found = search_trees(acceptance, costs, limits)
    speeds = [tree.per_us for tree in (found.best, *found.runners_up)]
    assert speeds == sorted(speeds, reverse=True)
    assert found.best.per_us >= greedy.per_us


@settings(max_examples=15)
@given(acceptance=sorted_rates, nodes=st.integers(10, 24), depth=st.integers(2, 5))
def test_sizes_that_are_left_out_of_the_table_change_nothing(acceptance, nodes, depth):
    quick = TreeTable(acceptance, nodes, depth, BRANCH).tokens
    with patch("planner.tree_table._fits", return_value=True):
        slow = TreeTable(acceptance, nodes, depth, BRANCH).tokens
    np.testing.assert_allclose(quick, slow, rtol=1e-6)


@given(acceptance=rates)
def test_the_more_is_allowed_the_more_is_committed(acceptance):
    tokens = TreeTable(acceptance, 12, 4, 3).tokens
    for axis in range(3):
        assert (
            tokens.take(range(1, tokens.shape[axis]), axis)
            >= tokens[tuple(slice(0, -1) if at == axis else slice(None) for at in range(3))]
        ).all()
    assert tokens.min() == 1


def test_without_siblings_the_tree_is_a_chain():
    chain = search_trees([(0.9,), (0.8,)], StepCosts(), TreeLimits(12, 12, 1)).best
    assert chain.template.parents == tuple(range(chain.nodes))
    lengths = {
        n: (1 + sum(0.9 * 0.8**k for k in range(n))) / StepCosts().cycle_us(11.0 * n, n + 1)
        for n in range(1, 13)
    }
    assert chain.nodes == max(lengths, key=lambda n: lengths[n])


def test_a_greedy_tree_stops_at_a_width_step_that_a_whole_step_would_pay_for():
    acceptance = [(0.9,)]
    steep = StepCosts(draft_pass=1.0, draft_row=0.0, verify=10.0, row=1.0, steps=(1, 2, 16, 64))
    greedy = greedy_tree(acceptance, steep, TreeLimits(15, 15, 1))
    found = search_trees(acceptance, steep, TreeLimits(15, 15, 1))
    assert greedy.nodes == 1
    assert found.best.nodes > 1
    assert found.best.per_us > greedy.per_us


def test_counts_become_rates_down_to_the_last_depth_that_was_tried():
    counts = RankCounts((9, 4, 0), ((5, 2), (3, 1), (0, 0)))
    assert rank_rates(counts) == ((0.5, 0.2), (0.6, 0.2))
    assert rank_rates(RankCounts((0,), ((0, 0),))) == ((0.0, 0.0),)


class ExampleCosts(msgspec.Struct):
    """Of ``docs/trees.md``, in milliseconds."""

    least_ms: float = 0.0
    steps: tuple[int, ...] = (1, 4, 8)

    def draft_us(self, rows: int, /) -> float:
        return 1e3 * (18 + 2 * rows)

    def cycle_us(self, draft_us: float, rows: int, /) -> float:
        rest = {1: 80, 4: 90, 8: 110}[self.steps[bisect.bisect_left(self.steps, rows)]]
        return max(draft_us + 1e3 * rest, 1e3 * self.least_ms)


def test_the_documented_example_is_what_the_search_finds():
    acceptance, limits = [(0.80, 0.10), (0.70, 0.15)], TreeLimits(7, 8, 2)
    best = search_trees(acceptance, ExampleCosts(), limits).best
    assert best.template == TreeTemplate((0, 1, 1), (0, 0, 1))
    assert (best.tokens, 1e6 * best.per_us) == pytest.approx((2.48, 19.08), abs=0.005)
    greedy = greedy_tree(acceptance, ExampleCosts(), limits)
    assert greedy.template == TreeTemplate((0, 0, 1), (0, 1, 0))
    assert 1e6 * greedy.per_us == pytest.approx(18.92, abs=0.005)
    chain = search_trees(acceptance, ExampleCosts(), TreeLimits(7, 8, 1)).best
    assert (chain.nodes, 1e6 * chain.per_us) == (3, pytest.approx(18.35, abs=0.005))
    streamed = search_trees(acceptance, ExampleCosts(300.0), limits).best
    assert (streamed.depth, streamed.tokens) == (6, pytest.approx(3.473, abs=5e-4))


def test_trees_of_64_rows_are_searched_to_the_end(capsys):
    base = (0.75, 0.11, 0.04, 0.02)
    acceptance = [tuple(share * 0.97**depth for share in base) for depth in range(8)]
    began = time.perf_counter()
    found = search_trees(acceptance, StepCosts(verify=600.0, flash=900.0), TreeLimits())
    took = time.perf_counter() - began
    with capsys.disabled():
        print(f"\n64 rows, 16 levels, branch 4: {took:.2f} s")
    assert found.gap == 0
    assert found.best.nodes > 15
