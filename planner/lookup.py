"""N-gram lookup as a draft source: what each setting would have drafted on known texts."""

from collections.abc import Sequence

import msgspec

from planner.corpus import Text
from runtime.ngram import simulate_lookup

SETTINGS = ((1, 3), (2, 3), (2, 4), (3, 5))
"""Shortest and longest context suffix that is looked up."""
LENGTHS = (1, 2, 3, 4, 5, 6, 7)


class LookupOutcome(msgspec.Struct, frozen=True):
    """Cycles that a setting makes on texts, by (drafted, accepted)."""

    ngram_min: int
    ngram_max: int
    length: int
    cycles: tuple[tuple[int, int, int], ...]
    """(drafted, accepted, how often), ascending."""


def replay(texts: Sequence[Text], ngram_min: int, ngram_max: int, length: int) -> LookupOutcome:
    """Replay lookup drafting over the target's own continuations."""
    counts: dict[tuple[int, int], int] = {}
    for text in texts:
        for cycle in simulate_lookup(text.tokens, text.prompt_tokens, ngram_min, ngram_max, length):
            counts[cycle] = counts.get(cycle, 0) + 1
    rows = tuple((drafted, hit, n) for (drafted, hit), n in sorted(counts.items()))
    return LookupOutcome(ngram_min, ngram_max, length, rows)


def replay_all(texts: Sequence[Text]) -> list[LookupOutcome]:
    """Every setting and length."""
    return [replay(texts, low, high, n) for low, high in SETTINGS for n in LENGTHS]
