"""Prompt lookup: drafts the continuation of an earlier occurrence of the context's last tokens."""

from collections.abc import Iterable, Iterator, Sequence

from profiles.errors import InputError


class NgramIndex:
    """Remembers, for each n-gram of the committed tokens, where it was continued last.

    Tokens are only ever added: nothing that can be rolled back belongs here.
    """

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        """n-grams of ``ngram_min`` to ``ngram_max`` tokens; InputError unless 1 <= min <= max."""
        if not 1 <= ngram_min <= ngram_max:
            raise InputError(
                "n-gram lengths are out of order",
                found=f"{ngram_min} to {ngram_max}",
                expected="1 <= shortest <= longest",
            )
        self._lengths = range(ngram_max, ngram_min - 1, -1)
        self._tokens: list[int] = []
        self._continued_at: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        """Tokens added so far."""
        return len(self._tokens)

    def extend(self, ids: Iterable[int]) -> None:
        """Adds committed tokens; the work per token does not grow with the context."""
        for token in ids:
            # Only now are the n-grams that end before this token continued by something; the
            # context's own last n-gram is thus never found
            for key in self._suffixes():
                self._continued_at[key] = len(self._tokens)
            self._tokens.append(token)

    def propose(self, length: int) -> list[int]:
        """``length`` tokens that may come next; none if no suffix occurred before.

        Of the suffixes of the context the longest that occurred before is taken, and of its
        occurrences the latest. Copying what follows it goes on into the proposal itself when it
        reaches the context's end, so a loop is drafted round and round.
        """
        for key in self._suffixes():
            start = self._continued_at.get(key)
            if start is not None:
                copied = self._tokens[start : start + max(length, 0)]
                return [copied[place % len(copied)] for place in range(length)]
        return []

    def continuations(self, path: Sequence[int]) -> Iterator[int]:
        """What followed the latest occurrence of each suffix of the context and ``path`` behind it.

        From the longest suffix to the shortest, those that did not occur left out; a token may come
        up several times. ``path`` itself is not remembered.
        """
        longest = self._lengths[0]
        ends = [*self._tokens[-longest:], *path][-longest:]
        for n in self._lengths:
            start = self._continued_at.get(tuple(ends[-n:])) if n <= len(ends) else None
            if start is not None:
                yield self._tokens[start]

    def clone(self) -> "NgramIndex":
        """An independent copy."""
        copy = NgramIndex(self._lengths[-1], self._lengths[0])
        copy._tokens = self._tokens.copy()
        copy._continued_at = self._continued_at.copy()
        return copy

    def _suffixes(self) -> Iterable[tuple[int, ...]]:
        """The last n tokens for each n, longest first."""
        longest = self._tokens[-self._lengths[0] :]
        for n in self._lengths:
            if n <= len(longest):
                yield tuple(longest[-n:])


def simulate_lookup(
    tokens: Sequence[int], start: int, ngram_min: int, ngram_max: int, length: int
) -> list[tuple[int, int]]:
    """Replays a known continuation: (drafted, accepted) of each cycle of lookup decoding.

    Args:
        tokens: A context and what the target said after it.
        start: Where the continuation begins; 0 <= start <= len(tokens).
        ngram_min: Shortest suffix that is looked up, in tokens.
        ngram_max: Longest suffix that is looked up, in tokens.
        length: Most tokens that a cycle drafts.

    A cycle commits accepted + 1 tokens. Near the end it drafts no more than could be committed, so
    the cycles together commit exactly ``tokens[start:]``. InputError for arguments out of range.
    """
    if not 0 <= start <= len(tokens):
        raise InputError(
            "start of the continuation is out of range",
            found=start,
            expected=f"0 to {len(tokens)}",
        )
    index = NgramIndex(ngram_min, ngram_max)
    index.extend(tokens[:start])
    cycles: list[tuple[int, int]] = []
    while (done := len(index)) < len(tokens):
        draft = index.propose(min(length, len(tokens) - done - 1))
        accepted = 0
        while accepted < len(draft) and draft[accepted] == tokens[done + accepted]:
            accepted += 1
        cycles.append((len(draft), accepted))
        index.extend(tokens[done : done + accepted + 1])
    return cycles
