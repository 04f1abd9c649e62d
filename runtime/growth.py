"""Online growth of a token tree by what the draft holds for likely (Lever, Alg. 1).

A node's reach is the probability that the target's path comes through it: its parent's reach times
its own calibrated chance. G = 1 + the sum of the reaches is what a cycle is expected to commit, C
its time; growth maximises G / C.

Lever inserts a node v while b(v) / dC(v) > G / C, which says that G / C rises. Where verify passes
are padded, dC is 0 inside a width step and a jump at its end, so no single node says anything:
here G / C of whole steps is compared. Of the candidates that are known the best to verify are
simply the likeliest ones, since reach never grows down a path: so the only decision is whether, and
of how many nodes at once, to draft further.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from profiles.words import NodeId
from runtime.drafting import Drafter
from runtime.feedback import Feedback
from runtime.plan_cycles import Growth
from runtime.sampling import Candidates
from runtime.tree import ROOT, TokenTree

HORIZON = 8
"""Expanded nodes that are thought ahead, but two passes at least: the children of one node need not
fill the next width step."""
RISE = 1 + 1e-9
"""What G / C has to rise by, lest rounding decide."""


class Times(Protocol):
    """What a cycle takes besides drafting."""

    @property
    def steps(self) -> Sequence[int]:
        """Rows at which a width step ends, ascending: up to there a pass costs the same."""
        ...

    def verify_us(self, rows: int, ahead_us: float, /) -> float:
        """The verify pass with its head and the cycle's constants.

        ``ahead_us`` after the one before began; a streamed target's flash has read that long.
        """
        ...


class Grown(NamedTuple):
    """A draft that is ready to be verified."""

    verified: TokenTree
    """Only what is worth its width step; its node i is ``nodes[i]`` of the drafted tree."""
    nodes: list[NodeId]
    """Translates a path in ``verified`` for ``Drafter.accept``."""
    ranks: list[int]
    """By node of ``verified``; the root's is 0."""
    chances: list[float]
    """Calibrated acceptance given that the parent is accepted, uncorrected; the root's is 1."""
    expected_tokens: float
    """G: committed tokens, the target's own included."""
    draft_us: float
    """Predicted time of the drafting passes."""


class _Node:
    """A candidate, whether it is in the tree or not."""

    __slots__ = ("chance", "depth", "id", "parent", "rank", "reach", "token")

    def __init__(
        self, parent: "_Node | None", token: int, rank: int, chance: float, reach: float
    ) -> None:
        self.parent = parent
        self.token = token
        self.rank = rank
        self.chance = chance
        self.reach = reach
        self.depth = parent.depth + 1 if parent else 0
        self.id = ROOT if parent is None else None

    def insert(self, tree: TokenTree) -> NodeId:
        """Its place in the tree, made if need be, with all above it."""
        if self.id is None:
            parent = ROOT if self.parent is None else self.parent.insert(tree)
            self.id = tree.add(parent, self.token)
        return self.id


def grow(
    tree: TokenTree,
    growth: Growth,
    drafter: Drafter,
    times: Times,
    feedback: Feedback,
    *,
    room_depth: int,
    context: int,
    ends: Collection[int] = (),
) -> Grown:
    """Grow ``tree``, a lone root, until drafting further no longer raises G / C.

    Args:
        tree: Takes what is drafted, which may be more than is worth verifying.
        growth: Envelope and calibrated probabilities.
        drafter: Has begun.
        times: Cycle times to look up.
        feedback: Corrects the probabilities; told here what is drafted, elsewhere what came of it.
        room_depth: Most tokens that a path may have.
        context: Committed tokens.
        ends: Tokens that nothing follows.
    """
    state = _Growing(growth, times, feedback, min(room_depth, growth.max_depth), ends)
    while batch := state.next_batch(drafter, context):
        nodes = [node.insert(tree) for node in batch]
        found = drafter.expand(tree, nodes, growth.branch)
        state.draft_us += drafter.price_us(len(batch), context)
        for node, candidates in zip(batch, found, strict=True):
            state.add(node, candidates)
    return state.harvest(tree)


