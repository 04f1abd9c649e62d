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


def continue_prompts(
    target: Target,
    prompts: Sequence[tuple[str, str, list[int]]],
    new_tokens: int,
    tokens: Tokens,
    progress: Callable[[int], None],
) -> list[Text]:
    """Greedy continuations of (id, category, prompt ids), all prompts in one pass a token.

    They share one cache: each row's mask shows it the slots of its own sequence alone, which
    gives bit by bit what it would give on its own. ``progress`` is told the tokens made so far.
    """
    batch = _Batch(target, [ids for _, _, ids in prompts], new_tokens)
    for made in range(new_tokens):
        if not batch.step(tokens):
            break
        progress(made + 1)
    return [
        Text(key, category, len(ids), tuple(done))
        for (key, category, ids), done in zip(prompts, batch.tokens, strict=True)
    ]


class _Batch:
    """Several sequences in one cache; ``step`` adds a token to each that has not ended."""

    def __init__(self, target: Target, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self._target = target
        self.tokens = [list(ids) for ids in prompts]
        slots = sum(map(len, prompts)) + len(prompts) * new_tokens
        self._cache = KvCache(target.spec, GROWTH_TOKENS, slots + GROWTH_TOKENS)
        self._cache.reserve(slots)
        self._seen = np.zeros((len(prompts), self._cache.capacity), np.bool_)
        self._open = list(range(len(prompts)))
        for index, ids in enumerate(prompts):
            for start in range(0, len(ids) - 1, PREFILL_ROWS):
                part = ids[start : min(start + PREFILL_ROWS, len(ids) - 1)]
                self._run([index] * len(part), part, range(start, start + len(part)))

    def _run(self, owners: Sequence[int], ids: Sequence[int], positions: Sequence[int]) -> Array:
        """Rows of sequences ``owners``; a row sees its own sequence and its row's predecessors."""
        width, cache = len(ids), self._cache
        own = np.equal.outer(owners, owners) & np.tri(width, dtype=np.bool_)
        visible = np.concatenate([self._seen[list(owners)], own], axis=1)
        mask = np.where(visible, np.float32(0), HIDDEN)
        result = self._target.run(
            self._target.embed(ids), np.asarray(positions), mask, cache, self._target.all_on
        )
        self._seen[list(owners), np.arange(cache.length, cache.length + width)] = True
        cache.commit(result.keys, result.values, slice(0, width))
        return result.hidden

    def step(self, tokens: Tokens) -> bool:
        """Add a token to every open sequence; False when none is open."""
        if not self._open:
            return False
        last = [self.tokens[i][-1] for i in self._open]
        positions = [len(self.tokens[i]) - 1 for i in self._open]
        logits = self._target.logits(self._run(self._open, last, positions))
        chosen = choose(logits, [p + 1 for p in positions], GREEDY).tolist()
        for index, token in zip(self._open, chosen, strict=True):
            self.tokens[index].append(token)
        ended = {i for i in self._open if tokens.finish(self.tokens[i][-1:]) is not None}
        self._open = [i for i in self._open if i not in ended]
        return True
