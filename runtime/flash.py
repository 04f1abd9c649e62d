"""Reads streamed sub-layers from the weights file, ahead of the passes that need them.

One thread reads the sub-layers of a cyclic sequence, in order, into a ring of slots: when a pass
has taken its last one, those of the next pass are being read already. A slot is handed out whole or
not at all, and what went wrong in the thread is raised where a sub-layer is waited for.
"""

import errno
import mmap
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from profiles.errors import FlashError
from profiles.words import SubLayerId, SubLayerKind, kind_of
from runtime.plan import ALIGNMENT_BYTES
from runtime.weight_ranges import SubLayerBytes, aligned

Array = np.ndarray[Any, Any]

_OVERSLEPT_S = 0.002
"""So much that a wait took too long is made good by the next; an idle reader saves nothing up."""
_RECOVERY = "check the disk, and the plan's files with `plan inspect`"


class FlashCounters(NamedTuple):
    """What a reader has done so far: running totals over all passes.

    A pass begins with ``restart`` and uses what it takes.
    """

    bytes: int = 0
    """Read, with what was given up again."""
    waited_us: float = 0.0
    """That passes waited for the arrival of sub-layers."""
    reading_us: float = 0.0
    """That the thread spent reading, delays of a throttled reader included."""
    used_bytes: int = 0
    """Of the sub-layers that passes took, in whole blocks."""
    ahead_bytes: int = 0
    """Of ``used_bytes``, in memory when their pass began."""
    used_us: float = 0.0
    """Of ``reading_us``, over ``used_bytes``."""
    exposed_us: float = 0.0
    """From the begin of each pass to the arrival of the last byte that it took."""

    def since(self, before: "FlashCounters") -> "FlashCounters":
        """What was counted after ``before``."""
        return FlashCounters._make(map(operator.sub, self, before))


class _Slot:
    """A piece of page-aligned memory that holds one sub-layer at a time."""

    def __init__(self, size_bytes: int) -> None:
        # Private, so that it counts as the process's own memory
        self.memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.array = np.frombuffer(self.memory, np.uint8)


class _Entry:
    """A sub-layer in a slot: being read, ready or taken."""

    def __init__(self, sub_layer: SubLayerId, slot: _Slot) -> None:
        self.sub_layer = sub_layer
        self.slot = slot
        self.wanted = True
        self.done_bytes = 0
        """What of it was read."""
        self.ahead_bytes = 0
        """What of it was read when the pass began that it is for."""
        self.read_us = 0.0
        self.arrived = 0.0
        """When it was ready, by ``time.perf_counter``."""


