"""Who fills a token tree, and the two shapes that are known beforehand: chain and static template.

A drafter says what may follow the nodes of a tree. Growth that follows the draft's probabilities is
in ``runtime.growth``.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import numpy as np

from profiles.words import AttentionKernel, NodeId
from runtime.kv_cache import KvCache
from runtime.ngram import NgramIndex
from runtime.plan_cycles import TreeTemplate
from runtime.plan_tables import PassKind
from runtime.pricing import PriceList
from runtime.sampling import Candidates, Sampling, ranked
from runtime.target import Array, Target
from runtime.tree import ROOT, TokenTree, rows_mask

__all__ = ["Candidates", "Drafter", "NgramDrafter", "SkipDrafter", "fill_chain", "fill_static"]


class Drafter(Protocol):
    """Proposes tokens for the nodes of one tree at a time: ``begin``, ``expand``, ``accept``."""

    @property
    def passes(self) -> int:
        """Of a model, so far; look-ups have none."""
        ...

    def begin(self, tokens: Sequence[int], /) -> None:
        """Start a draft after these committed tokens, whatever was committed since the last one.

        The tree's root is the last of them.
        """
        ...

    def expand(self, tree: TokenTree, nodes: Sequence[NodeId], count: int) -> list[Candidates]:
        """At most ``count`` successors of each of ``nodes``, in one pass.

        The root comes first, in a call of its own; later every node's parent was expanded in an
        earlier call, and no node is expanded twice.
        """
        ...

    def accept(self, tree: TokenTree, path: Sequence[NodeId], /) -> None:
        """The target agreed with ``path``, root first: keep what of the state is right now.

        Nodes of the path need not have been expanded.
        """
        ...

    def price_us(self, rows: int, context: int, /) -> float:
        """Predicted device time of a pass over ``rows`` nodes, with its head and its constant."""
        ...


class NgramDrafter:
    """What followed the latest earlier occurrence of the path's last tokens.

    Each length of suffix that occurred before names one candidate, the longest first.
    """

    def __init__(
        self,
        ngram_min: int,
        ngram_max: int,
        prices: PriceList,
        probabilities: Sequence[float] = (1.0, 0.0),
    ) -> None:
        """``probabilities`` are what is said of a candidate by rank; the last one repeats."""
        self.passes = 0
        self._index = NgramIndex(ngram_min, ngram_max)
        self._prices = prices
        self._probabilities = tuple(probabilities)

    def begin(self, tokens: Sequence[int], /) -> None:
        """Index what is new."""
        self._index.extend(tokens[len(self._index) :])

    def expand(self, tree: TokenTree, nodes: Sequence[NodeId], count: int) -> list[Candidates]:
        """Look every node's suffixes up; a node may have no candidate."""
        return [self._candidates(tree.path_tokens(node), count) for node in nodes]

    def accept(self, _tree: TokenTree, _path: Sequence[NodeId], /) -> None:
        """Nothing to do: the next ``begin`` has the tokens."""

    def price_us(self, rows: int, _context: int, /) -> float:
        """One lookup for each node, whatever the context."""
        return rows * self._prices.ngram_us

    def _candidates(self, path: Sequence[int], count: int) -> Candidates:
        ids = tuple(dict.fromkeys(self._index.continuations(path)))[:count]
        known, last = self._probabilities[: len(ids)], self._probabilities[-1]
        return Candidates(ids, (*known, *([last] * (len(ids) - len(known)))))


