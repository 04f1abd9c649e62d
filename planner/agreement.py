"""How often a cheaper pass of the target says what the full target says, at every draft depth.

All measurements run the deployed graphs. A draft at root position t sees exact committed rows
before t, as it will at run time, and its own rows after that; many roots share one pass, kept
apart by the mask.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from planner.corpus import Text
from profiles.words import SubLayerId
from runtime.backends import HIDDEN
from runtime.kv_cache import KvCache
from runtime.target import Target

Array = np.ndarray[Any, Any]


class DepthCounts(msgspec.Struct, frozen=True):
    """Teacher-forced drafts by depth 1, 2, ...: those that came so far, and those that went on."""

    tried: tuple[int, ...]
    accepted: tuple[int, ...]

    def __add__(self, other: "DepthCounts") -> "DepthCounts":
        return DepthCounts(
            tuple(a + b for a, b in zip(self.tried, other.tried, strict=True)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
        )

    def rates(self) -> tuple[float, ...]:
        """Acceptance by depth, given that all before was accepted; one pseudo-miss each."""
        return tuple(a / (t + 1) for a, t in zip(self.accepted, self.tried, strict=True))


class SkipLoss(msgspec.Struct, frozen=True):
    """What leaving out one sub-layer costs."""

    hits: int
    """Positions at which the next token stayed the same."""
    positions: int
    log_loss: float
    """Mean growth of the next token's negative log probability, nats, at least 0."""

    @property
    def agreement(self) -> float:
        """Share of positions with the same next token."""
        return self.hits / self.positions


def draft_agreement(
    target: Target, text: Text, cache: KvCache, skipped: Sequence[SubLayerId], depth: int
) -> DepthCounts:
    """Drafts under a skip mask from every root of ``text``, up to ``depth`` tokens deep.

    Rows of the draft are scratch behind the cache's cursor; the cursor stays.
    """
    active = target.active(skipped)
    roots = np.array(text.roots)
    ids = np.array(text.tokens)
    base, count = cache.length, len(roots)
    cache.reserve(base + depth * count)
    alive = np.arange(count)
    tried, accepted = [0] * depth, [0] * depth
    for level in range(depth):
        alive = alive[roots[alive] + level + 1 < len(ids)]
        if not len(alive):
            break
        at = roots[alive] + level
        mask = _draft_mask(roots[alive], alive, base, count, level, cache.capacity)
        result = target.run(target.embed(ids[at].tolist()), at, mask, cache, active)
        hits = target.logits(result.hidden).argmax(axis=-1) == ids[at + 1]
        tried[level], accepted[level] = len(alive), int(hits.sum())
        slots = base + level * count + alive
        cache.keys[:, :, slots], cache.values[:, :, slots] = result.keys, result.values
        alive = alive[hits]
    return DepthCounts(tuple(tried), tuple(accepted))


def _draft_mask(
    roots: Array, rows: Array, base: int, count: int, level: int, capacity: int
) -> Array:
    """Row i sees slots before its root, its own drafts of earlier levels, and itself."""
    width = len(rows)
    mask = np.full((width, capacity + width), HIDDEN, np.float32)
    mask[:, :base][np.arange(base) < roots[:, None]] = 0
    for earlier in range(level):
        mask[np.arange(width), base + earlier * count + rows] = 0
    np.fill_diagonal(mask[:, capacity:], 0)
    return mask


def skip_losses(target: Target, text: Text, cache: KvCache, roots: Sequence[int]) -> list[SkipLoss]:
    """For each of the 2L sub-layers: the loss when it alone is left out, at ``roots``.

    The hidden rows before every sub-layer are kept, so a skip recomputes only what follows it.
    """
    ids = np.array(text.tokens)
    at = np.array(roots)
    mask = _draft_mask(at, np.arange(len(at)), cache.length, len(at), 0, cache.capacity)
    hidden = target.embed(ids[at].tolist())
    before: list[Array] = []
    for sub_layer in range(target.spec.sub_layers):
        before.append(hidden)
        only = np.zeros_like(target.all_on)
        only[sub_layer] = True
        hidden = target.run(hidden, at, mask, cache, only).hidden.copy()
    full = log_probability(target.logits(hidden), ids[at + 1])
    losses: list[SkipLoss] = []
    for sub_layer, rows in enumerate(before):
        after = np.arange(target.spec.sub_layers) > sub_layer
        logits = target.logits(target.run(rows, at, mask, cache, after).hidden)
        hits = int((logits.argmax(axis=-1) == ids[at + 1]).sum())
        grown = full - log_probability(logits, ids[at + 1])
        losses.append(SkipLoss(hits, len(at), max(float(grown.mean()), 0.0)))
    return losses


def log_probability(logits: Array, ids: Array) -> Array:
    """Log softmax of each row at its token."""
    rows = logits.astype(np.float64)
    top = rows.max(axis=-1, keepdims=True)
    total = np.log(np.exp(rows - top).sum(axis=-1)) + top[:, 0]
    return rows[np.arange(len(ids)), ids] - total


def pooled(losses: Sequence[Sequence[SkipLoss]]) -> list[SkipLoss]:
    """Losses of several texts as one, by sub-layer."""
    result: list[SkipLoss] = []
    for parts in zip(*losses, strict=True):
        positions = sum(part.positions for part in parts)
        weighted = sum(part.log_loss * part.positions for part in parts)
        hits = sum(part.hits for part in parts)
        result.append(SkipLoss(hits, positions, weighted / positions))
    return result
