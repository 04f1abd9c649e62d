"""Measures this machine: kernels handed in, storage, memory.

Nothing here knows how an operator is built; whoever does hands over closures. Samples of all
kernels are interleaved, so that a machine that slows down half-way slows all of them alike.
"""

import contextlib
import datetime
import itertools
import math
import mmap
import os
import platform
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from profiles.errors import InputError
from profiles.profile import Point, Quantity, ReadPattern, Shape, StorageRead
from profiles.words import Format, Operator, Provenance

Clock = Callable[[], float]
"""Seconds, rising."""

REPEATS = 15
"""Samples of each kernel when the budget allows."""

MIN_REPEATS = 3
"""Fewer say nothing about the spread, and such a kernel yields no point."""

_SAMPLE_S = 20e-6
_MAX_CALLS = 64
_CHUNK_BYTES = 2**22
_SAMPLE_BYTES = 2**25


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One operator in one setting, ready to run."""

    processor: str
    operator: Operator
    format: Format
    shape: Shape
    width: int
    """Tokens."""
    context: int = 0
    """Positions, for attention."""
    run: Callable[[], object]
    """Does the work once; what it returns is dropped."""


class Progress(NamedTuple):
    """How far a measurement has come."""

    done: int
    """Samples taken."""
    total: int
    elapsed_s: float


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What a measured number says of itself."""

    cite: str
    """The command or function that measured it, and on what."""
    date: str = msgspec.field(default_factory=lambda: datetime.date.today().isoformat())
    versions: dict[str, str] = {}
    """Software by name."""


def measured(samples: Sequence[float], stamp: Stamp) -> Quantity:
    """The median of ``samples`` with its spread, interquartile range over median."""
    low, median, high = (float(part) for part in np.percentile(samples, (25, 50, 75)))
    return Quantity(
        value=median,
        source=Provenance.MEASURED,
        cite=stamp.cite,
        spread=round((high - low) / median, 4),
        date=stamp.date,
        versions=stamp.versions,
    )


def measure_kernels(
    kernels: Sequence[Kernel],
    *,
    budget_s: float,
    stamp: Stamp,
    progress: Callable[[Progress], None] | None = None,
    clock: Clock = time.perf_counter,
) -> list[Point]:
    """A point for each kernel, in order: warmed up, then sampled in turn until time is up.

    No kernel is started after ``budget_s``. One that got fewer than ``MIN_REPEATS`` samples is
    left out; if that is all of them, the ``InputError`` says what budget would do. What a kernel
    raises goes through.
    """
    start = clock()
    calls = [_warm_up(kernel, clock) for kernel in kernels if clock() - start < budget_s]
    warm_s = clock() - start
    samples_us: list[list[float]] = [[] for _ in kernels]
    total = len(calls) * REPEATS
    for turn in range(total):
        index = turn % len(calls)
        if clock() - start >= budget_s:
            break
        samples_us[index].append(_sample_us(kernels[index], calls[index], clock))
        if progress is not None:
            progress(Progress(turn + 1, total, clock() - start))
    points = [
        _point(kernel, samples, stamp)
        for kernel, samples in zip(kernels, samples_us, strict=True)
        if len(samples) >= MIN_REPEATS
    ]
    if kernels and not points:
        # a warm-up costs about two samples
        needed_s = warm_s * len(kernels) / max(1, len(calls)) * (1 + MIN_REPEATS / 2)
        hint = f"allow about {math.ceil(needed_s)} s, or measure fewer kernels"
        raise InputError("no kernel was measured in time", found=f"{budget_s:g} s", hint=hint)
    return points