class SkipDrafter:
    """The target under a skip mask (KnapSpec); trees need exact attention, chains do not.

    Rows of expanded nodes are scratch behind the target's cursor; nothing of them is kept.
    """

    def __init__(
        self,
        target: Target,
        cache: KvCache,
        active: Array,
        mask: int,
        sampling: Sampling,
        prices: PriceList,
        most_nodes: int,
    ) -> None:
        """``active`` are the switches of the plan's skip mask number ``mask``; of ``most_nodes``
        nodes at most a tree is expanded."""
        self.passes = 0
        self._target = target
        self._cache = cache
        self._active = active
        self._mask = mask
        self._sampling = sampling
        self._prices = prices
        self._most = most_nodes
        self._slots: dict[NodeId, int] = {}
        """Scratch slot of each expanded node."""

    def begin(self, tokens: Sequence[int], /) -> None:
        """The cache holds all ``tokens`` but the last, as it does between cycles."""
        if len(tokens) != self._cache.length + 1:
            raise ValueError(f"{self._cache.length} rows do not precede {len(tokens)} tokens")
        self._slots.clear()
        # All at once: a cache that grows keeps no scratch
        self._cache.reserve(self._cache.length + self._most)

    def expand(self, tree: TokenTree, nodes: Sequence[NodeId], count: int) -> list[Candidates]:
        """One pass over ``nodes``."""
        self.passes += 1
        start = self._cache.length
        if self._target.attention is AttentionKernel.EXACT:
            hidden = self._expand(tree, nodes)
        else:
            # Of a chain: in place, the rows before it being those of its ancestors
            at, token = start + tree.depths[nodes[0]], tree.tokens[nodes[0]]
            hidden = self._target.run_chain([token], at, self._cache, self._active).hidden
        logits = self._target.logits(hidden)
        return [
            ranked(row, start + tree.depths[node] + 1, self._sampling, count)
            for row, node in zip(logits, nodes, strict=True)
        ]

    def _expand(self, tree: TokenTree, nodes: Sequence[NodeId]) -> Array:
        cache, width = self._cache, len(nodes)
        start, first = cache.length, cache.length + len(self._slots)
        above = [[self._slots[at] for at in tree.path(node)[:-1]] for node in nodes]
        mask = rows_mask(above, start, cache.capacity, width)
        positions = np.array([start + tree.depths[node] for node in nodes])
        hidden = self._target.embed([tree.tokens[node] for node in nodes])
        result = self._target.run(hidden, positions, mask, cache, self._active)
        cache.write(first, result.keys, result.values, slice(0, width))
        self._slots |= {node: first + row for row, node in enumerate(nodes)}
        return result.hidden

    def accept(self, _tree: TokenTree, _path: Sequence[NodeId], /) -> None:
        """Drop all rows: the target has computed its own."""
        self._slots.clear()

    def price_us(self, rows: int, context: int, /) -> float:
        """From the plan's table of drafting passes under this mask."""
        return self._prices.pass_us(PassKind.DRAFT, self._mask, rows, context) + (
            self._prices.cycle_us
        )


def fill_chain(
    tree: TokenTree, drafter: Drafter, length: int, context: int, ends: Collection[int] = ()
) -> float:
    """Hang a chain of up to ``length`` tokens on the root; one of ``ends`` is the last.

    Returns:
        Predicted time of the drafting passes, us; ``context`` are the committed tokens.
    """
    node, us = ROOT, 0.0
    for depth in range(length):
        (found,) = drafter.expand(tree, [node], 1)
        us += drafter.price_us(1, context + depth)
        if not found.ids:
            break
        node = tree.add(node, found.ids[0])
        if found.ids[0] in ends:
            break
    return us


def fill_static(
    tree: TokenTree,
    template: TreeTemplate,
    drafter: Drafter,
    room_depth: int,
    context: int,
    ends: Collection[int] = (),
) -> float:
    """Hang ``template`` on the root, level by level: one pass over all internal nodes of a level.

    What lies below ``room_depth`` or one of ``ends`` is left out, and so is a node of a rank that
    the drafter has no candidate for, with its subtree. Returns as ``fill_chain``.
    """
    children = _children(template)
    level, us = {0: ROOT}, 0.0
    for depth in range(room_depth):
        internal = {
            at: node
            for at, node in level.items()
            if at in children and (node == ROOT or tree.tokens[node] not in ends)
        }
        if not internal:
            break
        count = max(template.ranks[at - 1] for i in internal for at in children[i]) + 1
        found = drafter.expand(tree, list(internal.values()), count)
        us += drafter.price_us(len(internal), context + depth)
        level = {
            at: tree.add(node, candidates.ids[template.ranks[at - 1]])
            for (i, node), candidates in zip(internal.items(), found, strict=True)
            for at in _within(children[i], template, candidates)
        }
    return us


def _children(template: TreeTemplate) -> dict[int, list[int]]:
    """The children of each internal node, by rank."""
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(template.parents):
        children.setdefault(parent, []).append(index + 1)
    return {
        node: sorted(found, key=lambda at: template.ranks[at - 1])
        for node, found in children.items()
    }


def _within(nodes: Iterable[int], template: TreeTemplate, candidates: Candidates) -> list[int]:
    return [at for at in nodes if template.ranks[at - 1] < len(candidates.ids)]
