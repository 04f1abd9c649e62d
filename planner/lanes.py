"""Lanes of a decoding cycle: what runs on them, what happened on them, and the clock of all.

The processors are one lane after the other, since a pass waits for whatever it handed over; the
reader of the flash runs beside them. ``simulate`` says what the clock is for.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec

from profiles.words import SubLayerId, SubLayerKind, kind_of

FLASH = "flash"
"""Name of the reader's lane."""


class Role(StrEnum):
    """What a lane does in a stretch of time."""

    DRAFT = "draft"
    TRANSFER = "transfer"
    """Handing hidden rows to a processor."""
    VERIFY = "verify"
    """A sub-layer of the target, whatever the pass is for."""
    HEAD = "head"
    CONSTANT = "constant"
    IDLE = "idle"
    """Time of which only the length is known; reading does not prolong it."""
    WAIT = "wait"
    """For weights that are not there yet."""
    READ = "read"


class Stage(msgspec.Struct, frozen=True):
    """A sub-layer within a pass of the target."""

    sub_layer: SubLayerId
    processor: str
    compute_us: float
    transfer_us: float = 0.0
    """Handing the hidden rows to the processor."""
    stream_bytes: int = 0
    """Read from flash in each pass; 0: in memory."""

    @property
    def kind(self) -> SubLayerKind:
        """Whose slots of the ring it takes."""
        return kind_of(self.sub_layer)


class Task(msgspec.Struct, frozen=True):
    """Work of a cycle besides the target's sub-layers."""

    processor: str
    us: float
    role: Role
    label: str = ""


class CycleWork(msgspec.Struct, frozen=True):
    """What a cycle computes, in order."""

    before: tuple[Task, ...]
    """Drafting."""
    stages: tuple[Stage, ...]
    """The pass of the target."""
    after: tuple[Task, ...]
    """Head and constant."""

    @property
    def compute_us(self) -> float:
        """Time of everything but waiting."""
        stages = sum(stage.transfer_us + stage.compute_us for stage in self.stages)
        return stages + sum(task.us for task in (*self.before, *self.after))

    @property
    def stream_bytes(self) -> int:
        """Read from flash in each pass."""
        return sum(stage.stream_bytes for stage in self.stages)


class Flash(msgspec.Struct, frozen=True):
    """The reader's lane."""

    bytes_per_s: float
    """At the size of its requests."""
    slows_compute: float = 0.0
    """Share by which computing takes longer while a read is under way."""

    def read_us(self, size_bytes: int) -> float:
        """Time to read ``size_bytes``."""
        return 1e6 * size_bytes / self.bytes_per_s


class Event(msgspec.Struct, frozen=True):
    """A stretch of time on a lane, from the cycle's begin."""

    lane: str
    role: Role
    label: str
    start_us: float
    end_us: float
    sub_layer: SubLayerId | None = None


class Held(msgspec.Struct, frozen=True):
    """Slots of the ring that hold a sub-layer or are being read into, from a moment on."""

    us: float
    slots: int


class Record:
    """What happened in one cycle, from its begin."""

    def __init__(self, begun_us: float) -> None:
        self.begun_us = begun_us
        self.events: list[Event] = []
        self.ring: list[Held] = []

    def event(
        self, lane: str, role: Role, span_us: tuple[float, float], label: str, stage: Stage | None
    ) -> None:
        """Note a stretch of time, if it has a length."""
        start, end = (at - self.begun_us for at in span_us)
        start = max(0.0, start)
        if end > start:
            sub_layer = None if stage is None else stage.sub_layer
            self.events.append(Event(lane, role, label, start, end, sub_layer))

    def held(self, us: float, slots: int) -> None:
        """Note how full the ring is."""
        at = us - self.begun_us
        if self.ring and self.ring[-1].us == at:
            self.ring.pop()
        if not self.ring or self.ring[-1].slots != slots:
            self.ring.append(Held(at, slots))


class _Step(NamedTuple):
    """A stretch of computing."""

    processor: str
    role: Role
    us: float
    label: str
    stage: Stage | None = None
    needs: int = 0
    """Reads of this cycle that have to be complete before."""


def _tasks(tasks: Iterable[Task]) -> tuple[_Step, ...]:
    return tuple(_Step(task.processor, task.role, task.us, task.label) for task in tasks)


def _passes(stages: Iterable[Stage]) -> Iterator[_Step]:
    reads = 0
    for stage in stages:
        if stage.transfer_us:
            yield _Step(stage.processor, Role.TRANSFER, stage.transfer_us, "", stage)
        reads += stage.stream_bytes > 0
        needs = reads if stage.stream_bytes else 0
        yield _Step(stage.processor, Role.VERIFY, stage.compute_us, "", stage, needs)


