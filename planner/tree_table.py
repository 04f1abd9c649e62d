"""The static trees that commit most, for every depth, number of nodes and of internal nodes.

A node's reach is the product of acceptances down its path, and an acceptance depends on depth and
rank alone. So the best subtree below a node is the same wherever the node lies at its depth: a
dynamic programme from the leaves up, over (nodes below, internal nodes), whose step is a max-plus
convolution with the next child's subtree. All depth limits are done at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from runtime.plan_cycles import TreeTemplate

Array = np.ndarray[Any, Any]


class TreeTable:
    """What the best trees commit, and what they look like.

    ``tokens`` [depth + 1, nodes + 1, internal + 1]: most expected tokens of a cycle, the target's
    own included, by most levels below the root, most nodes without the root and most internal nodes
    (the root counts among these if it has children).
    """

    def __init__(
        self,
        acceptance: Sequence[Sequence[float]],
        nodes: int,
        depth: int,
        branch: int,
        internal: int | None = None,
    ) -> None:
        """``acceptance`` by depth from 1, then by rank, given that the parent is accepted; depths
        beyond repeat the last."""
        self._rates = rate_table(acceptance, depth, branch)
        self._nodes = nodes
        self._internal = min(internal or nodes, nodes)
        self._best: list[Array] = []
        """By depth of a node: what lies below it commits, in the axes of ``tokens``."""
        self._children: list[list[Array]] = []
        """By depth of a node and number of its children, [limits above the depth, ...]: likewise,
        but the node itself is not counted among the internal ones."""
        self._fill(depth)
        self.tokens = 1 + self._best[0]

    def template(self, depth: int, nodes: int, internal: int) -> TreeTemplate:
        """A tree of ``tokens[depth, nodes, internal]``, level by level."""
        parents: list[int] = []
        ranks: list[int] = []
        queue = [(0, 0, nodes, internal)]
        for node, level, below, inner in queue:
            for rank, (n, i) in enumerate(self._split(depth, level, below, inner)):
                parents.append(node)
                ranks.append(rank)
                queue.append((len(parents), level + 1, n, i))
        return TreeTemplate(tuple(parents), tuple(ranks))

    def _fill(self, depth: int) -> None:
        shape = (depth + 1, self._nodes + 1, self._internal + 1)
        below = np.zeros(shape, np.float32)
        self._best = [below]
        for level in reversed(range(depth)):
            child = below[level + 1 :]
            stages = _with_children(child, self._rates[level], self._nodes - level)
            below = np.zeros(shape, np.float32)
            found = below[level + 1 :, :, 1:]
            for stage in stages[1:]:
                np.maximum(found, stage[:, :, :-1], out=found)
            self._best.insert(0, below)
            self._children.insert(0, stages)

    def _split(self, depth: int, level: int, nodes: int, internal: int) -> list[tuple[int, int]]:
        """What the children of a node at ``level`` get, by rank: (nodes, internal nodes)."""
        if level >= depth or internal < 1 or self._best[level][depth, nodes, internal] <= 0:
            return []
        stages = [stage[depth - level - 1] for stage in self._children[level]]
        child = self._best[level + 1][depth]
        left = internal - 1
        count = int(np.argmax([stage[nodes, left] for stage in stages]))
        shares: list[tuple[int, int]] = []
        for rank in reversed(range(count)):
            gain = self._rates[level, rank] * (1 + child[:nodes, : left + 1])
            sums = stages[rank][:nodes, : left + 1][::-1, ::-1] + gain
            n, i = np.unravel_index(int(sums.argmax()), sums.shape)
            shares.append((int(n), int(i)))
            nodes, left = nodes - 1 - int(n), left - int(i)
        return shares[::-1]


class _Part(NamedTuple):
    """A size of subtree that commits more than every smaller one, under some depth limit."""

    nodes: int
    internal: int
    first: int
    """First depth limit under which it does."""


def _with_children(child: Array, rates: Array, nodes: int) -> list[Array]:
    """Best of 0, 1, ... children, [limits, nodes + 1, internal + 1]; -inf where they do not fit.

    ``child`` is what lies below one child commits, in the same axes; no more than ``nodes`` in all.
    """
    stages = [np.zeros_like(child)]
    parts = _parts(child)
    sorted_ranks = bool((np.diff(rates) <= 0).all())
    most = child.shape[2] - 1
    for rank, rate in enumerate(rates):
        before, gain = stages[-1], rate * (1 + child)
        after = np.full_like(child, -np.inf)
        for part in parts:
            n, i, first = part
            if n >= nodes - rank or (sorted_ranks and not _fits(part, rank, nodes, most)):
                continue
            found = after[first:, n + 1 + rank :, i:]
            reached = before[first:, rank : child.shape[1] - 1 - n, : most + 1 - i]
            np.maximum(found, reached + gain[first:, n, i, None, None], out=found)
        stages.append(after)
    return stages


def _parts(child: Array) -> list[_Part]:
    more = np.ones(child.shape, np.bool_)
    more[:, 1:] &= child[:, 1:] > child[:, :-1]
    more[:, :, 1:] &= child[:, :, 1:] > child[:, :, :-1]
    more[:, 0, 0] = True
    first = more.argmax(axis=0)
    return [_Part(int(n), int(i), int(first[n, i])) for n, i in np.argwhere(more.any(axis=0))]


def _fits(part: _Part, rank: int, nodes: int, internal: int) -> bool:
    """Whether some best tree may have ``part`` below a child of this rank.

    Where a better rank is no less likely, its subtree commits no less, or the two would be swapped.
    If it were as small in both respects, a copy of it would do instead of ``part``. So of the
    ``rank`` siblings before, each has at least as many nodes or more internal nodes.
    """
    return any(
        (wider + 1) * (part.nodes + 1) <= nodes
        and part.internal + (rank - wider) * (part.internal + 1) <= internal
        for wider in range(rank + 1)
    )


def rate_table(acceptance: Sequence[Sequence[float]], depth: int, branch: int) -> Array:
    """[depth, at most branch] float32; the last measured depth repeats."""
    rows = [list(acceptance[min(level, len(acceptance) - 1)][:branch]) for level in range(depth)]
    return np.array(rows, np.float32)
