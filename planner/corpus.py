"""Text to measure on: prompts of a split, continued by the target itself in its own numerics.

Every sequence keeps its own cache of committed rows, so that a draft can be judged at any position
with the exact past that it will have when deployed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from runtime.backends import HIDDEN
from runtime.kv_cache import KvCache
from runtime.sampling import GREEDY, choose
from runtime.target import Target
from runtime.tokens import Tokens

Array = np.ndarray[Any, Any]

GROWTH_TOKENS = 64
PREFILL_ROWS = 64
LARGEST_CACHE = 1 << 20
"""Slots; calibration takes what its texts need."""


class Text(msgspec.Struct, frozen=True):
    """A prompt with the target's greedy continuation."""

    id: str
    category: str
    prompt_tokens: int
    tokens: tuple[int, ...]

    @property
    def roots(self) -> range:
        """Indices of the tokens after which a draft could begin: each has a known next token."""
        return range(self.prompt_tokens - 1, len(self.tokens) - 1)


def committed_cache(target: Target, tokens: Sequence[int]) -> KvCache:
    """A cache with the exact rows of every one of ``tokens`` but the last."""
    last = len(tokens) - 1
    cache = KvCache(target.spec, GROWTH_TOKENS, LARGEST_CACHE)
    for start in range(0, last, PREFILL_ROWS):
        ids = tokens[start : min(start + PREFILL_ROWS, last)]
        result = target.run_chain(ids, start, cache)
        cache.commit(result.keys, result.values, slice(0, len(ids)))
    return cache


def continue_prompts(
    target: Target,
    prompts: Sequence[tuple[str, str, list[int]]],
    new_tokens: int,
    tokens: Tokens,
    progress: Callable[[int], None],
) -> list[tuple[Text, KvCache]]:
    """Greedy continuations of (id, category, prompt ids), all prompts in one pass a token.

    They share one cache: each row's mask shows it the slots of its own sequence alone, which
    gives bit by bit what it would give on its own. Every text comes with a cache of its own that
    holds all its rows but the last. ``progress`` is told the tokens made so far.
    """
    batch = _Batch(target, [ids for _, _, ids in prompts], new_tokens)
    for made in range(new_tokens):
        if not batch.step(tokens):
            break
        progress(made + 1)
    return [
        (Text(key, category, len(ids), tuple(batch.tokens[index])), batch.cache_of(index))
        for index, (key, category, ids) in enumerate(prompts)
    ]


class _Batch:
    """Several sequences in one cache; ``step`` adds a token to each that has not ended."""

    def __init__(self, target: Target, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self._target = target
        self.tokens = [list(ids) for ids in prompts]
        slots = sum(map(len, prompts)) + len(prompts) * new_tokens
        self._cache = KvCache(target.spec, GROWTH_TOKENS, LARGEST_CACHE)
        self._cache.reserve(slots)
        self._seen = np.zeros((len(prompts), self._cache.capacity), np.bool_)
        self._open = list(range(len(prompts)))
        for index, ids in enumerate(prompts):
            alone, start = committed_cache(target, ids), self._cache.length
            self._cache.commit(alone.keys, alone.values, slice(0, alone.length))
            self._seen[index, start : self._cache.length] = True

    def step(self, tokens: Tokens) -> bool:
        """Add a token to every open sequence; False when none is open."""
        if not self._open:
            return False
        positions = [len(self.tokens[i]) - 1 for i in self._open]
        logits = self._target.logits(self._run(positions))
        chosen = choose(logits, [p + 1 for p in positions], GREEDY).tolist()
        for index, token in zip(self._open, chosen, strict=True):
            self.tokens[index].append(token)
        ended = {i for i in self._open if tokens.finish(self.tokens[i][-1:]) is not None}
        self._open = [i for i in self._open if i not in ended]
        return True

    def _run(self, positions: Sequence[int]) -> Array:
        """The last token of every open sequence in one pass; each sees its own slots and itself."""
        target, cache, width = self._target, self._cache, len(self._open)
        visible = np.concatenate([self._seen[self._open], np.eye(width, dtype=np.bool_)], axis=1)
        mask = np.where(visible, np.float32(0), HIDDEN)
        hidden = target.embed([self.tokens[i][-1] for i in self._open])
        result = target.run(hidden, np.asarray(positions), mask, cache, target.all_on)
        self._seen[self._open, np.arange(cache.length, cache.length + width)] = True
        cache.commit(result.keys, result.values, slice(0, width))
        return result.hidden

    def cache_of(self, index: int) -> KvCache:
        """The rows of one sequence, in order, in a cache of their own."""
        slots = np.flatnonzero(self._seen[index])
        own = KvCache(self._target.spec, GROWTH_TOKENS, LARGEST_CACHE)
        own.reserve(len(slots))
        own.commit(self._cache.keys, self._cache.values, slots)
        return own