class FlashReader:
    """The ring, and the thread that fills it.

    ``ranges`` are the places of the streamed sub-layers in ``file``; each kind has ``slots`` slots.
    ``read_bytes`` is the size of one request. ``rate_bytes_per_s`` slows reading down, to play
    other flash. One consumer takes; any thread may close.

    ``direct`` says whether reads go past the page cache. Where the file system does not allow that,
    the pages that were read are given up again, which costs a copy.

    Raises:
        FlashError: The file cannot be opened or is too short.
    """

    def __init__(
        self,
        file: Path,
        ranges: Mapping[SubLayerId, SubLayerBytes],
        slots: int,
        read_bytes: int,
        rate_bytes_per_s: float | None = None,
    ) -> None:
        self.ranges = dict(ranges)
        self._file = file
        self._read_bytes, self._rate = read_bytes, rate_bytes_per_s
        self._slots = {
            kind: [_Slot(self._largest(kind)) for _ in range(slots)]
            for kind in SubLayerKind
            if any(kind_of(each) is kind for each in ranges)
        }
        self._changed = threading.Condition()
        self._sequence: tuple[SubLayerId, ...] = ()
        self._next = 0
        """Position in the endless repetition of the sequence of what is read next."""
        self._ready: deque[_Entry] = deque()
        self._taken: dict[SubLayerId, _Entry] = {}
        self._reading: _Entry | None = None
        self._free = {kind: list(slots) for kind, slots in self._slots.items()}
        self._error: FlashError | None = None
        self._closed = False
        self._counted = FlashCounters()
        self._began = self._exposed_until = 0.0
        """When the pass began, and the arrival of the last byte that it took."""
        self._due = 0.0
        """When a throttled reader may go on, by ``time.perf_counter``."""
        self._descriptor, self.direct = self._open()
        self._thread = threading.Thread(target=self._work, name="fulcrum-flash", daemon=True)
        self._thread.start()

    def _largest(self, kind: SubLayerKind) -> int:
        sizes = (each.bytes for sub, each in self.ranges.items() if kind_of(sub) is kind)
        return aligned(max(sizes))

    @property
    def closed(self) -> bool:
        """Whether it reads no more."""
        return self._closed

    @property
    def counters(self) -> FlashCounters:
        """What was read and waited for since the reader was made."""
        with self._changed:
            return self._counted

    def slots(self, kind: SubLayerKind) -> list[Array]:
        """The memory of the slots of a kind: ``take`` returns the beginning of one of them."""
        return [slot.array for slot in self._slots.get(kind, ())]

    def restart(self, sequence: Sequence[SubLayerId]) -> None:
        """The next sub-layers to be taken are those of ``sequence``, over and over.

        What the ring holds of them in this order already stays; the rest is given up, and an
        earlier error is forgotten.
        """
        with self._changed:
            self._sequence, self._error = tuple(sequence), None
            self._taken.clear()
            self._began = self._exposed_until = time.perf_counter()
            kept: list[_Entry] = []
            held = [*self._ready, *([self._reading] if self._reading else [])]
            for entry in held:
                wanted = sequence[len(kept) % len(sequence)] if sequence else None
                entry.wanted = entry.wanted and entry.sub_layer == wanted
                if entry.wanted:
                    entry.ahead_bytes = entry.done_bytes
                    kept.append(entry)
            self._ready = deque(entry for entry in kept if entry is not self._reading)
            self._next = len(kept)
            # A read that is given up may write on for a moment
            used = {id(entry.slot) for entry in held if entry.wanted or entry is self._reading}
            for kind, slots in self._slots.items():
                self._free[kind] = [slot for slot in slots if id(slot) not in used]
            self._changed.notify_all()

    def take(self, sub_layer: SubLayerId) -> Array:
        """The bytes of the next sub-layer of the sequence, once they are there; [n] uint8.

        They stay as they are until ``release``, ``restart`` or ``close``.

        Raises:
            FlashError: Reading failed since the last restart, or the reader was closed.
        """
        with self._changed:
            if not self._ready:
                self._wait()
            if self._closed:
                raise FlashError("the reader was closed", where=self._file)
            if not self._ready and self._error:
                # A new one each time, lest one traceback grow
                raise self._error.again() from self._error
            entry = self._ready[0]
            if entry.sub_layer != sub_layer:
                raise FlashError(
                    "sub-layers are taken in another order than they are read",
                    found=sub_layer,
                    expected=entry.sub_layer,
                )
            self._taken[sub_layer] = entry
            self._ready.popleft()
            self._count_taken(entry)
            return entry.slot.array[: self.ranges[sub_layer].bytes]

    def _wait(self) -> None:
        """Until a sub-layer is ready, or none will be. The lock is held."""
        began = time.perf_counter()
        try:
            while not (self._ready or self._error or self._closed):
                self._changed.wait()
        finally:
            until = self._ready[0].arrived if self._ready else time.perf_counter()
            self._count(waited_us=1e6 * max(until - began, 0.0))

    def _count_taken(self, entry: _Entry) -> None:
        later = max(entry.arrived, self._exposed_until)
        self._count(
            used_bytes=entry.done_bytes,
            ahead_bytes=entry.ahead_bytes,
            used_us=entry.read_us,
            exposed_us=1e6 * (later - self._exposed_until),
        )
        self._exposed_until = later

    def _count(self, **more: float) -> None:
        """Add to the counters. The lock is held."""
        totals = {name: getattr(self._counted, name) + count for name, count in more.items()}
        self._counted = self._counted._replace(**totals)

    def release(self, sub_layer: SubLayerId) -> None:
        """The slot of a taken sub-layer may be written again; it is read no more."""
        with self._changed:
            entry = self._taken.pop(sub_layer, None)
            if entry is not None:
                self._free[kind_of(sub_layer)].append(entry.slot)
                self._changed.notify_all()

    def close(self) -> None:
        """Stop and join the thread; a second call does nothing. Who waits gets a ``FlashError``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open(self) -> tuple[int, bool]:
        """A descriptor of the file, and whether it reads past the page cache."""
        try:
            if direct := getattr(os, "O_DIRECT", 0):
                try:
                    return _readable(self._file, os.O_RDONLY | direct), True
                except OSError as error:
                    # Some file systems refuse to open so, others to read
                    if error.errno != errno.EINVAL:
                        raise
            return _readable(self._file, os.O_RDONLY), False
        except OSError as error:
            raise self._failed("cannot open the weights", error.strerror) from error

    def _work(self) -> None:
        """The thread: reads until it is closed. After an error it waits for a restart."""
        while (entry := self._begin()) is not None:
            began = time.perf_counter()
            error: FlashError | None = None
            try:
                self._read(entry)
            except FlashError as failure:
                error = failure
            except Exception as failure:
                found = getattr(failure, "strerror", None) or str(failure)
                error = self._failed("reading weights failed", found)
                error.__cause__ = failure
            with self._changed:
                entry.arrived = time.perf_counter()
                entry.read_us = 1e6 * (entry.arrived - began)
                self._count(reading_us=entry.read_us)
                self._reading = None
                if error is None and entry.wanted:
                    self._ready.append(entry)
                else:
                    self._free[kind_of(entry.sub_layer)].append(entry.slot)
                    if entry.wanted:
                        self._error = error
                self._changed.notify_all()

    def _begin(self) -> _Entry | None:
        """The next sub-layer with the slot that it goes to, once one is free; None if closed."""
        with self._changed:
            while not self._closed:
                if self._sequence and self._error is None:
                    sub_layer = self._sequence[self._next % len(self._sequence)]
                    if free := self._free[kind_of(sub_layer)]:
                        entry = self._reading = _Entry(sub_layer, free.pop(0))
                        self._next += 1
                        return entry
                self._changed.wait()
            return None

    def _read(self, entry: _Entry) -> None:
        """Fill the slot, piece by piece; gives up once the entry is wanted no more."""
        place = self.ranges[entry.sub_layer]
        buffer, total, done = memoryview(entry.slot.memory), aligned(place.bytes), 0
        while done < total and self._goes_on(entry):
            began = time.perf_counter()
            piece = buffer[done : min(done + self._read_bytes, total)]
            got = self._read_piece(piece, place.offset_bytes + done)
            if got <= 0 or (self.direct and got % ALIGNMENT_BYTES):
                raise self._failed(
                    "the weights end early",
                    f"{place.offset_bytes + done + max(got, 0)} bytes",
                    f"at least {place.end_bytes}",
                )
            done += got
            with self._changed:
                self._count(bytes=got)
            self._pace(entry, began, got)
            with self._changed:
                entry.done_bytes = done
        if not self.direct:
            os.posix_fadvise(self._descriptor, place.offset_bytes, total, os.POSIX_FADV_DONTNEED)

    def _read_piece(self, buffer: memoryview, offset: int) -> int:
        """Read up to the buffer's length; how many bytes."""
        return os.preadv(self._descriptor, [buffer], offset)

    def _goes_on(self, entry: _Entry) -> bool:
        """Whether the rest of a sub-layer is to be read."""
        with self._changed:
            entry.wanted = entry.wanted and not self._closed
            return entry.wanted

    def _pace(self, entry: _Entry, began: float, got: int) -> None:
        """Wait until flash of the given rate would have read ``got`` bytes."""
        if self._rate is None:
            return
        self._due = max(self._due, began - _OVERSLEPT_S) + got / self._rate
        with self._changed:
            while entry.wanted and not self._closed:
                left = self._due - time.perf_counter()
                if left <= 0:
                    return
                self._changed.wait(left)

    def _failed(self, what: str, found: object, expected: object = None) -> FlashError:
        return FlashError(what, where=self._file, found=found, expected=expected, hint=_RECOVERY)


def _readable(file: Path, flags: int) -> int:
    """A descriptor of a file whose first block could be read."""
    descriptor = os.open(file, flags)
    try:
        with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
            os.preadv(descriptor, [page], 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
