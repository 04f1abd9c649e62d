"""Where a generation ends, and what of its text may be shown before that is known."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from profiles.errors import InputError
from runtime.tokens import StreamDecoder, Tokens


class FinishReason(StrEnum):
    """Why a generation ended."""

    EOS = "eos"
    """The model ended its answer."""
    STOP = "stop"
    """A stop string came."""
    LENGTH = "length"
    """``max_new_tokens`` were produced."""
    CONTEXT = "context"
    """The plan's context is full."""


class Reading(NamedTuple):
    """What ``Ending.read`` found."""

    kept: int
    """How many of the tokens belong to the generation."""
    text: str
    """Text that they complete and that no stop string can take back."""
    reason: FinishReason | None
    """``EOS`` or ``STOP`` if one of them ended the generation."""


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings of a request; one string stands for itself.

    Raises:
        InputError: One is empty or no string.
    """
    strings: tuple[object, ...] = (stop,)
    if isinstance(stop, Iterable) and not isinstance(stop, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        strings = tuple(stop)
    return tuple(map(_checked, strings))


def _checked(string: object) -> str:
    if not isinstance(string, str) or not string:
        raise InputError(
            "not a stop string", found=repr(string), expected="text of a character or more"
        )
    return string


class StopStrings:
    """Looks for the first of several strings in a text that comes in pieces.

    First is the one that is complete first; of those that end with the same character, the
    longest. So what is found depends on the text, not on how it was cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.found = False
        self._longest = max(map(len, self.strings), default=0)
        self._held = ""
        """Text that may be the beginning of a stop string."""

    def push(self, text: str) -> str:
        """What may be shown now: nothing of a stop string, and nothing behind one."""
        if self.found:
            return ""
        text = self._held + text
        if at := self._first(text):
            self.found, self._held = True, ""
            return text[: at[1]]
        shown = len(text) - self._overhang(text)
        self._held = text[shown:]
        return text[:shown]

    def would_find(self, text: str) -> bool:
        """Whether ``text`` would complete a stop string."""
        return not self.found and self._first(self._held + text) is not None

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, int] | None:
        """(end, start) of the first stop string in ``text``."""
        places = ((text.find(string), len(string)) for string in self.strings)
        return min(((at + size, at) for at, size in places if at >= 0), default=None)

    def _overhang(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        sizes = range(min(self._longest - 1, len(text)), 0, -1)
        ends = ((size, text[-size:]) for size in sizes)
        return next((n for n, end in ends if any(s.startswith(end) for s in self.strings)), 0)


class Ending:
    """Reads the new tokens of one generation, in order, each once.

    A stop string that is spelled like a control token also ends the generation at that token,
    which never shows in the text.
    """

    def __init__(
        self, tokens: Tokens, stop: Sequence[str] = (), *, ignore_eos: bool = False
    ) -> None:
        self._decoder = StreamDecoder(tokens)
        self._stops = StopStrings(stop)
        ends = {} if ignore_eos else dict.fromkeys(tokens.spec.eos_ids, FinishReason.EOS)
        controls = (tokens.control_id(string) for string in stop)
        stops = {token: FinishReason.STOP for token in controls if token is not None}
        self._ends = {**stops, **ends}

    def read(self, ids: Sequence[int]) -> Reading:
        """Up to the token that ends the generation; an EOS adds no text."""
        text = ""
        for count, token in enumerate(ids, 1):
            if reason := self._ends.get(token):
                return Reading(count, text, reason)
            text += self._show(token)
            if self._stops.found:
                return Reading(count, text, FinishReason.STOP)
        return Reading(len(ids), text, None)

    def rest(self) -> str:
        """What was held back, once the generation is over."""
        return self._stops.push(self._decoder.flush()) + self._stops.flush()

    def _show(self, token: int) -> str:
        text = self._stops.push(self._decoder.push([token]))
        # Bytes of a character are held back although they may be all that is to come
        if self._stops.strings and self._stops.would_find(self._decoder.pending()):
            text += self._stops.push(self._decoder.flush())
        return text
