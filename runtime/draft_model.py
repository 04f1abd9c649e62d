"""A smaller model as a drafter: chains and token trees out of its own passes (Lever's setting)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from profiles.words import NodeId
from runtime.embedding import EmbeddingFile
from runtime.kv_cache import KvCache
from runtime.plan import DraftModel
from runtime.plan_folder import map_tensors
from runtime.plan_tables import PassKind
from runtime.plan_types import WIDEST_PASS
from runtime.pricing import PriceList
from runtime.sampling import Candidates, Sampling, ranked
from runtime.target import Target
from runtime.tree import ROOT, TokenTree

CATCH_UP_ROWS = 8
"""Most rows that are caught up in the root's own pass; more of them run in wide passes before."""
CHUNK_ROWS = 64
"""Of those wide passes."""


def open_draft(folder: Path, draft: DraftModel, threads: int) -> Target:
    """The sessions of a plan's draft model; ``folder`` is the plan's."""
    tensors = map_tensors(folder, draft.weights, draft.tensors)
    embedding = EmbeddingFile(folder / draft.weights.path, draft.tensors)
    try:
        return Target(
            *(folder, draft.model, draft.graphs, tensors, threads, draft.attention),
            embedding=embedding,
        )
    except BaseException:
        embedding.close()
        raise


class DraftRows:
    """The draft model's own keys and values; they outlive a generation.

    ``tokens`` are the committed tokens whose rows lie in the cache's first slots. Rows after them
    are scratch, of nodes of the tree that is being drafted.
    """

    def __init__(self, draft: DraftModel, context: int) -> None:
        limit = context + WIDEST_PASS
        self.cache = KvCache(draft.model, draft.kv.growth_tokens, limit)
        self.tokens: list[int] = []

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep the rows of what ``tokens`` begin with, drop all others."""
        held = min(len(self.tokens), self.cache.length)
        if held > len(tokens) or self.tokens[:held] != list(tokens[:held]):
            pairs = zip(self.tokens, tokens, strict=False)
            held = next((i for i, (a, b) in enumerate(pairs) if a != b), min(held, len(tokens)))
        del self.tokens[held:]
        self.cache.truncate(held)


class DraftModelDrafter:
    """Drafts for one generation; see ``runtime.drafting.Drafter``.

    ``model`` and ``rows`` are the session's. ``vocab`` is the target's: ids beyond it are never
    proposed.
    """

    def __init__(
        self, model: Target, rows: DraftRows, prices: PriceList, sampling: Sampling, vocab: int
    ) -> None:
        self._model = model
        self._rows = rows
        self._prices = prices
        self._sampling = sampling
        self._vocab = vocab
        self.passes = 0
        self._root = 0
        """Position of the root."""
        self._missing: list[int] = []
        """Committed tokens before the root that have no rows yet."""
        self._path: dict[NodeId, tuple[int, ...]] = {}
        """Slots of an expanded node and of its ancestors below the root, root first."""

    def begin(self, tokens: Sequence[int]) -> None:
        """A tree whose root is the last of ``tokens``; catches up with the others but for a few."""
        rows, self._root = self._rows, len(tokens) - 1
        rows.keep(tokens[:-1])
        self._path = {}
        while (left := self._root - len(rows.tokens)) > CATCH_UP_ROWS:
            start = len(rows.tokens)
            ids = tokens[start : start + min(CHUNK_ROWS, left)]
            known = known_ids(ids, self._model.spec.vocab)
            result = self._model.run_chain(known, start, rows.cache)
            self.passes += 1
            rows.cache.commit(result.keys, result.values, slice(0, len(ids)))
            rows.tokens += ids
        self._missing = list(tokens[len(rows.tokens) : -1])

    def expand(self, tree: TokenTree, nodes: Sequence[NodeId], count: int) -> list[Candidates]:
        """The ``count`` likeliest successors of each of ``nodes``, all out of one pass.

        The root comes first and alone; every other node after its parent.
        """
        rows, missing = self._rows, self._missing
        first, before = len(rows.tokens), len(missing)
        start, width = rows.cache.length, before + len(nodes)
        seen = np.zeros((width, start + width), np.bool_)
        seen[:, :first] = True
        seen[:, start:] = np.eye(width, dtype=np.bool_)
        if before:
            seen[:, start:] = np.tri(width, dtype=np.bool_)
        for row, node in enumerate(nodes, start=before):
            above = () if node == ROOT else self._path[tree.parents[node]]
            seen[row, list(above)] = True
            self._path[node] = () if node == ROOT else (*above, start + row)
        ids = [*missing, *(tree.tokens[node] for node in nodes)]
        depths = [*range(-before, 0), *(tree.depths[node] for node in nodes)]
        at = [self._root + depth for depth in depths]
        known = known_ids(ids, self._model.spec.vocab)
        result = self._model.run_branches(known, at, seen, rows.cache)
        self.passes += 1
        if nodes[0] == ROOT:
            rows.tokens += ids[: before + 1]
            self._missing = []
        logits = self._model.logits(result.hidden[before:])[:, : self._vocab]
        return [
            ranked(row, position + 1, self._sampling, count)
            for row, position in zip(logits, at[before:], strict=True)
        ]

    def accept(self, tree: TokenTree, path: Sequence[NodeId]) -> None:
        """Keep the rows of the expanded nodes on ``path``, root first; drop all others.

        Nodes are numbered as they were when they were expanded.
        """
        cache, tokens = self._rows.cache, self._rows.tokens
        kept = [node for node in path if self._path.get(node)]
        begin, end = len(tokens), len(tokens) + len(kept)
        if kept:
            slots = list(self._path[kept[-1]])
            if slots[-1] != end - 1:
                cache.keys[:, :, begin:end] = cache.keys[:, :, slots]
                cache.values[:, :, begin:end] = cache.values[:, :, slots]
        tokens += [tree.tokens[node] for node in kept]
        cache.truncate(min(end, cache.length))
        self._path = {}

    def price_us(self, rows: int, context: int) -> float:
        """Device time of a pass over ``rows`` nodes, the head and a pass's constant included."""
        us = self._prices.pass_us(PassKind.PROPOSE, 0, rows, context)
        return us + self._prices.cycle_us

    @property
    def behind(self) -> int:
        """Committed tokens whose rows the root's pass will compute beside the root's own."""
        return len(self._missing)


def known_ids(ids: Sequence[int], vocab: int) -> Sequence[int]:
    """``ids`` of a target as the table of a draft model with ``vocab`` tokens has them.

    What it lacks is read as token 0: a wrong guess at worst.
    """
    return ids if max(ids) < vocab else [token if token < vocab else 0 for token in ids]
