"""What a decoding cycle takes when the target streams from flash: the planner's judge of time.

A cycle runs on lanes (``planner.lanes``), event by event. The reader takes the streamed sub-layers
in execution order, round and round: behind the last one of a pass it goes on with the first ones of
the next, as long as the ring has a free slot of their kind. A slot becomes free when the sub-layer
in it has been computed. So the ring fills while the draft runs.

Nothing here knows a profile: times and bytes are given. What counts is the steady cycle, the one
that the cycles after it repeat. With S streamed bytes, a ring of M that the draft's time fills and
little to compute, (S - M) / bandwidth of it are exposed; never is it shorter than S / bandwidth.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from planner.lanes import Clock, CycleWork, Event, Flash, Held, Record, Role, Stage, Task
from profiles.words import SubLayerKind
from runtime.plan_tables import StreamTable

MOST_CYCLES = 64
"""Cycles to become steady in. It can take more where two lanes take almost equally long; each cycle
is then almost like the one before."""
LONGEST_PERIOD = 8
"""Cycles that may take turns; so many are averaged where none repeats."""
SAME = 1e-9
"""Share of the time of a cycle by which two states may differ and be the same."""
AHEAD_STEPS = 16
"""Steps of a stream table from no time to read ahead to enough to fill the ring."""


class Timeline(msgspec.Struct, frozen=True):
    """The steady cycle; sums are means where several cycles take turns."""

    cycle_us: float
    verify_us: float
    """Of that, the pass of the target without its head."""
    exposed_io_us: float
    """From the begin of the pass to the arrival of the last byte that it needs."""
    stalled_us: float
    """Of that, the time in which the pass waited."""
    read_bytes: float
    steady: bool
    """Whether it repeats; else it is an average of late cycles."""
    events: tuple[Event, ...]
    """Of one cycle, in the order in which they end."""
    ring: tuple[Held, ...]


def simulate(work: CycleWork, slots: int, flash: Flash) -> Timeline:
    """The steady cycle of ``work`` with ``slots`` (at least 1) for each kind of sub-layer."""
    clock = Clock(work, slots, flash)
    near_us = SAME * (work.compute_us + flash.read_us(work.stream_bytes))
    states = [clock.state()]
    period = 0
    while not period and len(states) < MOST_CYCLES:
        clock.cycle()
        now = clock.state()
        for back, (ahead, left_us) in enumerate(reversed(states[-LONGEST_PERIOD:]), start=1):
            if ahead == now[0] and abs(left_us - now[1]) <= near_us:
                period = back
                break
        states.append(now)
    return _measured(clock, flash, period or LONGEST_PERIOD, steady=period > 0)


def _measured(clock: Clock, flash: Flash, cycles: int, steady: bool) -> Timeline:
    """Means over the next ``cycles``, and the events of the first of them."""
    record = Record(clock.now_us)
    before = clock.sums()
    for number in range(cycles):
        clock.cycle(record if number == 0 else None)
    sums = [(now - then) / cycles for now, then in zip(clock.sums(), before, strict=True)]
    cycle_us, verify, exposed, stalled, reading = sums
    read_bytes = reading * flash.bytes_per_s / 1e6
    events, ring = tuple(record.events), tuple(record.ring)
    return Timeline(cycle_us, verify, exposed, stalled, read_bytes, steady, events, ring)


def verify_us(stages: Sequence[Stage], slots: int, flash: Flash, ahead_us: float) -> float:
    """A pass of the target that begins ``ahead_us`` after the one before has ended."""
    idle = Task("", ahead_us, Role.IDLE)
    return simulate(CycleWork((idle,), tuple(stages), ()), slots, flash).verify_us


def stream_table(passes: Mapping[int, Sequence[Stage]], slots: int, flash: Flash) -> StreamTable:
    """A pass of the target by width and time ahead; ``passes`` are its stages by width, not empty.

    The times ahead go up to what fills the ring: more does not help.
    """
    widths = tuple(sorted(passes))
    full_us = max(flash.read_us(ring_bytes(passes[width], slots)) for width in widths)
    ahead = tuple(full_us * i / AHEAD_STEPS for i in range(AHEAD_STEPS + 1)) if full_us else (0.0,)
    rows = tuple(tuple(verify_us(passes[w], slots, flash, at) for at in ahead) for w in widths)
    return StreamTable(widths, ahead, rows)


def ring_bytes(stages: Iterable[Stage], slots: int) -> int:
    """What a ring takes: for each kind that streams ``slots``, each as large as its largest."""
    largest: dict[SubLayerKind, int] = {}
    for stage in stages:
        if stage.stream_bytes:
            largest[stage.kind] = max(stage.stream_bytes, largest.get(stage.kind, 0))
    return slots * sum(largest.values())