def measure_storage(
    folder: str | os.PathLike[str],
    block_sizes: Sequence[int],
    *,
    budget_s: float,
    stamp: Stamp,
    file_bytes: int = 2**28,
    clock: Clock = time.perf_counter,
) -> tuple[StorageRead, ...]:
    """Read rates of the file system at ``folder``, sequential and random, by block size in bytes.

    Reads past the page cache where the file system allows; ``direct`` of each rate says whether.
    Uses a temporary file of at most ``file_bytes`` that disappears with the process, however it
    ends. Takes about ``budget_s``, but at least ``MIN_REPEATS`` samples of each rate.

    A block size that is no multiple of 4096, a full or unwritable folder is an ``InputError``.
    """
    if bad := [size for size in block_sizes if size <= 0 or size % 4096 or size > file_bytes]:
        raise InputError("block size", found=bad[0], expected=f"n x 4096, at most {file_bytes}")
    start = clock()
    settings = [(size, pattern) for size in block_sizes for pattern in ReadPattern]
    rates: list[list[float]] = [[] for _ in settings]
    try:
        if shutil.disk_usage(folder).free < 2 * file_bytes:
            raise OSError(f"less than {2 * file_bytes} bytes free")
        sizes, half_s = (max(block_sizes, default=1), file_bytes), budget_s / 2
        with _scratch_file(Path(folder), *sizes, lambda: clock() - start < half_s) as scratch:
            for turn in range(REPEATS * len(settings)):
                if turn >= MIN_REPEATS * len(settings) and clock() - start >= budget_s:
                    break
                size, pattern = settings[turn % len(settings)]
                offsets = _offsets(scratch.size_bytes, size, pattern, turn)
                rates[turn % len(settings)].append(_read_rate(scratch, size, offsets, clock))
    except OSError as error:
        what = "cannot measure; choose a folder on the storage"
        raise InputError(what, where=folder, found=error) from None
    return tuple(
        StorageRead(size, pattern, scratch.direct, measured(samples, stamp))
        for (size, pattern), samples in zip(settings, rates, strict=True)
    )


def measure_reading_slowdown(
    folder: str | os.PathLike[str],
    work: Callable[[], object],
    *,
    block_bytes: int,
    budget_s: float,
    stamp: Stamp,
    file_bytes: int = 2**27,
    clock: Clock = time.perf_counter,
) -> Quantity:
    """How many times longer ``work`` takes while a thread reads blocks from ``folder`` beside it.

    The thread reads as ``measure_storage`` does, without a pause. Never under 1.
    """
    ratios: list[float] = []
    start = clock()
    with _scratch_file(Path(folder), block_bytes, file_bytes, lambda: True) as scratch:
        work()
        while len(ratios) < MIN_REPEATS or clock() - start < budget_s:
            alone = clock()
            work()
            alone_s = clock() - alone
            with _reading(scratch, block_bytes):
                beside = clock()
                work()
                beside_s = clock() - beside
            ratios.append(beside_s / max(alone_s, 1e-9))
    found = measured(ratios, stamp)
    return msgspec.structs.replace(found, value=max(1.0, found.value))


