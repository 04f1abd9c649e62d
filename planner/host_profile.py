"""The profile of this machine: measured once in little over a minute, then kept in the cache."""

import logging
import platform
import random
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from planner.cache import cache_folder
from planner.host_glue import with_remainder
from planner.locks import locked
from planner.roofline import ROWS_PER_TOKEN
from profiles.errors import FulcrumError, InputError
from profiles.measure import (
    Progress,
    Stamp,
    cpu_description,
    measure_kernels,
    measure_storage,
    memory_total_bytes,
    software_versions,
    usable_cores,
)
from profiles.points import LinearShape, Point, Quantity
from profiles.profile import (
    FORMAT,
    DeviceProfile,
    Memory,
    Processor,
    Storage,
    StorageRead,
    load_profile,
    save_profile,
)
from profiles.words import Format, Operator, ProcessorKind, Provenance

NAME = "host"
CPU = "cpu"
MAX_WIDTH = 512
MOST_BUDGET_BYTES = 8 * 2**30
BLOCK_BYTES = (2**12, 2**16, 2**18, 2**20, 2**22)
READER_BYTES = 2**20

BUSY_SPREAD = 0.25
"""Spread of a typical point above which the measurement is called disturbed."""

METHOD = "operators of emitted graphs, repeated over distinct weights; method 3"
"""Told in every citation; a cached profile of another method is measured again."""

_STORAGE_S = 3.0
_BESIDE_S = 2.0
_CLOSING_S = 2.0
_log = logging.getLogger(__name__)

ReportProgress = Callable[[int, int], None]
"""Hears how many samples were taken, and of how many."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured."""

    points: tuple[Point, ...]
    """Of processor ``cpu``, per operator."""
    reads: tuple[StorageRead, ...]
    bandwidth_bytes_per_s: Quantity
    launch_us: Quantity
    sync_us: Quantity
    cycle_us: Quantity
    stream_call_us: Quantity | None = None
    reading_slowdown: Quantity | None = None


Measure = Callable[[Stamp, int, float, ReportProgress | None], Findings]
"""Measures with a stamp and a number of threads within so many seconds."""


def host_profile(
    path: Path | None = None,
    refresh: bool = False,
    progress: ReportProgress | None = None,
    budget_s: float = 70,
    *,
    threads: int | None = None,
    measure: Measure | None = None,
) -> DeviceProfile:
    """The profile of this machine with ``threads`` threads, by default one for each usable core.

    It is kept at ``path`` (default: in the cache folder) and taken from there while processor,
    threads and onnxruntime are the same; ``refresh`` measures in any case, for about ``budget_s``.
    A place that cannot be written, or a budget too short to
    measure anything, is an ``InputError``.
    """
    threads = threads or usable_cores()
    path = path or _default_path(threads)
    if not refresh and (kept := cached_host_profile(path, threads=threads)) is not None:
        return kept
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("cannot make the folder", where=path, found=error.strerror) from None
    # Two that measure at once would measure each other
    with locked(path.parent, "another process that measures this machine") as waited:
        if waited and (kept := cached_host_profile(path, threads=threads)) is not None:
            return kept
        _log.info("measuring this machine, which takes about %.0f s", budget_s)
        versions = software_versions(onnxruntime=version("onnxruntime"))
        stamp = Stamp(cite=METHOD, versions=versions)
        findings = (measure or measure_host)(stamp, threads, budget_s, progress)
        save_profile(assemble(findings, threads), path)
        # As a later run will find it, so that the same plan comes of both
        return load_profile(path)


def cached_host_profile(
    path: Path | None = None, *, threads: int | None = None
) -> DeviceProfile | None:
    """What ``host_profile`` would return without measuring; None when it would have to."""
    threads = threads or usable_cores()
    path = path or _default_path(threads)
    if not path.exists():
        return None
    try:
        profile = load_profile(path)
    except FulcrumError as error:
        _log.warning("measuring again, the kept profile is damaged: %s", error)
        return None
    cpu, cycle = profile.processors[0], profile.cycle_us
    found = (profile.soc, cpu.threads, cycle.versions.get("onnxruntime"), cycle.cite)
    expected = (cpu_description(), threads, version("onnxruntime"), METHOD)
    if found == expected:
        return profile
    _log.info("measuring again: the kept profile is of %s, this is %s", found, expected)
    return None


def _default_path(threads: int) -> Path:
    return cache_folder() / "profiles" / f"{NAME}-{threads}.toml"


