"""Times of whole passes on a device: the tables that a plan carries and its cycles are priced with.

Passes that commit run under the target's one assignment, since their numerics must not change; a
draft's state is thrown away, so each of its passes takes the placement that is fastest for it.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from planner.lanes import Flash, Stage
from planner.placement import Assignment, Machine, PlacedPass, Work, place, price
from planner.simulate import stream_table
from profiles.errors import FulcrumError
from profiles.words import AttentionKernel, Format, ProcessorKind, SubLayerId
from runtime.cycle import commit_width
from runtime.plan_cycles import NumericsClass, runs_alone
from runtime.plan_tables import CostTables, PassKind, PassTable, StreamTable
from runtime.pricing import interpolate

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
PROPOSAL_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LONE_ROWS = 2
"""Rows of the narrowest pass on a CPU: one alone is summed by kernels of its own."""
NGRAM_US = 10.0
"""One look-up in a dictionary and the update after it; assumed."""


def context_grid(context: int) -> tuple[int, ...]:
    """Contexts that the tables list: powers of two from 64 up to ``context``."""
    powers = (64 << i for i in range(32))
    return (*itertools.takewhile(lambda at: at < context, powers), context)


class Streaming(NamedTuple):
    """How the target's streamed sub-layers are read."""

    bytes_of: Mapping[SubLayerId, int]
    """Of each streamed sub-layer in the flash image."""
    slots: int
    """Of the ring, for each kind of sub-layer."""
    flash: Flash


class PassTimes:
    """Prices of the passes of one model on one device with one assignment of the target.

    ``draft`` prices a draft model on the same device.
    """

    def __init__(
        self,
        machine: Machine,
        target: Assignment,
        *,
        streaming: Streaming | None = None,
        draft: Machine | None = None,
    ) -> None:
        self.machine = machine
        self.target = target
        self.streaming = streaming
        self.draft = draft
        self.cycle_us = machine.profile.cycle_us.value
        self.all = tuple(SubLayerId(i) for i in range(machine.spec.sub_layers))
        self.classes = numerics_classes(machine, target)
        self._committing: dict[tuple[int, int, int], PlacedPass] = {}
        self._drafting: dict[tuple[tuple[SubLayerId, ...], int], PlacedPass] = {}
        self._proposing: dict[tuple[int, int], PlacedPass] = {}
        self._streams: dict[int, StreamTable] = {}

    def padded(self, rows: int) -> int:
        """Width of a pass of ``rows`` that commits, where one processor runs all of it."""
        return commit_width(self.classes, rows)

    def committing(self, rows: int, context: int, head_rows: int | None = None) -> PlacedPass:
        """AR, verify or prefill: ``rows`` tokens through the full target.

        Each processor pads to its own step, which is part of its costs.
        """
        key = rows, context, rows if head_rows is None else head_rows
        if key not in self._committing:
            width = max(rows, *(c.min_width for c in self.classes))
            placed = price(self.machine, self.target, Work(self.all, width, key[2], context))
            if placed is None:
                raise FulcrumError("the target's assignment cannot run", where=self.target.head)
            self._committing[key] = placed
        return self._committing[key]

    def verify_us(self, rows: int, context: int, ahead_us: float) -> float:
        """AR or verify without the head, ``ahead_us`` after the end of the pass before it."""
        if self.streaming is None:
            return _without_head(self.committing(rows, context, head_rows=1))
        table = self.stream_table(context)
        row = min(bisect_left(table.widths, rows), len(table.widths) - 1)
        return interpolate(table.ahead_us, table.us[row], ahead_us)

    def stream_table(self, context: int) -> StreamTable:
        """Passes of the streamed target at ``context``, as the simulator has them."""
        if self.streaming is None:
            raise FulcrumError("nothing streams")
        if context not in self._streams:
            passes = {width: self.stages(width, context) for width in possible_widths(self)}
            slots, flash = self.streaming.slots, self.streaming.flash
            self._streams[context] = stream_table(passes, slots, flash)
        return self._streams[context]

    def stages(self, rows: int, context: int) -> tuple[Stage, ...]:
        """The sub-layers of a pass that commits, as the simulator takes them."""
        machine, bytes_of = self.machine, self.streaming.bytes_of if self.streaming else {}
        width = max(rows, *(c.min_width for c in self.classes))
        work, here = Work(self.all, width, 1, context), machine.cpu
        found: list[Stage] = []
        for sub_layer, there in zip(self.all, self.target.sub_layers, strict=True):
            us = machine.stage_us(there, sub_layer, work)
            if us is None:
                raise FulcrumError("the target's assignment cannot run", where=there)
            move = machine.handover_us(here, there, machine.hidden_bytes(work))
            found.append(Stage(sub_layer, there, us, move, bytes_of.get(sub_layer, 0)))
            here = there
        return tuple(found)

    def head_us(self, rows: int, context: int) -> float:
        """The LM head over ``rows`` rows in one batch, with the hand-over to it and back."""
        return self.committing(1, context, head_rows=max(rows, self.least_head_rows)).head_us

    @property
    def least_head_rows(self) -> int:
        """Rows of the narrowest pass of the head (``runtime.cycle.head_rows``)."""
        return 2 if self.machine.formats.head is Format.W4 else 1

    def proposing(self, rows: int, context: int) -> PlacedPass:
        """A pass of the draft model with its head over all rows but those caught up, placed
        freely."""
        if self.draft is None:
            raise FulcrumError("there is no draft model")
        if (rows, context) not in self._proposing:
            layers = tuple(SubLayerId(i) for i in range(self.draft.spec.sub_layers))
            work = Work(layers, rows, rows, context)
            placed = price(self.draft, place(self.draft, work), work)
            if placed is None:
                raise FulcrumError("the draft model's assignment cannot run")
            self._proposing[rows, context] = placed
        return self._proposing[rows, context]

    @property
    def runs_alone(self) -> bool:
        """Whether one row can be decoded unpadded: on the CPU alone."""
        return runs_alone(self.classes)

    def alone(self, context: int) -> PlacedPass:
        """Plain decoding at its fastest (``runtime.plan.ALONE``), where ``runs_alone``."""
        work = Work(self.all, 1, 1, context)
        placed = price(self.machine, self.target, work) if self.runs_alone else None
        return placed or self.committing(1, context)

    def drafting(self, skipped: Iterable[SubLayerId], context: int) -> PlacedPass:
        """One drafted token under a skip mask, placed freely."""
        left_out = tuple(skipped)
        if (left_out, context) not in self._drafting:
            work = Work(tuple(i for i in self.all if i not in left_out), 1, 1, context)
            placed = price(self.machine, place(self.machine, work), work)
            if placed is None:
                raise FulcrumError("the draft's assignment cannot run")
            self._drafting[left_out, context] = placed
        return self._drafting[left_out, context]


