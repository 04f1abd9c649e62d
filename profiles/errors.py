"""One hierarchy of errors for all four packages; each class carries the command's exit code."""

import difflib
from collections.abc import Iterable


class FulcrumError(Exception):
    """Something a user can act on: what went wrong, where, found and expected, what to do next.

    ``str(error)`` is one line. ``exit_code`` is what the ``plan`` command returns.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.found = found
        self.expected = expected
        self.hint = hint
        super().__init__(self._line())

    def _line(self) -> str:
        line = self.what if self.where is None else f"{self.where}: {self.what}"
        details = [
            f"{label} {value}"
            for label, value in (("found", self.found), ("expected", self.expected))
            if value is not None
        ]
        if details:
            line += f" ({', '.join(details)})"
        if self.hint:
            line += f"; {self.hint}"
        return _one_line(line)


def _one_line(text: str) -> str:
    """``text`` without line breaks, and without what a terminal would take for a command."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


class InputError(FulcrumError):
    """Usage or bad input: a missing file, an unknown name, a malformed document."""

    exit_code = 2


class UnsupportedError(InputError):
    """A well-formed input that Fulcrum does not handle; says what it does handle."""


class IncompatibleError(FulcrumError):
    """A plan of another version or device, or an artefact whose digest does not match."""

    exit_code = 3


class InfeasibleError(FulcrumError):
    """No plan satisfies the constraints; says the smallest budget that works."""

    exit_code = 4


class VerificationError(FulcrumError):
    """A plan's output differs from plain decoding."""

    exit_code = 5


class FlashError(FulcrumError):
    """Streaming weights failed: a disk that does not read, a file that was cut off, a reader that
    was closed. The session stays usable; the next generation tries again."""

    exit_code = 6

    def again(self) -> "FlashError":
        """The same error as a new exception."""
        return FlashError(
            self.what,
            where=self.where,
            found=self.found,
            expected=self.expected,
            hint=self.hint,
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names the closest of ``known``, or all of them when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
