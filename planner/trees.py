"""The static token tree of a bucket: most expected tokens per cycle time (Lever's objective).

``planner.tree_table`` knows what the best tree of every depth, number of nodes and of internal
nodes commits. A cycle drafts level by level, one pass over all internal nodes of a level, and
verifies everything in one pass. What the levels of a tree cost together is bounded from below by
the cheapest way to spread its internal nodes over its levels, so cells of the table are looked at
in order of the best that they can be, until none is left that could win. Where drafting cost is
affine in rows every spread costs the same, and the first cell is the optimum; else what is left
open is the proved gap.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from planner.draft_acceptance import RankCounts
from planner.tree_table import TreeTable
from runtime.plan_cycles import TreeTemplate

Array = np.ndarray[Any, Any]

SHOWN = 4
"""Trees that a search returns besides the best."""
LOOKED_AT = 400
"""Most cells whose tree is priced."""
ROUNDING = 1e-6
"""Of the table's sums, relative."""


class TreeCosts(Protocol):
    """Times of a cycle at one context."""

    @property
    def steps(self) -> Sequence[int]:
        """Rows at which a width step of the verify pass ends, ascending."""
        ...

    def draft_us(self, rows: int, /) -> float:
        """A drafting pass over ``rows`` nodes, with its head and its constant."""
        ...

    def cycle_us(self, draft_us: float, rows: int, /) -> float:
        """The whole cycle: drafting passes that take ``draft_us`` together, then the verify pass of
        ``rows``, its head and the constants. It never falls as ``draft_us`` or ``rows`` grow."""
        ...


class TreeLimits(msgspec.Struct, frozen=True):
    """What is searched."""

    nodes: int = 63
    """Without the root: a pass of 64 rows."""
    depth: int = 16
    branch: int = 4


class StaticTree(msgspec.Struct, frozen=True):
    """A template with what it yields and takes."""

    template: TreeTemplate
    tokens: float
    """Expected to be committed in a cycle."""
    us: float
    origin: str
    """Who proposed it."""

    @property
    def per_us(self) -> float:
        """G / C."""
        return self.tokens / self.us

    @property
    def nodes(self) -> int:
        """Without the root."""
        return len(self.template.parents)

    @property
    def depth(self) -> int:
        """Levels below the root, each of which takes a drafting pass."""
        return len(level_widths(self.template))


class TreeSearch(msgspec.Struct, frozen=True):
    """The best static tree, and how sure that is."""

    best: StaticTree
    runners_up: tuple[StaticTree, ...]
    """Fastest first."""
    gap: float
    """No tree within the limits has more than (1 + gap) times the best one's G / C."""


def rank_rates(counts: RankCounts) -> tuple[tuple[float, ...], ...]:
    """Acceptance by depth, then rank, given that the parent is accepted; one pseudo-miss each.

    Down to the last depth that was tried; a search takes it for all below.
    """
    deepest = max((at for at, tried in enumerate(counts.tried) if tried), default=0)
    return tuple(
        tuple(hit / (tried + 1) for hit in row)
        for tried, row in zip(counts.tried[: deepest + 1], counts.hits, strict=False)
    )


def search_trees(
    acceptance: Sequence[Sequence[float]], costs: TreeCosts, limits: TreeLimits
) -> TreeSearch:
    """The best tree of a node or more within ``limits``; Lever's greedy one is admitted as a rival.

    ``acceptance`` is by depth, then rank (``rank_rates``). Branch 1 gives the best chain.
    """
    table = TreeTable(acceptance, limits.nodes, limits.depth, limits.branch)
    rival = greedy_tree(acceptance, costs, limits)
    found, best = {rival.template: rival}, rival.per_us
    cells = _cells(table, costs, limits)
    for looked_at, (bound, depth, nodes, internal) in enumerate(cells[:LOOKED_AT]):
        if bound <= best and looked_at >= SHOWN:
            break
        template = table.template(depth, nodes, internal)
        if template.parents:
            found[template] = priced(template, acceptance, costs, "exact")
            best = max(best, found[template].per_us)
    ranked = sorted(found.values(), key=lambda t: (-t.per_us, t.nodes, t.template.parents))
    # A cell's tree may cost more than its bound, another tree of the cell less: so not only cells
    # that were left out are open
    gap = cells[0][0] / best - 1
    return TreeSearch(ranked[0], tuple(ranked[1 : 1 + SHOWN]), gap if gap > 2 * ROUNDING else 0.0)


def priced(
    template: TreeTemplate,
    acceptance: Sequence[Sequence[float]],
    costs: TreeCosts,
    origin: str,
) -> StaticTree:
    """A template with its expected tokens and its cycle time."""
    draft_us = sum(costs.draft_us(width) for width in level_widths(template))
    us = costs.cycle_us(draft_us, len(template.parents) + 1)
    return StaticTree(template, expected_tokens(template, acceptance), us, origin)


