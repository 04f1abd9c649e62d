"""The reader of streamed sub-layers: right bytes, typed errors, no hang, no thread left."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.errors import FlashError
from profiles.words import SubLayerId, SubLayerKind
from runtime.flash import FlashReader
from runtime.weight_ranges import SubLayerBytes

BLOCK = 4096
SIZES = {0: 3 * BLOCK + 17, 1: 5 * BLOCK, 2: 2 * BLOCK + 1, 3: 5, 4: 3 * BLOCK, 5: 4 * BLOCK - 1}
PATIENCE_S = 20
"""Longer than anything here takes: what hangs fails."""


class Image:
    """A weights file of random bytes."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "weights.bin"
        self.ranges: dict[SubLayerId, SubLayerBytes] = {}
        at = 2 * BLOCK
        for number, size in SIZES.items():
            self.ranges[SubLayerId(number)] = SubLayerBytes(at, size, ())
            at = self.ranges[SubLayerId(number)].end_bytes
        self.bytes = np.random.default_rng(0).integers(0, 256, at + BLOCK, np.uint8)
        self.file.write_bytes(self.bytes.tobytes())

    def of(self, sub_layer: int) -> np.ndarray[Any, Any]:
        place = self.ranges[SubLayerId(sub_layer)]
        return self.bytes[place.offset_bytes : place.offset_bytes + place.bytes]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return Image(tmp_path_factory.mktemp("flash"))


@pytest.fixture
def own(tmp_path: Path) -> Image:
    """One that a test may damage."""
    return Image(tmp_path)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    # Other modules keep sessions open
    before = threading.enumerate()
    yield
    left = [t for t in threading.enumerate() if t not in before]
    assert not [t for t in left if t.name == "fulcrum-flash"]


@pytest.fixture
def opened() -> Iterator[Callable[..., FlashReader]]:
    readers: list[FlashReader] = []

    def reader_of(
        image: Image, slots: int = 2, rate: float | None = None, kind: type = FlashReader
    ) -> FlashReader:
        readers.append(kind(image.file, image.ranges, slots, 2 * BLOCK, rate))
        return readers[-1]

    yield reader_of
    for reader in readers:
        reader.close()


class Faulty(FlashReader):
    """Fails at one place, as often as asked."""

    place, times = 0, 1
    fault: Callable[[], int] = staticmethod(lambda: 0)

    def _read_piece(self, buffer: memoryview, offset: int) -> int:
        if offset == self.place and self.times:
            self.times -= 1
            return self.fault()
        return super()._read_piece(buffer, offset)


def sequence(*numbers: int) -> tuple[SubLayerId, ...]:
    return tuple(map(SubLayerId, numbers))


def take_all(reader: FlashReader, image: Image, wanted: tuple[SubLayerId, ...]) -> None:
    for sub_layer in wanted:
        assert np.array_equal(reader.take(sub_layer), image.of(sub_layer)), sub_layer
        reader.release(sub_layer)


ALL = sequence(*SIZES)


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_passes_get_the_bytes_of_their_sub_layers_over_and_over(opened, image, slots: int) -> None:
    reader = opened(image, slots)
    reader.restart(ALL)
    for _ in range(5):
        take_all(reader, image, ALL)
    assert reader.counters.bytes >= 5 * sum(each.bytes for each in image.ranges.values())


def test_memory_of_what_is_taken_is_that_of_a_slot(opened, image: Image) -> None:
    reader = opened(image, 2)
    reader.restart(ALL)
    known = {kind: {slot.ctypes.data for slot in reader.slots(kind)} for kind in SubLayerKind}
    assert all(address % BLOCK == 0 for found in known.values() for address in found)
    for sub_layer in ALL * 3:
        kind = SubLayerKind.MLP if sub_layer % 2 else SubLayerKind.ATTENTION
        assert reader.take(sub_layer).ctypes.data in known[kind]
        reader.release(sub_layer)