def measure_host(
    stamp: Stamp, threads: int, budget_s: float, progress: ReportProgress | None = None
) -> Findings:
    """Measure everything in about ``budget_s`` seconds, kernels with what the rest leaves."""
    # onnx and onnxruntime load slowly, and a kept profile needs neither
    from planner import host_kernels as host
    from planner.streamed_probe import call_time as stream_call_time

    start = time.perf_counter()
    reads = measure_storage(
        *(cache_folder(), BLOCK_BYTES), budget_s=_STORAGE_S, stamp=stamp, file_bytes=2**27
    )
    bandwidth = host.memory_bandwidth(stamp, threads)
    launch, call = host.launch_time(stamp, threads), host.call_time(stamp, threads)
    cycle = host.cycle_time(stamp, threads)
    slowdown = host.reading_slowdown(stamp, threads, cache_folder(), READER_BYTES, _BESIDE_S)
    with host.host_kernels(threads) as timed:
        left_s = budget_s - _CLOSING_S - (time.perf_counter() - start)
        kernels = [entry.kernel for entry in timed]
        # Two widths of one product in a row would find its weights in a cache; and a while in
        # which the machine is busy should not fall on all products of one width
        random.Random(0).shuffle(kernels)
        points = measure_kernels(kernels, budget_s=left_s, stamp=stamp, progress=_told(progress))
    _tell_if_busy(points)
    found = {_setting(point): point for point in points}
    each = [
        _divided(found[setting], entry.repeats)
        for entry in timed
        if (setting := _setting(entry.kernel)) in found
    ]
    whole = [point for point in each if point.processor == host.PASS]
    alone = [point for point in each if point.processor == CPU]
    calls = [point for point in each if point.processor == host.STREAM]
    operators = with_remainder(alone, whole, host.PROBE)
    return Findings(
        points=operators,
        reads=reads,
        bandwidth_bytes_per_s=bandwidth,
        launch_us=launch,
        sync_us=call,
        cycle_us=cycle,
        stream_call_us=stream_call_time(operators, calls, host.PROBE),
        reading_slowdown=slowdown,
    )


def _tell_if_busy(points: Sequence[Point]) -> None:
    spreads = sorted(point.time_us.spread or 0.0 for point in points)
    if spreads and (typical := spreads[len(spreads) // 2]) > BUSY_SPREAD:
        _log.warning(
            "repeats differ by %.0f %%, so other work slowed this machine while it was measured; "
            "measure again when it is idle",
            100 * typical,
        )


def _told(progress: ReportProgress | None) -> Callable[[Progress], None] | None:
    return None if progress is None else lambda at: progress(at.done, at.total)


def _setting(entry: object) -> tuple[object, ...]:
    """What identifies a kernel and its point."""
    names = ("processor", "operator", "format", "shape", "width", "context")
    return tuple(getattr(entry, name) for name in names)


def _divided(point: Point, repeats: int) -> Point:
    time_us = msgspec.structs.replace(point.time_us, value=point.time_us.value / repeats)
    return msgspec.structs.replace(point, time_us=time_us)


def assemble(findings: Findings, threads: int) -> DeviceProfile:
    """The profile that ``findings`` make, with what is derived and assumed besides."""
    total_bytes = memory_total_bytes()
    bandwidth = findings.bandwidth_bytes_per_s
    stamp = findings.cycle_us
    total = msgspec.structs.replace(
        stamp, value=total_bytes, spread=0.0, cite="reported by the operating system"
    )
    return DeviceProfile(
        format=FORMAT,
        name=NAME,
        description=f"this machine with {threads} threads, measured by Fulcrum",
        soc=cpu_description(),
        os=f"{platform.system()} {platform.release()}",
        cycle_us=findings.cycle_us,
        memory=Memory(
            total_bytes=total,
            default_budget_bytes=_derived(
                min(total_bytes // 2, MOST_BUDGET_BYTES), "half of the memory, at most 8 GiB"
            ),
            bandwidth_bytes_per_s=bandwidth,
        ),
        storage=Storage(findings.reads, findings.reading_slowdown),
        thermal={
            "cold": _derived(1, "the state that it was measured in"),
            "hot": Quantity(
                value=1, source=Provenance.ASSUMED, cite="cooled well enough to hold its speed"
            ),
        },
        processors=(_processor(findings, threads),),
        points=findings.points,
    )


def _processor(findings: Findings, threads: int) -> Processor:
    peaks = _peaks(findings.points)
    supports = {Operator.LINEAR: dict.fromkeys(peaks)}
    supports |= {
        weightless: {Format.F32: None} for weightless in (Operator.ATTENTION, Operator.GLUE)
    }
    for point in findings.points:
        supports.setdefault(point.operator, {})[point.format] = None
    if Format.F32 not in peaks or Format.W8A16 not in peaks:
        raise InputError(
            "too little was measured in time",
            found=", ".join(peaks) or "no linear product",
            expected="f32 and w8a16",
            hint="allow more seconds, or try again when the machine is idle",
        )
    return Processor(
        id=CPU,
        kind=ProcessorKind.CPU,
        threads=threads,
        width_step=1,
        max_width=MAX_WIDTH,
        launch_us=findings.launch_us,
        sync_us=findings.sync_us,
        stream_call_us=findings.stream_call_us,
        bandwidth_bytes_per_s=findings.bandwidth_bytes_per_s,
        supports={operator: tuple(formats) for operator, formats in supports.items()},
        peak_ops_per_s=peaks,
    )


def _peaks(points: Sequence[Point]) -> dict[Format, Quantity]:
    """By format the best rate of its widest products; a multiply-add is two operations."""
    best: dict[Format, tuple[int, float]] = {}
    for point in points:
        if point.operator is Operator.LINEAR and isinstance(point.shape, LinearShape):
            rows = point.width * ROWS_PER_TOKEN[point.format]
            rate = 2 * point.shape.k * point.shape.n * rows / point.time_us.value * 1e6
            best[point.format] = max(best.get(point.format, (0, 0.0)), (point.width, rate))
    return {
        fmt: _derived(rate, f"the fastest product measured at width {width}")
        for fmt, (width, rate) in sorted(best.items())
    }


def _derived(value: float, cite: str) -> Quantity:
    return Quantity(value=value, source=Provenance.DERIVED, cite=cite)
