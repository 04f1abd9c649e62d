"""Which sub-layers of the target stay in memory under one DRAM budget, and how the others stream.

The budget holds the interpreter, keys and values, a draft model, the head, the resident sub-layers
and the ring. What the ring can prefetch while the draft runs need not be resident and the other way
round (pinning equals prefetching), so the simulator decides (``planner.simulate``): the choice is
the least cycle time; among cycles that take equally long the one that reads least from flash.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import msgspec

from planner.lanes import CycleWork, Flash, Stage, Task
from planner.memory import MEBIBYTE
from planner.simulate import ring_bytes, simulate
from profiles.errors import InfeasibleError, UnsupportedError
from profiles.profile import DeviceProfile, ReadPattern
from profiles.words import Format, SubLayerId, SubLayerKind
from runtime.plan import ALIGNMENT_BYTES, Candidate, Decision, Formats, MemoryNeed, Residency

EQUAL = 1e-3
"""Share by which cycle times may differ and count as equal."""
EQUAL_RATES = 0.05
"""Likewise rates of reading, which are measured less well."""
CANNOT_STREAM = {
    Format.W4: "4-bit blocks are packed anew in every pass unless they are constants, which takes"
    " seconds",
    Format.F32: "sums of floats differ in their last bits from those with constant weights",
}
"""Why weights of a format have to stay in memory."""


class Load(msgspec.Struct, frozen=True):
    """A kind of cycle that the residency is to serve."""

    name: str
    tokens: float
    """Committed in a cycle, on average."""
    before: tuple[Task, ...]
    resident: tuple[Stage, ...]
    """All sub-layers of the pass in order, with weights in memory."""
    streamed: tuple[Stage, ...]
    """The same with weights as they come from flash: ``stream_bytes`` in whole blocks."""
    after: tuple[Task, ...]
    held_bytes: tuple[int, ...] = ()
    """Of each sub-layer where it stays in memory; empty: as in the flash image."""

    @property
    def resident_bytes(self) -> tuple[int, ...]:
        """Of each sub-layer where it stays in memory."""
        return self.held_bytes or tuple(stage.stream_bytes for stage in self.streamed)

    def work(self, streamed: Set[SubLayerId]) -> CycleWork:
        """The cycle when these sub-layers stream."""
        stages = tuple(
            away if away.sub_layer in streamed else here
            for here, away in zip(self.resident, self.streamed, strict=True)
        )
        return CycleWork(self.before, stages, self.after)


class ReadSize(NamedTuple):
    """A size of read requests and the rate that the flash reaches with it."""

    bytes: int
    bytes_per_s: float


class Choice(msgspec.Struct, frozen=True):
    """The outcome."""

    residency: Residency | None
    """None: all of the target stays in memory."""
    need: MemoryNeed
    cycle_us: tuple[float, ...]
    """Of each load."""
    decision: Decision


class _Tried(NamedTuple):
    """A set of streamed sub-layers with the ring that it gets."""

    name: str
    streamed: frozenset[SubLayerId]
    slots: int
    us: float
    """Of the first load."""
    read_bytes: int
    total_bytes: int


def choose_residency(
    budget_bytes: int,
    fixed: MemoryNeed,
    loads: Sequence[Load],
    reads: Sequence[ReadSize],
    kept: Set[SubLayerId] = frozenset(),
    slows_compute: float = 0.0,
) -> Choice:
    """The residency of least cycle time of ``loads[0]``; the other loads are reported with it.

    ``fixed`` is what the budget holds besides sub-layers and ring (``planner.memory.plan_memory``
    with all of them streamed and no slots). ``kept`` have to stay in memory, since a draft runs
    them or their format cannot stream. ``slows_compute`` is that of ``planner.lanes.Flash``.

    Raises:
        InfeasibleError: The budget is too small; says the smallest that works.
    """
    read = fastest(reads)
    flash = Flash(read.bytes_per_s, slows_compute)
    room = budget_bytes - fixed.total_bytes
    load = loads[0]
    tried = _search(load, room, flash, kept)
    if not tried:
        raise _too_small(budget_bytes, fixed, load, kept)
    ranked = rank(tried)
    best = ranked[0]
    times = tuple(simulate(each.work(best.streamed), best.slots, flash).cycle_us for each in loads)
    residency = None
    if best.streamed:
        residency = Residency(tuple(sorted(best.streamed)), best.slots, read.bytes)
    need = msgspec.structs.replace(
        fixed,
        weights_bytes=fixed.weights_bytes + resident_bytes(load, best.streamed),
        ring_bytes=ring_bytes(load.work(best.streamed).stages, best.slots),
    )
    return Choice(residency, need, times, _decision(ranked, loads, times, room, flash, read))


def read_sizes(profile: DeviceProfile) -> tuple[ReadSize, ...]:
    """The profile's sequential reads in whole blocks, past the page cache if measured so."""
    sequential = [r for r in profile.storage.reads if r.pattern is ReadPattern.SEQUENTIAL]
    whole = [r for r in sequential if r.block_bytes % ALIGNMENT_BYTES == 0]
    reads = [r for r in whole if r.direct] or whole
    if not reads:
        raise UnsupportedError(
            f"profile {profile.name} does not say how fast its flash reads in sequence",
            expected=f"storage.reads with blocks of a multiple of {ALIGNMENT_BYTES} bytes",
        )
    return tuple(ReadSize(r.block_bytes, r.bytes_per_s.value) for r in reads)