def measure_memory_bandwidth(
    *, stamp: Stamp, array_bytes: int = 2**28, clock: Clock = time.perf_counter
) -> Quantity:
    """Bytes a second that one thread reads from an array too large for the caches."""
    numbers = np.ones(array_bytes // 8, dtype=np.int64)
    rates: list[float] = []
    numbers.max()
    for _ in range(2 * MIN_REPEATS + 1):
        start = clock()
        numbers.max()
        rates.append(numbers.nbytes / (clock() - start))
    return measured(rates, stamp)


def memory_total_bytes() -> int:
    """DRAM that this process may use: the machine's, or its control group's if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return total


def usable_cores() -> int:
    """Logical CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_description() -> str:
    """Model name and number of logical CPUs."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                name = value.strip()
                break
    return f"{name}, {os.cpu_count()} logical CPUs"


def software_versions(**more: str) -> dict[str, str]:
    """Versions for a ``Stamp``: Python, numpy and whatever the kernels run on."""
    return {"numpy": np.__version__, "python": platform.python_version(), **more}


def _warm_up(kernel: Kernel, clock: Clock) -> int:
    """Run twice; how many calls make one sample long enough for the clock."""
    kernel.run()
    start = clock()
    kernel.run()
    took_s = clock() - start
    return max(1, min(_MAX_CALLS, math.ceil(_SAMPLE_S / took_s))) if took_s > 0 else _MAX_CALLS


def _sample_us(kernel: Kernel, calls: int, clock: Clock) -> float:
    start = clock()
    for _ in range(calls):
        kernel.run()
    # a clock that did not move still took some time; a point must be positive
    return max((clock() - start) / calls * 1e6, 1e-3)


def _point(kernel: Kernel, samples_us: Sequence[float], stamp: Stamp) -> Point:
    return Point(
        processor=kernel.processor,
        operator=kernel.operator,
        format=kernel.format,
        shape=kernel.shape,
        width=kernel.width,
        context=kernel.context,
        time_us=measured(samples_us, stamp),
    )


class _Scratch(NamedTuple):
    """A filled file without a name."""

    handle: int
    direct: bool
    size_bytes: int


@contextlib.contextmanager
def _scratch_file(
    folder: Path, least_bytes: int, most_bytes: int, in_time: Callable[[], bool]
) -> Generator[_Scratch]:
    """A scratch file of ``most_bytes``, or less (not under ``least_bytes``) when time runs out."""
    writer, name = tempfile.mkstemp(prefix=".fulcrum-", dir=folder)
    reader = -1
    try:
        noise = os.urandom(_CHUNK_BYTES)
        try:
            os.pwrite(writer, noise[:4096], 0)
            reader, direct = _open_for_reading(name)
        finally:
            # nameless from here on: not even a killed process leaves it behind
            os.unlink(name)
        size_bytes = 0
        while size_bytes < most_bytes and (size_bytes < least_bytes or in_time()):
            size_bytes += os.pwrite(writer, noise[: most_bytes - size_bytes], size_bytes)
        os.fsync(writer)
        yield _Scratch(reader, direct and not _in_memory(folder), size_bytes)
    finally:
        os.close(writer)
        if reader >= 0:
            os.close(reader)


def _open_for_reading(name: str) -> tuple[int, bool]:
    direct_flag = getattr(os, "O_DIRECT", 0)
    if direct_flag:
        with contextlib.suppress(OSError):
            handle = os.open(name, os.O_RDONLY | direct_flag)
            try:
                # some file systems accept the flag and refuse the read
                with mmap.mmap(-1, 4096) as block:
                    os.preadv(handle, [block], 0)
            except OSError:
                os.close(handle)
                raise
            return handle, True
    return os.open(name, os.O_RDONLY), False


def _in_memory(folder: Path) -> bool:
    """Whether ``folder`` is on a RAM disk, which takes O_DIRECT and is no storage."""
    kinds: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, kind, *_ = line.split(" ")
            kinds[mount] = kind
    resolved = folder.resolve()
    for parent in (resolved, *resolved.parents):
        if str(parent) in kinds:
            return kinds[str(parent)] in ("tmpfs", "ramfs")
    return False


def _offsets(file_bytes: int, size: int, pattern: ReadPattern, seed: int) -> list[int]:
    """Where one sample reads: a stretch of the file, another each time, or blocks all over it."""
    blocks = file_bytes // size
    count = min(blocks, max(1, _SAMPLE_BYTES // size), 2048)
    draw = random.Random(seed)
    if pattern is ReadPattern.RANDOM:
        return [block * size for block in draw.sample(range(blocks), count)]
    first = draw.randrange(blocks - count + 1)
    return [(first + index) * size for index in range(count)]


def _read_rate(scratch: _Scratch, size: int, offsets: Sequence[int], clock: Clock) -> float:
    """Bytes a second of reading blocks of ``size`` at ``offsets``, one after the other."""
    if not scratch.direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(scratch.handle, 0, 0, os.POSIX_FADV_DONTNEED)
    # an anonymous map is aligned to pages, as direct reads demand
    with mmap.mmap(-1, size) as block:
        start = clock()
        for offset in offsets:
            if os.preadv(scratch.handle, [block], offset) != size:
                raise OSError(f"short read of {size} bytes at {offset}")
        return size * len(offsets) / max(clock() - start, 1e-9)


@contextlib.contextmanager
def _reading(scratch: _Scratch, size: int) -> Generator[None]:
    """A thread that reads ``scratch`` from end to end, again and again, in the ``with`` block."""
    stop = threading.Event()

    def read() -> None:
        with mmap.mmap(-1, size) as block:
            for offset in itertools.cycle(range(0, scratch.size_bytes - size + 1, size)):
                if stop.is_set():
                    return
                os.preadv(scratch.handle, [block], offset)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