def test_buffered_reads_where_direct_ones_are_refused(opened, image, monkeypatch) -> None:
    opening = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return opening(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    reader = opened(image)
    assert not reader.direct
    reader.restart(ALL)
    take_all(reader, image, ALL * 2)


def test_reads_go_past_the_page_cache_where_that_works(opened, image: Image) -> None:
    try:
        os.close(os.open(image.file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct reads")
    assert opened(image).direct


def test_a_slot_is_not_written_while_it_is_taken(opened, image: Image) -> None:
    reader = opened(image, 1)
    reader.restart(ALL)
    held = reader.take(SubLayerId(0))
    # The MLP's slot is free meanwhile
    while reader.counters.bytes < 9 * BLOCK:
        time.sleep(0.001)
    time.sleep(0.02)
    assert np.array_equal(held, image.of(0))
    assert reader.counters.bytes == 9 * BLOCK
    reader.release(SubLayerId(0))
    take_all(reader, image, sequence(1, 2, 3))


def test_a_restart_keeps_what_the_next_pass_begins_with(opened, image: Image) -> None:
    reader = opened(image, 3)
    reader.restart(ALL)
    while reader.counters.bytes < sum(
        each.end_bytes - each.offset_bytes for each in image.ranges.values()
    ):
        time.sleep(0.001)
    read = reader.counters.bytes
    reader.restart(sequence(0, 2, 5))
    take_all(reader, image, sequence(0, 2, 5))
    reader.restart(ALL)
    take_all(reader, image, ALL)
    assert reader.counters.bytes < read + 2 * image.bytes.size
    reader.restart(())
    reader.restart(sequence(4))
    take_all(reader, image, sequence(4) * 4)


def test_a_restart_recovers_slots_that_were_not_released(opened, image: Image) -> None:
    reader = opened(image, 1)
    for _ in range(3):
        reader.restart(ALL)
        reader.take(SubLayerId(0))
        reader.restart(sequence(3, 4))
        take_all(reader, image, sequence(3))
        reader.take(SubLayerId(4))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), slots=st.integers(1, 4))
def test_any_passes_in_any_order_get_the_right_bytes(image, data, slots: int) -> None:
    reader = FlashReader(image.file, image.ranges, slots, BLOCK)
    try:
        for _ in range(data.draw(st.integers(1, 6))):
            wanted = sequence(*sorted(data.draw(st.sets(st.sampled_from(list(SIZES)), min_size=1))))
            reader.restart(wanted)
            for _ in range(data.draw(st.integers(1, 3))):
                take_all(reader, image, wanted)
            taken = data.draw(st.integers(0, len(wanted)))
            for sub_layer in wanted[:taken]:
                assert np.array_equal(reader.take(sub_layer), image.of(sub_layer))
                if data.draw(st.booleans()) or slots < len(wanted):
                    reader.release(sub_layer)
    finally:
        reader.close()


def test_another_order_than_asked_for_is_an_error(opened, image: Image) -> None:
    reader = opened(image)
    reader.restart(ALL)
    with pytest.raises(FlashError, match="another order"):
        reader.take(SubLayerId(1))


def end_early() -> int:
    return 0


def odd_piece() -> int:
    return 100


def fail() -> int:
    raise OSError(errno.EIO, "Input/output error")


def bug() -> int:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (end_early, "end early"),
        (odd_piece, "end early"),
        (fail, "Input/output error"),
        (bug, "a bug"),
    ],
)
def test_a_fault_is_raised_until_a_restart_and_no_byte_is_handed_out(
    opened, image, fault, words: str
) -> None:
    reader: Faulty = opened(image, 2, kind=Faulty)
    if not reader.direct and fault is odd_piece:
        pytest.skip("buffered reads may be odd")
    reader.fault, reader.place = fault, image.ranges[SubLayerId(2)].offset_bytes
    reader.restart(ALL)
    take_all(reader, image, sequence(0, 1))
    raised: list[FlashError] = []
    for _ in range(3):
        with pytest.raises(FlashError, match=words) as caught:
            reader.take(SubLayerId(2))
        raised.append(caught.value)
    assert str(raised[0]) == str(raised[1])
    assert "weights.bin" in str(raised[0])
    assert raised[0].__cause__ is not None
    reader.restart(ALL)
    take_all(reader, image, ALL)