def fastest(reads: Sequence[ReadSize]) -> ReadSize:
    """The fastest way to read; of those about as fast the largest requests, which need the least
    of a core."""
    best = max(read.bytes_per_s for read in reads)
    near = [read for read in reads if read.bytes_per_s >= best * (1 - EQUAL_RATES)]
    return max(near, key=lambda read: read.bytes)


def bound_to_memory(formats: Formats, sub_layers: Iterable[SubLayerId]) -> frozenset[SubLayerId]:
    """Those of ``sub_layers`` whose format cannot stream."""
    by_kind = (formats.attention, formats.mlp)
    return frozenset(s for s in sub_layers if by_kind[s % 2] in CANNOT_STREAM)


def check_streamable(formats: Formats) -> None:
    """``UnsupportedError`` with the reason if some part of the target has to stay in memory."""
    for part, fmt in (("attention", formats.attention), ("mlp", formats.mlp)):
        if reason := CANNOT_STREAM.get(fmt):
            raise UnsupportedError(
                f"{part} in {fmt} cannot stream from flash: {reason}",
                found=str(formats),
                expected="w8a16 or w8a8",
                hint=f"take --target-format w8a16, or a --dram-budget that holds all of {fmt}",
            )


def resident_bytes(load: Load, streamed: Set[SubLayerId]) -> int:
    """Weights of the sub-layers that stay; each is held once."""
    sizes = zip(load.streamed, load.resident_bytes, strict=True)
    return sum(size for stage, size in sizes if stage.sub_layer not in streamed)


def _search(load: Load, room: int, flash: Flash, kept: Set[SubLayerId]) -> list[_Tried]:
    """Every candidate that fits and could be fastest, with the smallest ring that suffices."""
    candidates = [
        (_bound_us(load, streamed, flash), name, streamed)
        for name, streamed in candidate_sets(load, kept)
    ]
    tried: list[_Tried] = []
    best_us = float("inf")
    for bound_us, name, streamed in sorted(candidates, key=lambda entry: (entry[0], entry[1])):
        if bound_us > best_us * (1 + EQUAL):
            break
        found = _with_ring(load, name, streamed, room, flash)
        if found is not None:
            tried += [found, *_filled(load, found, room, flash)]
            best_us = min(best_us, *(entry.us for entry in tried[-2:]))
    return tried


