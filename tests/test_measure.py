"""Measuring with clocks and kernels of our own making: no verdict depends on real time."""

from pathlib import Path

import pytest

from profiles import measure
from profiles.errors import InputError
from profiles.measure import (
    MIN_REPEATS,
    REPEATS,
    Kernel,
    Progress,
    Stamp,
    cpu_description,
    measure_kernels,
    measure_memory_bandwidth,
    measure_reading_slowdown,
    measure_storage,
    measured,
    memory_total_bytes,
    software_versions,
)
from profiles.profile import LinearShape, ReadPattern
from profiles.words import Format, Operator, Provenance

STAMP = Stamp(cite="a test", date="2026-01-31", versions={"numpy": "2"})


class FakeTime:
    """A clock that moves only when a kernel works, or a little at every look."""

    def __init__(self, per_look_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.per_look_s = per_look_s

    def __call__(self) -> float:
        self.now_s += self.per_look_s
        return self.now_s


def kernel(time: FakeTime, width: int, takes_us: list[float], log: list[int]) -> Kernel:
    """Takes the given times in turn, again and again."""

    def run() -> None:
        time.now_s += takes_us[log.count(width) % len(takes_us)] * 1e-6
        log.append(width)

    return Kernel(
        processor="cpu",
        operator=Operator.LINEAR,
        format=Format.W8A16,
        shape=LinearShape(64, 64),
        width=width,
        run=run,
    )


def test_a_point_holds_the_median_its_spread_and_the_stamp():
    time = FakeTime()
    (point,) = measure_kernels(
        [kernel(time, 4, [100.0, 100.0, 100.0, 900.0], [])], budget_s=1, stamp=STAMP, clock=time
    )
    assert (point.width, point.shape, point.format) == (4, LinearShape(64, 64), Format.W8A16)
    assert point.time_us.value == pytest.approx(100)
    assert point.time_us.source is Provenance.MEASURED
    assert (point.time_us.date, point.time_us.versions) == ("2026-01-31", {"numpy": "2"})


def test_spread_is_interquartile_range_over_median():
    assert measured([10, 20, 30, 40, 50], STAMP).spread == pytest.approx(20 / 30, abs=1e-4)


def test_samples_of_all_kernels_are_interleaved_after_warming_up():
    time, log = FakeTime(), []
    kernels = [kernel(time, width, [50.0], log) for width in (1, 2, 3)]
    measure_kernels(kernels, budget_s=1, stamp=STAMP, clock=time)
    assert log[:6] == [1, 1, 2, 2, 3, 3]
    assert log[6:] == [1, 2, 3] * REPEATS


def test_a_short_kernel_is_called_several_times_a_sample():
    time, log = FakeTime(), []
    (point,) = measure_kernels([kernel(time, 1, [2.0], log)], budget_s=1, stamp=STAMP, clock=time)
    assert len(log) >= 2 + 10 * REPEATS
    assert point.time_us.value == pytest.approx(2)


def test_a_clock_that_stands_still_still_gives_a_positive_time():
    time = FakeTime()
    (point,) = measure_kernels([kernel(time, 1, [0.0], [])], budget_s=1, stamp=STAMP, clock=time)
    assert point.time_us.value > 0


def test_no_kernel_starts_after_the_budget():
    time, log = FakeTime(), []
    kernels = [kernel(time, width, [1e5], log) for width in (1, 2)]
    points = measure_kernels(kernels, budget_s=1.25, stamp=STAMP, clock=time)
    assert time.now_s <= 1.25 + 0.1 + 1e-9
    assert [point.width for point in points] == [1, 2]


def test_a_kernel_with_too_few_samples_is_left_out():
    time, log = FakeTime(), []
    # warm-up takes 0.4 s; 0.5 s more hold three samples of the first and two of the second
    kernels = [kernel(time, width, [1e5], log) for width in (1, 2)]
    points = measure_kernels(kernels, budget_s=0.85, stamp=STAMP, clock=time)
    assert [point.width for point in points] == [1]


def test_a_hopeless_budget_is_refused_with_a_better_one():
    time = FakeTime()
    kernels = [kernel(time, width, [1e6], []) for width in (1, 2, 3)]
    with pytest.raises(InputError, match=r"allow about 15 s"):
        measure_kernels(kernels, budget_s=1, stamp=STAMP, clock=time)


def test_nothing_to_measure_gives_no_points():
    assert measure_kernels([], budget_s=0, stamp=STAMP) == []


def test_progress_is_told_after_every_sample():
    time, seen = FakeTime(), list[Progress]()
    measure_kernels(
        [kernel(time, 1, [50.0], [])], budget_s=1, stamp=STAMP, progress=seen.append, clock=time
    )
    assert [report.done for report in seen] == list(range(1, REPEATS + 1))
    assert {report.total for report in seen} == {REPEATS}


def test_an_error_of_a_kernel_goes_through():
    def fail() -> None:
        raise RuntimeError("no such operator")

    broken = Kernel(
        processor="cpu",
        operator=Operator.LINEAR,
        format=Format.F32,
        shape=LinearShape(1, 1),
        width=1,
        run=fail,
    )
    with pytest.raises(RuntimeError, match="no such operator"):
        measure_kernels([broken], budget_s=1, stamp=STAMP)


def test_storage_is_read_by_block_size_and_pattern_and_leaves_no_file(tmp_path: Path):
    reads = measure_storage(
        tmp_path,
        [4096, 65536],
        budget_s=0,
        stamp=STAMP,
        file_bytes=2**18,
        clock=FakeTime(per_look_s=0.001),
    )
    assert [(read.block_bytes, read.pattern) for read in reads] == [
        (4096, ReadPattern.SEQUENTIAL),
        (4096, ReadPattern.RANDOM),
        (65536, ReadPattern.SEQUENTIAL),
        (65536, ReadPattern.RANDOM),
    ]
    assert all(read.bytes_per_s.source is Provenance.MEASURED for read in reads)
    assert len({read.direct for read in reads}) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_storage_rate_is_bytes_over_time(tmp_path: Path):
    clock = FakeTime(per_look_s=0.5)
    (sequential, _) = measure_storage(
        tmp_path, [65536], budget_s=100, stamp=STAMP, file_bytes=2**18, clock=clock
    )
    # 4 blocks of 64 KiB between two looks at the clock
    assert sequential.bytes_per_s.value == pytest.approx(2**18 / 0.5)


def test_a_file_system_without_direct_reads_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(measure.os, "O_DIRECT", raising=False)
    reads = measure_storage(
        tmp_path, [4096], budget_s=0, stamp=STAMP, file_bytes=2**14, clock=FakeTime(0.001)
    )
    assert not any(read.direct for read in reads)


def test_an_interrupt_leaves_no_file(tmp_path: Path):
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        if looks > 8:
            raise KeyboardInterrupt
        return looks * 0.001

    with pytest.raises(KeyboardInterrupt):
        measure_storage(tmp_path, [4096], budget_s=9, stamp=STAMP, file_bytes=2**14, clock=clock)
    assert list(tmp_path.iterdir()) == []


def test_the_file_stops_growing_at_half_the_budget(tmp_path: Path):
    clock = FakeTime(per_look_s=1)
    reads = measure_storage(
        tmp_path, [4096], budget_s=4, stamp=STAMP, file_bytes=2**26, clock=clock
    )
    assert clock.now_s < 40
    assert len(reads) == 2


@pytest.mark.parametrize("size", [0, 1000, 2**20])
def test_a_block_size_that_does_not_fit_is_refused(tmp_path: Path, size: int):
    with pytest.raises(InputError, match="block size"):
        measure_storage(tmp_path, [size], budget_s=0, stamp=STAMP, file_bytes=2**16)


def test_a_missing_folder_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="cannot measure"):
        measure_storage(tmp_path / "none", [4096], budget_s=0, stamp=STAMP)