class _Growing:
    """Known candidates, likeliest first, and those whose successors are not known yet."""

    def __init__(
        self,
        growth: Growth,
        times: Times,
        feedback: Feedback,
        max_depth: int,
        ends: Collection[int],
    ) -> None:
        self.draft_us = 0.0
        self._growth = growth
        self._times = times
        self._feedback = feedback
        self._max_depth = max_depth
        self._ends = ends
        self._root = _Node(None, 0, 0, 1.0, 1.0)
        self._known: list[_Node] = []
        self._expanded = 0
        self._frontier = [self._root] if max_depth > 0 else []

    def add(self, parent: _Node, candidates: Candidates) -> None:
        """The successors of a node that was expanded."""
        left = 1.0
        pairs = zip(candidates.ids, candidates.probabilities, strict=True)
        for rank, (token, probability) in enumerate(pairs):
            chance = self._feedback.calibrated(rank, probability)
            self._feedback.notice(rank, chance)
            # At most one sibling is right
            share = min(self._feedback.corrected(rank, chance), left)
            left -= share
            node = _Node(parent, token, rank, chance, parent.reach * share)
            self._known.append(node)
            if node.depth < self._max_depth and token not in self._ends:
                self._frontier.append(node)
        # Stable, so that a parent stays before a child that is as likely
        self._known.sort(key=lambda node: -node.reach)
        del self._known[self._growth.max_nodes :]
        # Children of the others would not be among the best
        worst = self._known[-1].reach if len(self._known) == self._growth.max_nodes else 0.0
        self._frontier = [node for node in self._frontier if node.reach > worst]
        self._frontier.sort(key=lambda node: -node.reach)

    def next_batch(self, drafter: Drafter, context: int) -> list[_Node]:
        """The frontier nodes to expand in one pass; none if that would not raise G / C.

        Of one node, two, four, ... up to the envelope's batch the number is taken that G / C rises
        highest with when it is gone on with: so nodes are batched only where that beats a series.
        """
        _, best = self._cut([node.reach for node in self._known], self.draft_us)
        chosen, usual = 0, self._usual()
        for count in _sizes(self._growth.batch) if self._frontier else ():
            promise = self._promise(count, usual, drafter, context)
            if promise > best * RISE:
                best, chosen = promise, count
        # A drafter has scratch for as many nodes as may be verified
        batch = self._frontier[: min(chosen, self._growth.max_nodes - self._expanded)]
        del self._frontier[: len(batch)]
        self._expanded += len(batch)
        return batch

    def harvest(self, tree: TokenTree) -> Grown:
        """The best known candidates down to the width step that pays."""
        count, _ = self._cut([node.reach for node in self._known], self.draft_us)
        picked = sorted(
            ((node.insert(tree), node) for node in self._known[:count]), key=lambda pair: pair[0]
        )
        nodes = [ROOT, *(at for at, _ in picked)]
        return Grown(
            verified=tree.subtree(nodes),
            nodes=nodes,
            ranks=[0, *(node.rank for _, node in picked)],
            chances=[1.0, *(node.chance for _, node in picked)],
            expected_tokens=1 + sum(node.reach for _, node in picked),
            draft_us=self.draft_us,
        )

    def _cut(self, reaches: Sequence[float], draft_us: float) -> tuple[int, float]:
        """Of candidates with these reaches, descending: how many to verify, and G / C with them."""
        sums = list(itertools.accumulate(reaches, initial=1.0))
        full = len(reaches)
        counts = [*(step - 1 for step in self._times.steps if 0 < step - 1 < full), full]
        best, at = sums[0] / (draft_us + self._times.verify_us(1, draft_us)), 0
        for count in counts:
            ratio = sums[count] / (draft_us + self._times.verify_us(count + 1, draft_us))
            if ratio > best * RISE:
                best, at = ratio, count
        return at, best

    def _promise(self, count: int, usual: Sequence[float], drafter: Drafter, context: int) -> float:
        """Best G / C within the horizon in passes of ``count`` nodes that find what is usual."""
        reaches = [node.reach for node in self._known]
        frontier = [(node.reach, node.depth) for node in self._frontier]
        us, best = self.draft_us, 0.0
        for _ in range(max(HORIZON // count, 2)):
            batch, frontier = frontier[:count], frontier[count:]
            if not batch:
                break
            us += drafter.price_us(len(batch), context)
            children = [(reach * share, depth + 1) for reach, depth in batch for share in usual]
            reaches += [reach for reach, _ in children]
            reaches.sort(reverse=True)
            del reaches[self._growth.max_nodes :]
            frontier += [child for child in children if child[1] < self._max_depth]
            frontier.sort(reverse=True)
            best = max(best, self._cut(reaches, us)[1])
        return best

    def _usual(self) -> list[float]:
        """Expected acceptance of a node's successors, by rank."""
        left, shares = 1.0, list[float]()
        for rank in range(self._growth.branch):
            shares.append(min(self._feedback.usual(rank), left))
            left -= shares[-1]
        return shares


def _sizes(batch: int) -> list[int]:
    """1, 2, 4, ... and the batch itself."""
    powers = itertools.takewhile(lambda size: size < batch, (1 << bit for bit in itertools.count()))
    return [*powers, batch]
