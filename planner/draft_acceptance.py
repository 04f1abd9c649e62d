"""What a draft model is worth on known texts: ranks of the target's tokens among its candidates.

A draft that is right so far has read the very tokens that the target says. So one teacher-forced
pass over a text, in the deployed graphs, tells at every position what any draft would propose
there, from whatever root it came.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from planner.corpus import Text
from planner.prompt_file import Split
from runtime.draft_model import CHUNK_ROWS, DraftModelDrafter, DraftRows, known_ids
from runtime.plan import DraftModel
from runtime.pricing import PriceList
from runtime.sampling import GREEDY, Candidates, ranked
from runtime.target import Target

TOP = 8
"""Candidates whose rank is known; of all others it is only known that they are beyond."""
BANDS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Lower edges of the bands of draft probability."""
PRIOR = 4.0
"""Trials that speak for what is expected of a cell before anything is measured."""
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

    Where little was measured, a cell leans on its band over all ranks, and that on the draft's own
    word, the middle of the band.
    """
    ends = [*bands[1:], 1.0]
    tried = np.zeros((ranks, len(bands)))
    hits = np.zeros((ranks, len(bands)))
    for text in texts:
        for right, probabilities in zip(text.ranks, text.probabilities, strict=True):
            for rank, probability in enumerate(probabilities[:ranks]):
                band = band_of(bands, probability)
                tried[rank, band] += 1
                hits[rank, band] += rank == right
    said = (np.array(bands) + np.array(ends)) / 2
    pooled = (hits.sum(axis=0) + PRIOR * said) / (tried.sum(axis=0) + PRIOR)
    shares = (hits + PRIOR * pooled) / (tried + PRIOR)
    return tuple(tuple(row) for row in shares.tolist())


def band_of(bands: Sequence[float], probability: float) -> int:
    """Index of the band that ``probability`` lies in."""
    return max(sum(edge <= probability for edge in bands) - 1, 0)
