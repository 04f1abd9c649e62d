"""The simulator against closed forms, against recurrences, and for what must always hold."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.lanes import FLASH, CycleWork, Flash, Role, Stage, Task
from planner.simulate import Timeline, ring_bytes, simulate, stream_table, verify_us
from profiles.words import SubLayerId, SubLayerKind, kind_of
from runtime.pricing import interpolate

FLASH_1_BYTE_PER_US = Flash(1e6)


def stages(
    compute_us: Sequence[float], stream_bytes: Sequence[int], transfer_us: float = 0.0
) -> tuple[Stage, ...]:
    return tuple(
        Stage(SubLayerId(i), "cpu", us, transfer_us, size)
        for i, (us, size) in enumerate(zip(compute_us, stream_bytes, strict=True))
    )


def work(draft_us: float, passing: tuple[Stage, ...], after_us: float = 0.0) -> CycleWork:
    after = (Task("cpu", after_us, Role.HEAD),)
    return CycleWork((Task("cpu", draft_us, Role.DRAFT),), passing, after)


def recurrence_us(cycle: CycleWork, slots: int, flash: Flash, cycles: int = 400) -> float:
    """Mean time of late cycles by two recurrences over begins and ends; no lanes, no events.

    A read begins when the one before has ended and the sub-layer that held its slot was computed;
    a sub-layer is computed when the one before was and its own read has ended.
    """
    streamed = [i for i, stage in enumerate(cycle.stages) if stage.stream_bytes]
    held: dict[SubLayerKind, int] = {
        kind: min(slots, sum(kind_of(cycle.stages[i].sub_layer) is kind for i in streamed))
        for kind in SubLayerKind
    }
    released: dict[SubLayerKind, list[float]] = {kind: [0.0] * held[kind] for kind in held}
    taken = dict.fromkeys(SubLayerKind, 0)
    now = reader = 0.0
    ends: list[float] = []
    for _ in range(cycles):
        now += sum(task.us for task in cycle.before)
        for stage in cycle.stages:
            now += stage.transfer_us
            if stage.stream_bytes:
                # The release that this read waits for lies at least one pass's worth back
                begin = max(reader, released[stage.kind][taken[stage.kind]])
                taken[stage.kind] += 1
                reader = begin + flash.read_us(stage.stream_bytes)
                now = max(now, reader)
            now += stage.compute_us
            if stage.stream_bytes:
                released[stage.kind].append(now)
        now += sum(task.us for task in cycle.after)
        ends.append(now)
    # A multiple of every period up to 8 that small instances have
    return (ends[-1] - ends[-1 - 168]) / 168


sizes = st.lists(st.integers(0, 40), min_size=1, max_size=9)


@st.composite
def works(draw: st.DrawFn) -> CycleWork:
    streamed = draw(sizes)
    compute = draw(st.lists(st.integers(0, 30), min_size=len(streamed), max_size=len(streamed)))
    transfer = draw(st.sampled_from((0, 0, 3)))
    draft, after = draw(st.integers(0, 120)), draw(st.integers(1, 20))
    return work(draft, stages(compute, streamed, transfer), after)


@given(works(), st.integers(1, 6))
def test_the_steady_cycle_is_that_of_the_recurrences(cycle: CycleWork, slots: int) -> None:
    found = simulate(cycle, slots, FLASH_1_BYTE_PER_US)
    expected = recurrence_us(cycle, slots, FLASH_1_BYTE_PER_US)
    assert found.cycle_us == pytest.approx(expected, rel=1e-3 if found.steady else 0.02)


@given(works(), st.integers(1, 6), st.sampled_from((0.0, 0.1, 1.0)))
def test_a_steady_cycle_reads_what_a_pass_streams(
    cycle: CycleWork, slots: int, slows: float
) -> None:
    found = simulate(cycle, slots, Flash(1e6, slows))
    if found.steady:
        assert found.read_bytes == pytest.approx(cycle.stream_bytes, abs=1e-6)
    assert found.cycle_us >= max(cycle.compute_us, cycle.stream_bytes) * (1 - 1e-9) or (
        not found.steady
    )
    assert found.stalled_us <= found.exposed_io_us + 1e-6
    assert found.exposed_io_us <= found.verify_us + 1e-6


@given(works(), st.integers(1, 5), st.integers(1, 5))
def test_more_slots_and_more_bandwidth_never_take_longer(
    cycle: CycleWork, slots: int, more: int
) -> None:
    base = simulate(cycle, slots, FLASH_1_BYTE_PER_US)
    wider = simulate(cycle, slots + more, FLASH_1_BYTE_PER_US)
    faster = simulate(cycle, slots, Flash(1e6 * (1 + more)))
    slack = 1e-6 if base.steady and wider.steady and faster.steady else 0.02 * base.cycle_us
    assert wider.cycle_us <= base.cycle_us + slack
    assert faster.cycle_us <= base.cycle_us + slack


@given(works(), st.integers(1, 6), st.sampled_from((0.0, 0.3)))
def test_lanes_do_one_thing_at_a_time_and_the_ring_holds_its_slots(
    cycle: CycleWork, slots: int, slows: float
) -> None:
    found = simulate(cycle, slots, Flash(1e6, slows))
    for lane in {event.lane for event in found.events}:
        events = sorted((e for e in found.events if e.lane == lane), key=lambda e: e.start_us)
        for left, right in itertools.pairwise(events):
            assert left.end_us <= right.start_us + 1e-6
    computing = sum(e.end_us - e.start_us for e in found.events if e.lane != FLASH)
    last = max(e.end_us for e in found.events if e.lane != FLASH) if computing else 0.0
    assert computing == pytest.approx(last)
    streamed = [stage for stage in cycle.stages if stage.stream_bytes]
    most = sum(min(slots, sum(s.kind is kind for s in streamed)) for kind in SubLayerKind)
    assert all(0 <= held.slots <= most for held in found.ring)


def test_a_resident_target_takes_the_sum_of_its_parts() -> None:
    found = simulate(work(700, stages([30, 50], [0, 0], 5), 20), 1, FLASH_1_BYTE_PER_US)
    assert (found.cycle_us, found.verify_us) == (810, 90)
    assert (found.exposed_io_us, found.read_bytes, found.ring[-1].slots) == (0, 0, 0)
    roles = [event.role for event in found.events]
    assert roles == [
        *(Role.DRAFT, Role.TRANSFER, Role.VERIFY, Role.TRANSFER, Role.VERIFY, Role.HEAD)
    ]


@pytest.mark.parametrize("slots", [1, 2, 5, 9])
def test_what_the_ring_cannot_prefetch_is_exposed(slots: int) -> None:
    """(S - M) / B, as long as the draft's time fills the ring and computing takes none."""
    passing = stages([0.0] * 20, [100] * 20)
    found = simulate(work(5000, passing), slots, FLASH_1_BYTE_PER_US)
    streamed, ring = 2000, ring_bytes(passing, slots)
    assert ring == 2 * slots * 100
    assert found.exposed_io_us == pytest.approx(streamed - ring)
    assert found.cycle_us == pytest.approx(5000 + streamed - ring)
    assert found.verify_us == found.stalled_us == pytest.approx(streamed - ring)


