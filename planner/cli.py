"""The ``plan`` command: runs ``planner.app`` and turns what stops it into one line and a code.

Exit codes: 0 ok, 1 internal, 2 usage or bad input, 3 incompatible, 4 infeasible, 5 verification
failed, 130 interrupted, 143 told to end, 129 its terminal closed, 141 nobody reads stdout any more.
"""

# What takes time to load is imported late, so that an interrupt meanwhile is reported as such
import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

INTERNAL = 1
BAD_INPUT = 2
INFEASIBLE = 4
CLOSED_PIPE = 141
"""As a shell reports a program that SIGPIPE ended."""
SIGNALLED = 128
"""Added to a signal's number, as a shell reports a program that the signal ended."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Run the command line; the exit code."""
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        # Before anything was there to catch it
        return _fail("interrupted", SIGNALLED + 2)


def _main(arguments: "Sequence[str]") -> int:
    from io import TextIOWrapper

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal without Unicode shows a question mark rather than nothing
            stream.reconfigure(errors="replace")
    try:
        code = _guarded(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except OSError as error:
        # The disk behind stdout is full: what is left in the buffer would fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(f"error: cannot write the result: {error.strerror}", BAD_INPUT)
    return code


def _guarded(arguments: "Sequence[str]") -> int:
    """Run a command; whatever stops it becomes one line on stderr and an exit code."""
    from planner.signals import noted_signals
    from planner.terminal import Terminal
    from profiles.errors import FulcrumError

    terminal = Terminal()
    with noted_signals() as signals:
        try:
            from planner.app import dispatch

            with terminal:
                return dispatch(arguments or ("--help",), terminal)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            return _stopped(signals)
        except MemoryError as error:
            hint = "free some, or ask for less with --context and --dram-budget"
            return _fail(f"error: not enough memory ({error or 'none left'}); {hint}", INFEASIBLE)
        except Exception as error:
            # Extension modules turn an interrupt into errors of their own
            if signals:
                return _stopped(signals)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                where = "cannot write the result" if error.filename is None else error.filename
                return _fail(f"error: {where}: {error.strerror}", BAD_INPUT)
            if isinstance(error, FulcrumError):
                return _fail(f"error: {error}", error.exit_code)
            return _fail(_bug(error, terminal.verbose), INTERNAL)


def _stopped(signals: "Sequence[int]") -> int:
    number = signals[0] if signals else 2
    return _fail("interrupted" if number == 2 else "ended by a signal", SIGNALLED + number)


def _bug(error: Exception, verbose: bool) -> str:
    if verbose:
        import traceback

        traceback.print_exception(error)
    more = "" if verbose else "; -v shows where"
    return f"error: {type(error).__name__}: {error}; this is a bug in Fulcrum{more}"


def _fail(message: str, code: int) -> int:
    """Say why on stderr, behind all results."""
    sys.stdout.flush()
    sys.stderr.write(" ".join(message.split()) + "\n")
    return code