class Clock:
    """Cycles of ``work`` one after the other, the reader running ahead as the ring allows."""

    def __init__(self, work: CycleWork, slots: int, flash: Flash) -> None:
        self.now_us = 0.0
        self.verify_us = self.exposed_us = self.stalled_us = self.reading_us = 0.0
        """Sums over all cycles so far; the last is the reader's busy time."""
        self._before, self._after = _tasks(work.before), _tasks(work.after)
        self._pass = tuple(_passes(work.stages))
        self._reads = tuple(stage for stage in work.stages if stage.stream_bytes)
        self._read_us = tuple(flash.read_us(stage.stream_bytes) for stage in self._reads)
        self._stretch = 1.0 + flash.slows_compute
        counts = {kind: sum(r.kind is kind for r in self._reads) for kind in SubLayerKind}
        # More slots than sub-layers would hold one twice
        self._free = {kind: min(slots, count) for kind, count in counts.items()}
        self._slots = sum(self._free.values())
        self._cycles = self._done = 0
        self._left_us: float | None = None
        self._read_begun_us = 0.0
        self._complete_us = 0.0
        """When the last byte of a pass arrived."""
        self._record: Record | None = None
        if work.compute_us >= sum(self._read_us):
            self._fill()

    def _fill(self) -> None:
        """Begin with a full ring: near the steady state where computing takes longest."""
        while self._reads and self._free[self._next.kind]:
            self._free[self._next.kind] -= 1
            self._done += 1

    @property
    def _next(self) -> Stage:
        return self._reads[self._done % len(self._reads)]

    def sums(self) -> tuple[float, float, float, float, float]:
        """Microseconds since the begin: all, in passes, exposed, stalled, reading."""
        now, passes = self.now_us, self.verify_us
        return now, passes, self.exposed_us, self.stalled_us, self.reading_us

    def state(self) -> tuple[int, float]:
        """How far the reader is ahead of the cycle: reads, and what is left of the one under way.

        All that the following cycles depend on.
        """
        left = -1.0 if self._left_us is None else self._left_us
        return self._done - self._cycles * len(self._reads), left

    def cycle(self, record: Record | None = None) -> None:
        """Everything from the first drafting task to the last constant."""
        self._record = record
        self._note_ring()
        for step in self._before:
            self._compute(step)
        self._verify()
        for step in self._after:
            self._compute(step)
        self._cycles += 1
        self._record_read()

    def _verify(self) -> None:
        begun, first = self.now_us, self._cycles * len(self._reads)
        for step in self._pass:
            if step.needs:
                self._wait(first + step.needs, step)
            self._compute(step)
            if step.needs and step.stage is not None:
                self._free[step.stage.kind] += 1
                self._note_ring()
        self.verify_us += self.now_us - begun
        # The last sub-layer of the next pass cannot have arrived yet: this one's was in its slot
        self.exposed_us += max(0.0, self._complete_us - begun)

    def _wait(self, needed: int, step: _Step) -> None:
        begun = self.now_us
        while self._done < needed:
            self._begin_read()
            self._advance(self._left_us or 0.0)
        self.stalled_us += self.now_us - begun
        if self._record is not None:
            span = begun, self.now_us
            self._record.event(step.processor, Role.WAIT, span, step.label, step.stage)

    def _compute(self, step: _Step) -> None:
        begun, left = self.now_us, step.us
        stretch = 1.0 if step.role is Role.IDLE else self._stretch
        while left > 0:
            self._begin_read()
            # No slot becomes free within a step
            here = left * stretch if self._left_us is not None else left
            if self._left_us is None or here < self._left_us:
                self._advance(here)
                break
            left -= self._left_us / stretch
            self._advance(self._left_us)
        if self._record is not None:
            span = begun, self.now_us
            self._record.event(step.processor, step.role, span, step.label, step.stage)

    def _begin_read(self) -> None:
        if self._left_us is None and self._reads and self._free[self._next.kind]:
            self._free[self._next.kind] -= 1
            self._left_us = self._read_us[self._done % len(self._reads)]
            self._read_begun_us = self.now_us
            self._note_ring()

    def _advance(self, us: float) -> None:
        """Let time go by, at most as much as the read under way takes."""
        self.now_us += us
        if self._left_us is None:
            return
        self.reading_us += us
        self._left_us -= us
        if self._left_us <= 0:
            self._record_read()
            self._left_us = None
            self._done += 1
            if self._done % len(self._reads) == 0:
                self._complete_us = self.now_us

    def _record_read(self) -> None:
        if self._record is not None and self._left_us is not None:
            span = self._read_begun_us, self.now_us
            self._record.event(FLASH, Role.READ, span, "", self._next)

    def _note_ring(self) -> None:
        if self._record is not None:
            self._record.held(self.now_us, self._slots - sum(self._free.values()))
