"""The ``plan`` command: runs ``planner.app`` and turns what stops it into one line and a code.

Exit codes: 0 ok, 1 internal, 2 usage or bad input, 3 incompatible, 4 infeasible, 5 verification
failed, 130 interrupted, 141 nobody reads stdout any more.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType

from planner.terminal import Terminal
from profiles.errors import FulcrumError

INTERNAL = 1
INTERRUPTED = 130
"""As a shell reports a program that SIGINT ended."""
CLOSED_PIPE = 141
"""As a shell reports a program that SIGPIPE ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal without Unicode shows a question mark rather than nothing
            stream.reconfigure(errors="replace")
    try:
        code = _guarded(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    return code


def _guarded(arguments: Sequence[str]) -> int:
    """Run a command; whatever stops it becomes one line on stderr and an exit code."""
    terminal = Terminal()
    with _noted_interrupts() as interrupts:
        try:
            # Late, so that an interrupt while it loads is reported as such
            from planner.app import dispatch

            with terminal:
                return dispatch(arguments or ("--help",), terminal)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            return _fail("interrupted", INTERRUPTED)
        except Exception as error:
            # Extension modules turn an interrupt into errors of their own
            if interrupts:
                return _fail("interrupted", INTERRUPTED)
            if isinstance(error, FulcrumError):
                return _fail(f"error: {error}", error.exit_code)
            return _fail(_bug(error, terminal.verbose), INTERNAL)


@contextmanager
def _noted_interrupts() -> Generator[list[int]]:
    """Signals that interrupted the block, which raise KeyboardInterrupt as ever."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    # A shell has what it runs in the background ignore the signal; other threads cannot hear it
    main_thread = threading.current_thread() is threading.main_thread()
    if before is signal.SIG_IGN or not main_thread:
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _bug(error: Exception, verbose: bool) -> str:
    if verbose:
        traceback.print_exception(error)
    more = "" if verbose else "; -v shows where"
    return f"error: {type(error).__name__}: {error}; this is a bug in Fulcrum{more}"


def _fail(message: str, code: int) -> int:
    """Say why on stderr, behind all results."""
    sys.stdout.flush()
    sys.stderr.write(" ".join(message.split()) + "\n")
    return code
