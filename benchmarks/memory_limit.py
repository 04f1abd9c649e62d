"""Runs a command with so much memory and no more, and says what it used.

    python benchmarks/memory_limit.py --evict 1.5b.plan 900MiB -- python -m planner bench 1.5b.plan

The command gets a control group of its own (Linux, version 1 or 2), in which the page cache counts
as well: what it maps or reads without O_DIRECT is thrown out again where it does not fit. That
needs the right to make such groups, as root has in most containers. The last line, on stderr, has
the peak and the major page faults; the exit code is the command's.
"""

import argparse
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from planner.sizes import parse_size
from profiles.errors import FulcrumError, InputError

ROOT = Path("/sys/fs/cgroup")
MEBIBYTE = 1 << 20


class Names(NamedTuple):
    """Files of a group in one version of the interface."""

    root: Path
    limit: str
    peak: str
    swap: str
    swap_limit: str
    """What keeps the command from swapping."""


V1 = Names(
    ROOT / "memory",
    "memory.limit_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.swappiness",
    "0",
)
V2 = Names(ROOT, "memory.max", "memory.peak", "memory.swap.max", "0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("limit", help="as 900MiB")
    parser.add_argument(
        "--evict",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="a file or folder to be put out of the page cache first: what others have read into"
        " it is not counted",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    asked = parser.parse_args(arguments)
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    try:
        if not command:
            raise InputError("no command", expected="[--evict PATH] LIMIT -- COMMAND ARGUMENT...")
        evict(asked.evict)
        return run(parse_size(asked.limit), command)
    except FulcrumError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(limit_bytes: int, command: Sequence[str]) -> int:
    """``command`` in a group of ``limit_bytes``."""
    names = interface()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with group(names, limit_bytes) as folder:
        code = _wait(_started(folder, command))
        peak = _read(folder / names.peak)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    faults = after.ru_majflt - before.ru_majflt
    held = "unknown" if peak is None else f"{peak / MEBIBYTE:.0f} MiB"
    print(
        f"limit {limit_bytes / MEBIBYTE:.0f} MiB, peak {held}, {faults} major faults, "
        f"{after.ru_inblock * 512 / MEBIBYTE:.0f} MiB read, exit code {code}",
        file=sys.stderr,
    )
    return code


def evict(places: Sequence[Path]) -> None:
    """Put files, or all files of folders, out of the page cache, as far as nobody maps them."""
    for place in places:
        for file in place.rglob("*") if place.is_dir() else [place]:
            try:
                if file.is_dir():
                    continue
                handle = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise InputError("cannot read", where=file, found=error.strerror) from None
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def interface() -> Names:
    """That of this machine; ``InputError`` where no memory is controlled."""
    if (V1.root / V1.limit).exists():
        return V1
    if "memory" in (_text(V2.root / "cgroup.controllers") or "").split():
        return V2
    raise InputError(
        "this system controls no memory",
        where=ROOT,
        expected="Linux with the memory controller of control groups mounted",
        hint="where systemd runs: systemd-run --scope -p MemoryMax=900M COMMAND",
    )


@contextlib.contextmanager
def group(names: Names, limit_bytes: int) -> Generator[Path]:
    """A new group with a limit, taken away again; ``InputError`` without the right to make one."""
    folder = names.root / f"fulcrum-{os.getpid()}"
    try:
        if names is V2:
            # its children get the controller only when the root hands it down
            with contextlib.suppress(OSError):
                (names.root / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
        folder.mkdir()
        try:
            (folder / names.limit).write_text(str(limit_bytes), encoding="ascii")
            with contextlib.suppress(OSError):
                (folder / names.swap).write_text(names.swap_limit, encoding="ascii")
            yield folder
        finally:
            _remove(folder)
    except OSError as error:
        raise InputError(
            "cannot limit memory",
            where=error.filename or folder,
            found=error.strerror,
            expected="the right to make control groups",
            hint="run as root, or: systemd-run --user --scope -p MemoryMax=900M COMMAND",
        ) from error


def _started(folder: Path, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """The command, in the group from its first moment on.

    A shell joins the group and then becomes the command: nothing runs between fork and exec here.
    """
    join = 'echo $$ > "$0" && exec "$@"'
    return subprocess.Popen(["/bin/sh", "-c", join, str(folder / "cgroup.procs"), *command])


def _wait(process: "subprocess.Popen[bytes]") -> int:
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # the command hears it too, and ends as it likes
            continue
        if code == -signal.SIGKILL:
            print("the command was killed: it needs more memory than the limit", file=sys.stderr)
        return 128 - code if code < 0 else code


def _remove(folder: Path) -> None:
    """Groups go when their last process is gone, which takes a moment."""
    for _ in range(50):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return
    print(f"{folder} stays: something in it still runs", file=sys.stderr)


def _read(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