@pytest.mark.parametrize("pinned", [4, 10, 16])
def test_pinning_takes_as_long_as_prefetching(pinned: int) -> None:
    pins = stages([0.0] * 20, [0] * pinned + [100] * (20 - pinned))
    ring = stages([0.0] * 20, [100] * 20)
    budget_slots = pinned // 2
    by_ring = simulate(work(5000, ring), budget_slots + 1, FLASH_1_BYTE_PER_US)
    by_pins = simulate(work(5000, pins), 1, FLASH_1_BYTE_PER_US)
    assert by_pins.cycle_us == pytest.approx(by_ring.cycle_us)
    assert by_pins.read_bytes == by_ring.read_bytes - 100 * pinned


def test_where_reading_takes_longest_a_cycle_takes_as_long() -> None:
    found = simulate(work(300, stages([20.0] * 10, [100] * 10), 50), 5, FLASH_1_BYTE_PER_US)
    assert found.cycle_us == pytest.approx(1000)


def test_where_computing_takes_longest_reading_is_hidden() -> None:
    found = simulate(work(300, stages([200.0] * 10, [100] * 10), 50), 5, FLASH_1_BYTE_PER_US)
    assert found.cycle_us == pytest.approx(2350)
    assert found.stalled_us == 0


def test_one_slot_makes_reading_and_computing_of_a_kind_take_turns() -> None:
    passing = tuple(Stage(SubLayerId(2 * i), "cpu", 70.0, 0.0, 100) for i in range(6))
    found = simulate(work(0, passing), 1, FLASH_1_BYTE_PER_US)
    assert found.cycle_us == pytest.approx(6 * (100 + 70))


def test_reading_slows_computing_for_as_long_as_it_lasts() -> None:
    """All 1000 bytes are read while 2350 us are computed: a quarter more of what that overlaps."""
    cycle = work(300, stages([200.0] * 10, [100] * 10), 50)
    found = simulate(cycle, 5, Flash(1e6, slows_compute=0.25))
    assert found.cycle_us == pytest.approx(2350 + 1000 * (1 - 1 / 1.25))


def test_idle_time_is_not_slowed() -> None:
    """In the pass of four sub-layers a slot is free, and read into, from the second one on."""
    passing = stages([10.0] * 4, [100] * 4)
    idle = CycleWork((Task("", 1000.0, Role.IDLE),), passing, ())
    found = simulate(idle, 2, Flash(1e6, slows_compute=0.5))
    assert (found.verify_us, found.cycle_us) == (pytest.approx(55), pytest.approx(1055))


def test_a_stream_table_holds_passes_by_width_and_time_ahead() -> None:
    passes = {width: stages([2.0 * width] * 12, [0] * 4 + [100] * 8) for width in (1, 4)}
    table = stream_table(passes, 2, FLASH_1_BYTE_PER_US)
    assert table.widths == (1, 4)
    assert table.ahead_us[0] == 0
    assert table.ahead_us[-1] == ring_bytes(passes[1], 2) == 400
    for row, width in zip(table.us, table.widths, strict=True):
        assert list(row) == sorted(row, reverse=True)
        for ahead in (0.0, 130.0, 333.0, 400.0, 9000.0):
            exact = verify_us(passes[width], 2, FLASH_1_BYTE_PER_US, ahead)
            assert interpolate(table.ahead_us, row, ahead) == pytest.approx(exact, rel=0.02)


def test_the_table_of_a_resident_pass_has_one_column() -> None:
    table = stream_table({2: stages([3.0, 4.0], [0, 0])}, 1, FLASH_1_BYTE_PER_US)
    assert (table.ahead_us, table.us) == ((0.0,), ((7.0,),))


def test_equal_inputs_give_equal_timelines() -> None:
    def once() -> Timeline:
        return simulate(work(77, stages([9.0] * 6, [31] * 6), 5), 2, Flash(1e6, 0.1))

    assert once() == once()
