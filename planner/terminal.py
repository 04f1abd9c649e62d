"""Where a command writes: results on stdout; progress, remarks and logs on stderr."""

import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from profiles.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

_log = logging.getLogger("planner")


class Terminal:
    """The output of one command.

    Progress is drawn only where stderr is a terminal. ``quiet`` leaves errors alone on stderr,
    ``verbose`` has plain log lines instead of a drawing. Use it as a context manager: what was
    drawn is cleared when the command ends, however it ends.
    """

    def __init__(self) -> None:
        self.quiet = False
        self.verbose = False
        self._undo = ExitStack()
        self._progress: Progress | None = None
        self._stage = ""

    def configure(self, quiet: bool, verbose: bool) -> None:
        """Take what the command line says; ``quiet`` with ``verbose`` is an ``InputError``."""
        if quiet and verbose:
            raise InputError("cannot be both quiet and verbose", hint="drop -q or -v")
        self.quiet, self.verbose = quiet, verbose
        level = logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING
        handler = logging.StreamHandler(sys.stderr)
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        self._undo.callback(root.setLevel, root.level)
        self._undo.callback(root.removeHandler, handler)
        root.setLevel(level)
        root.addHandler(handler)
        self._undo.enter_context(warnings.catch_warnings())
        if not verbose:
            # What a library warns its developers of is no news to users
            warnings.simplefilter("ignore")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()
        self._undo.close()

    def report(self, stage: str, done: int, total: int) -> None:
        """Progress of a stage: ``done`` steps of ``total``."""
        changed = stage != self._stage
        self._stage = stage
        if self.verbose:
            if changed or done == total:
                _log.info("%s: %d of %d", stage, done, total)
        elif not self.quiet and sys.stderr.isatty():
            self._draw(stage, done, total, changed)

    def _draw(self, stage: str, done: int, total: int, changed: bool) -> None:
        progress = self._open_progress()
        if changed:
            for task in progress.task_ids:
                progress.remove_task(task)
            progress.add_task(stage, completed=done, total=total)
        else:
            progress.update(progress.task_ids[-1], completed=done, total=total)

    def _open_progress(self) -> "Progress":
        if self._progress is None:
            # Late: most commands draw nothing
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeElapsedColumn as Elapsed

            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                *(BarColumn(), MofNCompleteColumn(), Elapsed()),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._progress.start()
        return self._progress

    def clear(self) -> None:
        """Remove what is drawn."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._stage = ""

    def width(self) -> int | None:
        """Characters in a line of stdout; None where it is no terminal, so that nothing is cut."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def result(self, text: str) -> None:
        """Write a result, ended by a line break, to stdout."""
        self.clear()
        sys.stdout.write(text if text.endswith("\n") else text + "\n")

    def result_json(self, data: object) -> None:
        """Write a result as one JSON document to stdout."""
        self.result(json.dumps(data, indent=2, ensure_ascii=False))

    def remark(self, text: str) -> None:
        """Write a line beside the result to stderr, unless quiet."""
        self.clear()
        if not self.quiet:
            sys.stderr.write(text + "\n")


def write_file(path: Path, text: str) -> None:
    """Write a result to a file; a reader sees the old file or the new one, never half of it.

    Raises:
        InputError: The file cannot be written, or lies in a plan.
    """
    # Late: it loads numpy
    from runtime.plan_writer import check_outside_plans

    check_outside_plans(path)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        hint = "name another place with -o"
        raise InputError("cannot write", where=path, found=error.strerror, hint=hint) from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
