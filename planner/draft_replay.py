"""Decoding known texts with a draft model: cycle after cycle without a pass of the target.

The known next tokens decide what is accepted. Chains and static trees follow from the ranks that
calibration keeps, since a draft goes on only where it was right; growth that follows probabilities,
also down paths that turn out wrong, is drafted for real.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from planner.corpus import Text
from planner.draft_acceptance import TextRanks
from profiles.words import NodeId
from runtime.draft_model import DraftModelDrafter
from runtime.feedback import Feedback
from runtime.growth import Times, grow
from runtime.plan_cycles import Growth, TreeTemplate
from runtime.sampling import Candidates
from runtime.tree import TokenTree, follow


class Replayed(msgspec.Struct, frozen=True):
    """One cycle of decoding a known text."""

    rows: int
    """Of the verify pass: drafted nodes, and the root."""
    levels: tuple[int, ...]
    """Rows of each drafting pass, in order; catching up with the text is part of the first."""
    accepted: int


def replay_chain(text: TextRanks, length: int) -> list[Replayed]:
    """Cycles of chains of ``length`` over the whole continuation."""
    chain = TreeTemplate(tuple(range(length)), (0,) * length)
    return replay_static(text, chain)


def replay_static(text: TextRanks, template: TreeTemplate) -> list[Replayed]:
    """Cycles of a static tree over the whole continuation; what has no room is not drafted.

    What the runtime does with the deployed graphs, but for the rounding by which one row alone
    differs from the wide passes of calibration, where attention is fused, and for wrong guesses
    that end a text, below which nothing is drafted.
    """
    child = {
        (parent, rank): node
        for node, (parent, rank) in enumerate(
            zip(template.parents, template.ranks, strict=True), start=1
        )
    }
    depths = [0]
    for parent in template.parents:
        depths.append(depths[parent] + 1)
    internal = set(template.parents)
    cycles: list[Replayed] = []
    done, behind = 0, 0
    while done < len(text.ranks):
        # The target's own token takes one place
        room = len(text.ranks) - done - 1
        drafted = [depth for depth in depths if depth <= room]
        expanded = Counter(depths[node] for node in internal if depths[node] < room)
        levels = [expanded[depth] for depth in sorted(expanded)]
        if levels:
            levels[0] += behind
        node, accepted = 0, 0
        while accepted < room and (node, text.ranks[done + accepted]) in child:
            node = child[node, text.ranks[done + accepted]]
            accepted += 1
        # A leaf has no row in the draft's cache
        behind = int(node not in internal or depths[node] >= room)
        cycles.append(Replayed(len(drafted), tuple(levels), accepted))
        done += accepted + 1
    return cycles


class Recorded:
    """A drafter that notes the rows of its passes; reading the prompt is not drafting."""

    def __init__(self, drafter: DraftModelDrafter, prompt_tokens: int) -> None:
        self.passes = 0
        self.levels: list[int] = []
        self._drafter = drafter
        self._prompt_tokens = prompt_tokens
        self._new = 0
        self.accept = drafter.accept
        self.price_us = drafter.price_us

    def begin(self, tokens: Sequence[int], /) -> None:
        """As ``Drafter.begin``."""
        self.levels = []
        self._new = len(tokens) - self._prompt_tokens
        self._drafter.begin(tokens)

    def expand(self, tree: TokenTree, nodes: Sequence[NodeId], count: int) -> list[Candidates]:
        """As ``Drafter.expand``."""
        self.passes += 1
        self.levels.append(min(self._drafter.behind, self._new) + len(nodes))
        return self._drafter.expand(tree, nodes, count)


def _nothing(_path: Sequence[NodeId]) -> None:
    pass


class Drafted(NamedTuple):
    """A filled tree."""

    verified: TokenTree
    nodes: Sequence[NodeId]
    """In the tree that was drafted, of each node that is verified."""
    settle: Callable[[Sequence[NodeId]], None] = _nothing
    """To be told the accepted path through ``verified``."""


Drafting = Callable[[TokenTree, Recorded, int, int], Drafted]
"""Fills a tree that is a lone root: (tree, drafter, most depth, committed tokens) -> the draft."""


def replay_drafting(text: Text, drafter: DraftModelDrafter, draft: Drafting) -> list[Replayed]:
    """Real drafting over the whole continuation of a text."""
    recorded = Recorded(drafter, text.prompt_tokens)
    cycles: list[Replayed] = []
    done, total = text.prompt_tokens, len(text.tokens)
    while done < total:
        tokens = text.tokens[:done]
        recorded.begin(tokens)
        tree = TokenTree(tokens[-1])
        verified, nodes, settle = draft(tree, recorded, total - done - 1, done)
        path = follow(verified, partial(_said, verified, text.tokens[done:])).path
        recorded.accept(tree, [nodes[at] for at in path])
        settle(path)
        cycles.append(Replayed(len(verified), tuple(recorded.levels), len(path) - 1))
        done += len(path)
    return cycles


def _said(tree: TokenTree, ahead: Sequence[int], node: NodeId) -> int:
    """The target's token after ``node``, which lies on its path."""
    return ahead[tree.depths[node]]


def replay_online(
    text: Text,
    drafter: DraftModelDrafter,
    growth: Growth,
    times: Callable[[int], Times],
    ends: Collection[int] = (),
) -> list[Replayed]:
    """Cycles of online growth; ``times`` are those of a cycle after so many committed tokens.

    Feedback begins afresh, as in a generation.
    """
    feedback = Feedback(growth)

    def draft(tree: TokenTree, recorded: Recorded, room: int, context: int) -> Drafted:
        grown = grow(
            *(tree, growth, recorded, times(context), feedback),
            room_depth=room,
            context=context,
            ends=ends,
        )
        settle = partial(feedback.observe, grown.verified, grown.ranks, grown.chances)
        return Drafted(grown.verified, grown.nodes, settle)

    return replay_drafting(text, drafter, draft)