def test_a_full_disk_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="bytes free"):
        measure_storage(tmp_path, [4096], budget_s=0, stamp=STAMP, file_bytes=2**60)


def test_memory_bandwidth_is_bytes_over_time():
    rate = measure_memory_bandwidth(stamp=STAMP, array_bytes=2**16, clock=FakeTime(0.001))
    assert rate.value == pytest.approx(2**16 / 0.001)


def test_this_machine_can_be_described():
    assert memory_total_bytes() > 2**28
    assert "CPU" in cpu_description()
    assert software_versions(kernels="1.0")["kernels"] == "1.0"
    assert MIN_REPEATS <= REPEATS


@pytest.mark.parametrize(("beside_s", "expected"), [(1.5, 1.5), (0.8, 1.0)])
def test_slowdown_is_the_ratio_of_work_beside_reads_to_work_alone(
    tmp_path: Path, beside_s: float, expected: float
):
    time, turns = FakeTime(), [0]

    def work() -> None:
        # once to warm up, then alone and beside in turns
        time.now_s += beside_s if turns[0] and turns[0] % 2 == 0 else 1.0
        turns[0] += 1

    found = measure_reading_slowdown(
        *(tmp_path, work), block_bytes=4096, budget_s=9, stamp=STAMP, file_bytes=8192, clock=time
    )
    assert found.value == pytest.approx(expected)
    assert list(tmp_path.iterdir()) == []