def numerics_classes(machine: Machine, target: Assignment) -> tuple[NumericsClass, ...]:
    """The target's assignment as ranges of sub-layers."""
    classes: list[NumericsClass] = []
    for index, name in enumerate(target.sub_layers):
        end = SubLayerId(index + 1)
        fmt = machine.format_of(SubLayerId(index))
        if classes and (classes[-1].processor, classes[-1].format) == (name, fmt):
            last = classes.pop()
            first = last.first
        else:
            first = SubLayerId(index)
        processor = machine.profile.processor(name)
        classes.append(
            NumericsClass(
                first=first,
                end=end,
                processor=name,
                processor_kind=processor.kind,
                format=fmt,
                min_width=least_rows(machine) if processor.kind is ProcessorKind.CPU else 1,
                width_step=processor.width_step,
                attention=machine.attention,
            )
        )
    return tuple(classes)


def least_rows(machine: Machine) -> int:
    """Rows of the narrowest pass on a CPU that agrees with wider ones.

    Exact attention has rows enough where heads share keys; blocks of 4 bits never have with one.
    """
    spec, formats = machine.spec, machine.formats
    blocks = Format.W4 in (formats.attention, formats.mlp)
    grouped = machine.attention is AttentionKernel.EXACT and spec.heads > spec.kv_heads
    return 1 if grouped and not blocks else LONE_ROWS


def cost_tables(
    times: PassTimes,
    masks: Sequence[Sequence[SubLayerId]],
    context: int,
    bucket_contexts: Sequence[int],
) -> CostTables:
    """What the runtime looks up; ``masks[0]`` is the full target, ``bucket_contexts`` are those
    that the buckets are priced at.

    AR is one row alone; the verify pass of one row is plain decoding beside drafts. Both are listed
    without the head, which runs over as many rows as are needed; a drafting pass with it, since it
    may be placed elsewhere.
    """
    contexts, widths = context_grid(context), possible_widths(times)
    full = tuple(tuple(times.verify_us(width, at, 0.0) for at in contexts) for width in widths)
    tables = [PassTable(PassKind.VERIFY, 0, widths, contexts, full)]
    if times.runs_alone:
        alone = tuple(_without_head(times.alone(at)) for at in contexts)
        tables.insert(0, PassTable(PassKind.AR, 0, (1,), contexts, (alone,)))
    else:
        tables.insert(0, PassTable(PassKind.AR, 0, (1,), contexts, (full[0],)))
    if times.streaming is None:
        for index, skipped in enumerate(masks):
            row = tuple(times.drafting(skipped, at).us for at in contexts)
            tables.append(PassTable(PassKind.DRAFT, index, (1,), contexts, (row,)))
    if times.draft is not None:
        rows = tuple(
            tuple(times.proposing(width, at).us for at in contexts) for width in PROPOSAL_WIDTHS
        )
        tables.append(PassTable(PassKind.PROPOSE, 0, PROPOSAL_WIDTHS, contexts, rows))
    head = tuple(times.head_us(width, contexts[0]) for width in widths)
    streams = () if times.streaming is None else tuple(map(times.stream_table, bucket_contexts))
    return CostTables(tuple(tables), widths, head, times.cycle_us, NGRAM_US, streams)


def possible_widths(times: PassTimes) -> tuple[int, ...]:
    """Those of ``WIDTHS`` that every processor of the target can run."""
    used = {*times.target.sub_layers, times.target.head}
    most = min(times.machine.profile.processor(name).max_width for name in used)
    return tuple(width for width in WIDTHS if width <= most)


def _without_head(placed: PlacedPass) -> float:
    return placed.us - placed.head_us


def best_chunk(times: PassTimes, context: int) -> int:
    """Prefill chunk of least time per token."""
    widths = possible_widths(times)
    chunks = [width for width in widths if width >= 8] or widths[-1:]
    head_us = times.head_us(1, context)
    return min(chunks, key=lambda w: (times.verify_us(w, context, 0.0) + head_us) / w)
