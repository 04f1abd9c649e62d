"""What a draft model is worth on known texts: ranks of the target's next tokens, and replays.

A draft that is right so far has read the very tokens that the target says. So one teacher-forced
pass over a text, in the deployed graphs, tells at every position what any draft would propose
there, from whatever root it came: a chain or a static tree can be replayed from the ranks alone.
Only growth that follows probabilities, also down paths that turn out wrong, has to be drafted.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from planner.corpus import Text
from planner.prompt_file import Split
from profiles.words import NodeId
from runtime.draft_model import CHUNK_ROWS, DraftModelDrafter, DraftRows, known_ids
from runtime.plan import DraftModel
from runtime.plan_cycles import TreeTemplate
from runtime.pricing import PriceList
from runtime.sampling import GREEDY, Candidates, ranked
from runtime.target import Target
from runtime.tree import TokenTree, follow

TOP = 8
"""Candidates whose rank is known; of all others it is only known that they are beyond."""
BANDS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Lower edges of the bands of draft probability."""
VERSION = 1
"""Part of the digest: raise it when what is measured changes its meaning."""


class TextRanks(msgspec.Struct, frozen=True):
    """A draft model beside the target on one text, by ``Text.roots``."""

    id: str
    category: str
    ranks: tuple[int, ...]
    """Of the target's next token among the draft's candidates; ``TOP`` if it is none of them."""
    probabilities: tuple[tuple[float, ...], ...]
    """The draft's, of its candidates, the likeliest first."""


class DraftRanks(msgspec.Struct):
    """What a calibration keeps of a draft model."""

    digest: str
    split: Split
    texts: list[TextRanks]
    """The first ones of the split: it may have been interrupted."""


class Replayed(msgspec.Struct, frozen=True):
    """One cycle of decoding a known text."""

    rows: int
    """Of the verify pass: drafted nodes, and the root."""
    levels: tuple[int, ...]
    """Rows of each drafting pass, in order; catching up with the text is part of the first."""
    accepted: int


def draft_digest(draft: DraftModel) -> str:
    """SHA-256 of everything that the proposals of a draft model depend on."""
    spec = msgspec.structs.replace(draft.model, name="")
    files = [draft.weights.sha256, *(graph.artefact.sha256 for graph in draft.graphs)]
    parts = [VERSION, TOP, spec, str(draft.formats), draft.attention, files]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


class DraftReading:
    """A draft model, opened to read texts along with the target."""

    def __init__(self, draft: DraftModel, model: Target, context: int, vocab: int) -> None:
        """``model`` are the sessions of ``draft``, ``vocab`` is the target's."""
        self.digest = draft_digest(draft)
        self._model = model
        self._rows = DraftRows(draft, context)
        self._vocab = vocab

    def ranks(self, text: Text) -> TextRanks:
        """One teacher-forced pass over ``text``, in pieces."""
        found = self._candidates(text)
        return TextRanks(
            text.id,
            text.category,
            tuple(
                candidates.ids.index(token) if token in candidates.ids else TOP
                for candidates, token in zip(found, text.tokens[text.prompt_tokens :], strict=True)
            ),
            tuple(tuple(round(p, 6) for p in candidates.probabilities) for candidates in found),
        )

    def drafter(self, prices: PriceList) -> DraftModelDrafter:
        """One that drafts greedily, at these prices."""
        return DraftModelDrafter(self._model, self._rows, prices, GREEDY, self._vocab)

    def _candidates(self, text: Text) -> list[Candidates]:
        """Those after each of the text's roots."""
        self._rows.keep(())
        model, cache, found = self._model, self._rows.cache, list[Candidates]()
        last = len(text.tokens) - 1
        for start in range(0, last, CHUNK_ROWS):
            ids = text.tokens[start : min(start + CHUNK_ROWS, last)]
            result = model.run_chain(known_ids(ids, model.spec.vocab), start, cache)
            cache.commit(result.keys, result.values, slice(0, len(ids)))
            judged = max(text.roots.start - start, 0)
            if judged < len(ids):
                logits = model.logits(result.hidden[judged:])[:, : self._vocab]
                found += [ranked(row, 0, GREEDY, TOP) for row in logits]
        return found


def find_ranks(known: Iterable[DraftRanks], digest: str, split: Split) -> DraftRanks | None:
    """What is known of a draft model on ``split``."""
    return next((one for one in known if (one.digest, one.split) == (digest, split)), None)


def merged_ranks(one: Sequence[DraftRanks], other: Sequence[DraftRanks]) -> list[DraftRanks]:
    """All that is in either; of what both have, whatever went further."""
    found = {(ranks.digest, ranks.split): ranks for ranks in other}
    for ranks in one:
        rival = found.get((ranks.digest, ranks.split))
        if rival is None or len(rival.texts) <= len(ranks.texts):
            found[ranks.digest, ranks.split] = ranks
    return list(found.values())


class RankCounts(msgspec.Struct, frozen=True):
    """How often the target's token has a rank among the draft's candidates, by depth 1, 2, ..."""

    tried: tuple[int, ...]
    """Roots from which the draft came so far, with a known next token."""
    hits: tuple[tuple[int, ...], ...]
    """By depth, then by rank below ``TOP``."""

    def rates(self, rank: int) -> tuple[float, ...]:
        """Acceptance of a rank by depth, given that all before was accepted; one pseudo-miss."""
        return tuple(h[rank] / (t + 1) for t, h in zip(self.tried, self.hits, strict=True))