def _filled(load: Load, entry: _Tried, room: int, flash: Flash) -> list[_Tried]:
    """The same with evenly spread attention in what is left of the memory."""
    attention = sorted(s for s in entry.streamed if s % 2 == 0)
    places = zip(load.streamed, load.resident_bytes, strict=True)
    sizes = {stage.sub_layer: size for stage, size in places}
    largest = max((sizes[s] for s in attention), default=0)
    count = min(len(attention), (room - entry.total_bytes) // largest) if largest else 0
    if not count:
        return []
    stay = {attention[i * len(attention) // count] for i in range(count)}
    name = f"{entry.name}, and {count} of the other attention"
    filled = _with_ring(load, name, entry.streamed - stay, room, flash)
    return [filled] if filled is not None else []


def candidate_sets(
    load: Load, kept: Set[SubLayerId]
) -> Iterator[tuple[str, frozenset[SubLayerId]]]:
    """Names and streamed sets that are considered, each set once.

    By layer, and by one kind of sub-layer with all of the other in memory: the first so many stay
    (Lever), the last, or evenly spread ones. ``kept`` stay in any case.
    """
    free = [stage for stage in load.streamed if stage.sub_layer not in kept]
    layers: dict[int, list[SubLayerId]] = {}
    for stage in free:
        layers.setdefault(stage.sub_layer // 2, []).append(stage.sub_layer)
    attention, mlps = (
        [[s.sub_layer] for s in free if s.kind is kind]
        for kind in (SubLayerKind.ATTENTION, SubLayerKind.MLP)
    )
    seen: set[frozenset[SubLayerId]] = set()
    for noun, units in (
        ("layers", list(layers.values())),
        ("MLPs", mlps),
        ("attention sub-layers", attention),
    ):
        for count in range(len(units), -1, -1):
            for place, stay in _places(len(units), count):
                streamed = frozenset(
                    sub_layer for i, unit in enumerate(units) if i not in stay for sub_layer in unit
                )
                if streamed not in seen:
                    seen.add(streamed)
                    yield f"{place} {count} of {len(units)} {noun} stay", streamed


def _places(units: int, count: int) -> Iterator[tuple[str, frozenset[int]]]:
    yield "first", frozenset(range(count))
    yield "last", frozenset(range(units - count, units))
    yield "spread", frozenset(i * units // count for i in range(count))


def _with_ring(
    load: Load, name: str, streamed: frozenset[SubLayerId], room: int, flash: Flash
) -> _Tried | None:
    """The smallest ring that is as fast as the largest that fits; None if none fits."""
    work = load.work(streamed)
    held = resident_bytes(load, streamed)
    slot_bytes = ring_bytes(work.stages, 1)
    if held + slot_bytes > room:
        return None
    most = 0
    if slot_bytes:
        counts = [sum(s % 2 == kind for s in streamed) for kind in (0, 1)]
        most = min((room - held) // slot_bytes, *(count for count in counts if count))
    us = simulate(work, max(1, most), flash).cycle_us
    low, high = min(1, most), most
    while low < high:
        middle = (low + high) // 2
        if simulate(work, middle, flash).cycle_us <= us * (1 + EQUAL / 10):
            high = middle
        else:
            low = middle + 1
    us = simulate(work, max(1, low), flash).cycle_us
    return _Tried(name, streamed, low, us, work.stream_bytes, held + low * slot_bytes)


def _bound_us(load: Load, streamed: Set[SubLayerId], flash: Flash) -> float:
    """No cycle is shorter than what it computes or what it reads."""
    work = load.work(streamed)
    return max(work.compute_us, flash.read_us(work.stream_bytes))


def rank(tried: Sequence[_Tried]) -> list[_Tried]:
    """Best first: least time; among equal times least bytes read, then the least memory."""
    least_us = min(entry.us for entry in tried)
    near = [entry for entry in tried if entry.us <= least_us * (1 + EQUAL)]
    near.sort(key=lambda e: (e.read_bytes, e.total_bytes, e.us, e.name))
    others = [entry for entry in tried if entry not in near]
    return [*near, *sorted(others, key=lambda e: (e.us, e.read_bytes, e.name))]


def _too_small(
    budget_bytes: int, fixed: MemoryNeed, load: Load, kept: Set[SubLayerId]
) -> InfeasibleError:
    least = min(
        resident_bytes(load, streamed) + ring_bytes(load.work(streamed).stages, 1)
        for _, streamed in candidate_sets(load, kept)
    )
    smallest = -(-(fixed.total_bytes + least) // MEBIBYTE)
    parts = {
        "interpreter": fixed.interpreter_bytes,
        "keys and values": fixed.kv_bytes,
        "draft model": fixed.draft_bytes,
        "head and embedding": fixed.weights_bytes,
        "sub-layers that have to stay, and a ring of one slot": least,
    }
    listed = ", ".join(f"{name} {-(-size // MEBIBYTE)} MiB" for name, size in parts.items() if size)
    return InfeasibleError(
        "the plan does not fit into memory, even with weights streamed from flash",
        found=f"{smallest} MiB: {listed}",
        expected=f"at most {budget_bytes // MEBIBYTE} MiB",
        hint=f"the smallest budget that works is --dram-budget {smallest}MiB; a shorter --context"
        + (" or no --draft" if fixed.draft_bytes else "")
        + (" or --target-format w8a16, which can stream," if kept else "")
        + " needs less",
    )


def _decision(
    ranked: Sequence[_Tried],
    loads: Sequence[Load],
    times: Sequence[float],
    room: int,
    flash: Flash,
    read: ReadSize,
) -> Decision:
    best, load = ranked[0], loads[0]
    everything = resident_bytes(load, frozenset())
    ring = f", {best.slots} slots a kind" if best.streamed else ""
    shown = {_named(entry): entry.us for entry in reversed(ranked)}
    listed = sorted(shown.items(), key=lambda entry: entry[1])
    # The choice first, also where it reads less than an equally fast one
    listed.sort(key=lambda entry: entry[0] != _named(best) and entry[1] >= best.us / (1 + EQUAL))
    missing = -(-(everything - room) // MEBIBYTE)
    flips = f"the budget grows by {missing} MiB: then all of the target stays in memory"
    if not best.streamed:
        flips = (
            f"the budget falls by {(room - everything) // MEBIBYTE + 1} MiB: then weights stream"
        )
    figures = "; ".join(
        f"{each.name}: {us / 1e3:.1f} ms a cycle, {1e6 * each.tokens / us:.2f} tokens/s"
        for each, us in zip(loads, times, strict=True)
    )
    return Decision(
        name="residency",
        chosen=_named(best),
        objective=f"predicted time of a cycle ({load.name}), us, minimised; of equal ones least"
        " bytes from flash",
        value=best.us,
        solver="simulation of every candidate that fits and whose compute and reading leave it a"
        " chance",
        gap=best.us / _least_us(load, room, flash) - 1,
        candidates=tuple(Candidate(name, us) for name, us in listed[:6]),
        flips_when=flips,
        note=f"{best.read_bytes / 1e6:.0f} MB of {everything / 1e6:.0f} MB stream in a pass{ring},"
        f" in reads of {read.bytes} bytes at {read.bytes_per_s / 1e9:.2f} GB/s; {figures}",
    )


def _named(entry: _Tried) -> str:
    return entry.name + (f", {entry.slots} slots a kind" if entry.streamed else "")


def _least_us(load: Load, room: int, flash: Flash) -> float:
    """A bound for any residency: some bytes have to be read, everything has to be computed."""
    missing = max(0, resident_bytes(load, frozenset()) - room)
    triples = list(zip(load.resident, load.streamed, load.resident_bytes, strict=True))
    # What leaves memory, byte by byte: at least so much longer to compute, so much to read
    dearer = min((s.compute_us - r.compute_us) / max(1, held) for r, s, held in triples)
    shorter = min(s.stream_bytes / max(1, held) for _, s, held in triples)
    computing = load.work(frozenset()).compute_us + missing * max(0.0, dearer)
    return max(computing, flash.read_us(1) * missing * shorter)
