"""A token tree: what a cycle's draft knows of it, and how a verify pass looks at it.

Node 0, the root, is the last committed token. A node's row sees what is committed, its ancestors
and itself; its position is the root's plus its depth. A chain is a tree without siblings.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from profiles.words import NodeId
from runtime.backends import HIDDEN

Array = np.ndarray[Any, Any]

ROOT = NodeId(0)


class TokenTree:
    """The state of one draft: nodes in the order in which they were added, a parent before its
    children."""

    def __init__(self, root: int) -> None:
        """``root`` is the last committed token."""
        self.tokens = [root]
        self.parents = [ROOT]
        """The root's own entry is itself."""
        self.depths = [0]
        self._children: list[dict[int, NodeId]] = [{}]

    def __len__(self) -> int:
        """Nodes, the root included: rows of the verify pass."""
        return len(self.tokens)

    def add(self, parent: NodeId, token: int) -> NodeId:
        """A new child of ``parent``; ValueError if it has one of this token already."""
        siblings = self._children[parent]
        if token in siblings:
            raise ValueError(f"node {parent} has a child of token {token} already")
        node = NodeId(len(self.tokens))
        siblings[token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self._children.append({})
        return node

    def child(self, parent: NodeId, token: int) -> NodeId | None:
        """The child of ``parent`` that is ``token``."""
        return self._children[parent].get(token)

    def children(self, parent: NodeId) -> list[NodeId]:
        """In the order in which they were added."""
        return list(self._children[parent].values())

    def path(self, node: NodeId) -> list[NodeId]:
        """From the root to ``node``, both included."""
        found = [node]
        while node != ROOT:
            node = self.parents[node]
            found.append(node)
        return found[::-1]

    def path_tokens(self, node: NodeId) -> list[int]:
        """Tokens from the root's first successor to ``node``."""
        return [self.tokens[at] for at in self.path(node)[1:]]

    def subtree(self, nodes: Sequence[NodeId]) -> "TokenTree":
        """The tree of ``nodes`` alone: ascending, root first, each one's parent among them.

        Node i of the result is ``nodes[i]``.
        """
        result = TokenTree(self.tokens[ROOT])
        place = {ROOT: ROOT}
        for node in nodes[1:]:
            place[node] = result.add(place[self.parents[node]], self.tokens[node])
        return result


class Accepted(NamedTuple):
    """What the target agreed with."""

    path: list[NodeId]
    """Root first."""
    tokens: list[int]
    """To commit: those of the path behind the root, then the target's own next one."""


def follow(tree: TokenTree, chosen: Callable[[NodeId], int]) -> Accepted:
    """Walks down from the root for as long as the target's token is a child's.

    ``chosen`` gives the target's token after a node. It is asked along the path alone, each node
    once and root first, so that a head may run as it is asked.
    """
    path = [ROOT]
    tokens: list[int] = []
    while True:
        token = chosen(path[-1])
        tokens.append(token)
        node = tree.child(path[-1], token)
        if node is None:
            return Accepted(path, tokens)
        path.append(node)


def ancestry(tree: TokenTree) -> Array:
    """[n, n] bool: whether the row's node sees the column's: an ancestor, or itself."""
    sees = np.eye(len(tree), dtype=np.bool_)
    for node in range(1, len(tree)):
        sees[node] |= sees[tree.parents[node]]
    return sees


def tree_mask(tree: TokenTree, visible: int, capacity: int, width: int) -> Array:
    """Mask [width, capacity + width] of a pass over all nodes after ``visible`` committed slots.

    Rows past the tree are padding: they see the past and themselves, so that no sum is empty.
    """
    mask = np.full((width, capacity + width), HIDDEN, np.float32)
    mask[:, :visible] = 0
    own, count = mask[:, capacity:], len(tree)
    own[:count, :count][ancestry(tree)] = 0
    np.fill_diagonal(own, 0)
    return mask


def rows_mask(rows: Iterable[Sequence[int]], visible: int, capacity: int, width: int) -> Array:
    """Mask of a drafting pass: row i sees ``visible`` slots, its ancestors' slots ``rows[i]`` of
    scratch behind them, and itself, but no row beside it. Padding as in ``tree_mask``."""
    mask = np.full((width, capacity + width), HIDDEN, np.float32)
    mask[:, :visible] = 0
    for row, slots in enumerate(rows):
        mask[row, slots] = 0
    np.fill_diagonal(mask[:, capacity:], 0)
    return mask


def tree_positions(tree: TokenTree, start: int, width: int) -> Array:
    """Positions [width] of the rows, the root being at ``start``; padding repeats the last."""
    depths = tree.depths + [tree.depths[-1]] * (width - len(tree))
    return start + np.array(depths, np.int64)


def nodes_by_depth(tree: TokenTree) -> tuple[int, ...]:
    """Nodes at depth 1, 2, ..."""
    counts = [0] * max(tree.depths)
    for depth in tree.depths[1:]:
        counts[depth - 1] += 1
    return tuple(counts)