def rank_counts(texts: Iterable[TextRanks], depth: int, reach: int = 1) -> RankCounts:
    """Drafts from every root whose path so far had ranks below ``reach``: 1 is a chain."""
    tried, hits = [0] * depth, [[0] * TOP for _ in range(depth)]
    for text in texts:
        for root in range(len(text.ranks)):
            for level, rank in enumerate(text.ranks[root : root + depth]):
                tried[level] += 1
                if rank < TOP:
                    hits[level][rank] += 1
                if rank >= reach:
                    break
    return RankCounts(tuple(tried), tuple(tuple(row) for row in hits))


def rank_paths(texts: Iterable[TextRanks], depth: int) -> dict[tuple[int, ...], int]:
    """How many roots the target's text leaves along each path of ranks, up to ``depth`` long.

    Divided by the count of the empty path this is the chance that a node of a static tree is
    accepted, jointly with all above it: the expected tokens of a tree are 1 and the sum over it.
    """
    paths: Counter[tuple[int, ...]] = Counter()
    for text in texts:
        for root in range(len(text.ranks)):
            ahead = text.ranks[root : root + depth]
            known = next((i for i, rank in enumerate(ahead) if rank == TOP), len(ahead))
            paths.update(ahead[:length] for length in range(known + 1))
    return dict(paths)


def band_hits(
    texts: Iterable[TextRanks], bands: Sequence[float] = BANDS, ranks: int = TOP
) -> tuple[tuple[float, ...], ...]:
    """Measured acceptance of a candidate by rank, then by band of its draft probability.

    Each cell has one pseudo-trial at the middle of its band, so an empty one believes the draft.
    """
    ends = [*bands[1:], 1.0]
    tried = [[1.0] * len(bands) for _ in range(ranks)]
    hits = [[(low + high) / 2 for low, high in zip(bands, ends, strict=True)] for _ in range(ranks)]
    for text in texts:
        for right, probabilities in zip(text.ranks, text.probabilities, strict=True):
            for rank, probability in enumerate(probabilities[:ranks]):
                band = band_of(bands, probability)
                tried[rank][band] += 1
                hits[rank][band] += rank == right
    return tuple(
        tuple(min(h / t, 1.0) for h, t in zip(*row, strict=True))
        for row in zip(hits, tried, strict=True)
    )


def band_of(bands: Sequence[float], probability: float) -> int:
    """Index of the band that ``probability`` lies in."""
    return max(sum(edge <= probability for edge in bands) - 1, 0)


def replay_chain(text: TextRanks, length: int) -> list[Replayed]:
    """Cycles of chains of ``length`` over the whole continuation."""
    chain = TreeTemplate(tuple(range(length)), (0,) * length)
    return replay_static(text, chain)


def replay_static(text: TextRanks, template: TreeTemplate) -> list[Replayed]:
    """Cycles of a static tree over the whole continuation; what has no room is not drafted.

    What the runtime does with the deployed graphs, but for the rounding by which one row alone
    differs from the wide passes of calibration, where attention is fused.
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
        self.levels: list[int] = []
        self._drafter = drafter
        self._prompt_tokens = prompt_tokens
        self._new = 0
        self.accept = drafter.accept
        self.price_us = drafter.price_us

    @property
    def passes(self) -> int:
        """As ``Drafter.passes``."""
        return self._drafter.passes

    def begin(self, tokens: Sequence[int], /) -> None:
        """As ``Drafter.begin``."""
        self.levels = []
        self._new = len(tokens) - self._prompt_tokens
        self._drafter.begin(tokens)

    def expand(self, tree: TokenTree, nodes: Sequence[NodeId], count: int) -> list[Candidates]:
        """As ``Drafter.expand``."""
        self.levels.append(min(self._drafter.behind, self._new) + len(nodes))
        return self._drafter.expand(tree, nodes, count)


Drafting = Callable[[TokenTree, Recorded, int, int], tuple[TokenTree, Sequence[NodeId]]]
"""Fills a tree that is a lone root: (tree, drafter, most depth, committed tokens) -> what is
verified, and the number in the drafted tree of each of its nodes."""


def replay_drafting(text: Text, drafter: DraftModelDrafter, draft: Drafting) -> list[Replayed]:
    """Real drafting over a text whose continuation is known: no pass of the target is needed."""
    recorded = Recorded(drafter, text.prompt_tokens)
    cycles: list[Replayed] = []
    done, total = text.prompt_tokens, len(text.tokens)
    while done < total:
        tokens = text.tokens[:done]
        recorded.begin(tokens)
        tree = TokenTree(tokens[-1])
        verified, nodes = draft(tree, recorded, total - done - 1, done)
        ahead = text.tokens[done:]
        path = follow(verified, partial(_said, verified, ahead)).path
        recorded.accept(tree, [nodes[at] for at in path])
        cycles.append(Replayed(len(verified), tuple(recorded.levels), len(path) - 1))
        done += len(path)
    return cycles


def _said(tree: TokenTree, ahead: Sequence[int], node: NodeId) -> int:
    """The target's token after ``node``, which lies on its path."""
    return ahead[tree.depths[node]]