def expected_tokens(template: TreeTemplate, acceptance: Sequence[Sequence[float]]) -> float:
    """1 + the sum over nodes of the product of acceptances down to them."""
    reach, depths = [1.0], [0]
    for parent, rank in zip(template.parents, template.ranks, strict=True):
        row = acceptance[min(depths[parent], len(acceptance) - 1)]
        reach.append(reach[parent] * row[rank])
        depths.append(depths[parent] + 1)
    return sum(reach)


def level_widths(template: TreeTemplate) -> list[int]:
    """Internal nodes by depth: rows of each drafting pass."""
    depths = [0]
    widths: list[int] = []
    internal: set[int] = set()
    for parent in template.parents:
        depths.append(depths[parent] + 1)
        if parent not in internal:
            internal.add(parent)
            widths += [0] * (depths[parent] + 1 - len(widths))
            widths[depths[parent]] += 1
    return widths


def greedy_tree(
    acceptance: Sequence[Sequence[float]], costs: TreeCosts, limits: TreeLimits
) -> StaticTree:
    """Lever's Alg. 1 on mean acceptance: the node of the largest b / dC, for as long as G / C
    rises; but never less than one node."""
    rates = [row[: limits.branch] for row in acceptance]
    parents: list[int] = []
    ranks: list[int] = []
    reach, depths, children = [1.0], [0], [0]
    widths: list[int] = []

    def cycle_us(level: int | None = None) -> float:
        rows = [n + (at == level) for at, n in enumerate([*widths, 0])]
        draft_us = sum(costs.draft_us(n) for n in rows if n)
        return costs.cycle_us(draft_us, len(parents) + 1 + (level is not None))

    def moves() -> list[tuple[float, float, int]]:
        """(b / dC, b, parent) of each node that could come next."""
        now = cycle_us()
        # What a node costs depends on its level, and on whether its parent drafts already
        plain = max(cycle_us(-1) - now, 1e-9)
        fresh = [max(cycle_us(level) - now, 1e-9) for level in range(len(widths) + 1)]
        found: list[tuple[float, float, int]] = []
        for node, depth in enumerate(depths):
            row = rates[min(depth, len(rates) - 1)]
            if depth < limits.depth and children[node] < len(row):
                b = reach[node] * row[children[node]]
                found.append((b / (plain if children[node] else fresh[depth]), b, -node))
        return found

    gain = 1.0
    while len(parents) < limits.nodes and (candidates := moves()):
        value, b, node = max(candidates)
        if parents and value <= gain / cycle_us():
            break
        node, gain = -node, gain + b
        if not children[node]:
            widths += [0] * (depths[node] + 1 - len(widths))
            widths[depths[node]] += 1
        parents.append(node)
        ranks.append(children[node])
        children[node] += 1
        reach.append(b)
        depths.append(depths[node] + 1)
        children.append(0)
    return priced(_by_level(parents, ranks), acceptance, costs, "greedy")


def _by_level(parents: Sequence[int], ranks: Sequence[int]) -> TreeTemplate:
    """The order that ``TreeTable.template`` has, so that equal trees are equal templates."""
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents, 1):
        below[parent].append(node)
    order = [0]
    for node in order:
        order += sorted(below[node], key=lambda at: ranks[at - 1])
    place = {node: at for at, node in enumerate(order)}
    return TreeTemplate(
        tuple(place[parents[node - 1]] for node in order[1:]),
        tuple(ranks[node - 1] for node in order[1:]),
    )


def _cells(
    table: TreeTable, costs: TreeCosts, limits: TreeLimits
) -> list[tuple[float, int, int, int]]:
    """(upper bound of G / C, depth, nodes, internal nodes) of each cell, the best bound first.

    Inside a width step more nodes cost nothing, so only its end is looked at.
    """
    full = limits.nodes
    counts = [*(step - 1 for step in costs.steps if 0 < step - 1 < full), full]
    least = _least_drafting([costs.draft_us(k) for k in range(1, full + 1)], limits.depth, full)
    cells: list[tuple[float, int, int, int]] = []
    for nodes in counts:
        for depth in range(1, min(limits.depth, nodes) + 1):
            for internal in range(depth, nodes + 1):
                us = costs.cycle_us(float(least[depth, internal]), nodes + 1)
                bound = (1 + ROUNDING) * float(table.tokens[depth, nodes, internal]) / us
                cells.append((bound, depth, nodes, internal))
    return sorted(cells, key=lambda cell: (-cell[0], *cell[1:]))


def _least_drafting(pass_us: Sequence[float], depth: int, internal: int) -> Array:
    """[depth + 1, internal + 1] us: the cheapest way to spread internal nodes over levels, of which
    the first has one and each has one at least; inf where it cannot be done."""
    least = np.full((depth + 1, internal + 1), np.inf)
    least[1, 1] = pass_us[0]
    for level in range(2, depth + 1):
        for width, us in enumerate(pass_us, 1):
            before = least[level - 1, : internal + 1 - width] + us
            np.minimum(least[level, width:], before, out=least[level, width:])
    return least