def test_a_read_in_small_pieces_is_completed(opened, image: Image) -> None:
    class Slow(FlashReader):
        def _read_piece(self, buffer: memoryview, offset: int) -> int:
            return super()._read_piece(buffer[:BLOCK], offset)

    reader = opened(image, 2, kind=Slow)
    reader.restart(ALL)
    take_all(reader, image, ALL * 2)


def test_a_file_cut_off_while_it_is_read_is_an_error(opened, own: Image) -> None:
    reader = opened(own, 1)
    reader.restart(ALL)
    take_all(reader, own, sequence(0, 1))
    os.truncate(own.file, own.ranges[SubLayerId(4)].offset_bytes + BLOCK)
    # What had been read before is right
    with pytest.raises(FlashError, match="end early"):  # noqa: PT012
        take_all(reader, own, sequence(2, 3, 4, 5))
        take_all(reader, own, ALL)
    reader.restart(sequence(0))
    take_all(reader, own, sequence(0))
    own.file.write_bytes(own.bytes.tobytes())
    reader.restart(ALL)
    take_all(reader, own, ALL)


def test_a_folder_in_place_of_the_file_and_no_file_are_errors(image: Image, tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "gone"):
        with pytest.raises(FlashError, match="cannot open"):
            FlashReader(file, image.ranges, 1, BLOCK)


def test_a_descriptor_that_fails_is_an_error(opened, image: Image, tmp_path: Path) -> None:
    reader = opened(image, 1)
    folder = os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, reader._descriptor)
    os.close(folder)
    reader.restart(ALL)
    with pytest.raises(FlashError, match="reading weights failed"):
        reader.take(SubLayerId(0))


def test_closing_ends_a_wait_in_another_thread(opened, image: Image) -> None:
    reader = opened(image, 1, rate=1000.0)
    reader.restart(ALL)
    found: list[BaseException] = []

    def consume() -> None:
        try:
            reader.take(SubLayerId(0))
        except FlashError as error:
            found.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    time.sleep(0.05)
    reader.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert "closed" in str(found[0])
    with pytest.raises(FlashError, match="closed"):
        reader.take(SubLayerId(0))
    reader.close()


def test_an_interrupt_ends_a_wait_and_the_reader_goes_on(opened, image: Image) -> None:
    reader = opened(image, 1, rate=200_000.0)
    reader.restart(ALL)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.02, signal.pthread_kill, [main, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        take_all(reader, image, ALL)
    timer.join()
    reader.restart(ALL)
    take_all(reader, image, sequence(0, 1))


def test_two_readers_of_one_file_do_not_meet(opened, image: Image) -> None:
    one, other = opened(image, 1), opened(image, 3)
    one.restart(ALL)
    other.restart(sequence(1, 5))
    for _ in range(3):
        take_all(one, image, ALL)
        take_all(other, image, sequence(1, 5))
    one.close()
    take_all(other, image, sequence(1, 5))


def test_a_throttled_reader_takes_the_time_of_such_flash(opened, image: Image) -> None:
    rate = 1e6
    reader = opened(image, 1, rate=rate)
    reader.restart(ALL)
    began = time.perf_counter()
    take_all(reader, image, ALL)
    size = sum(each.end_bytes - each.offset_bytes for each in image.ranges.values())
    assert time.perf_counter() - began > 0.9 * size / rate
    found = reader.counters
    assert found.reading_us > 0.9e6 * size / rate
    assert found.waited_us > 0


def test_waiting_is_counted_and_what_is_ready_costs_none(opened, image: Image) -> None:
    reader = opened(image, 3)
    reader.restart(ALL)
    while reader.counters.bytes < sum(
        each.end_bytes - each.offset_bytes for each in image.ranges.values()
    ):
        time.sleep(0.001)
    time.sleep(0.02)
    take_all(reader, image, sequence(0, 1, 2))
    assert reader.counters.waited_us == 0
