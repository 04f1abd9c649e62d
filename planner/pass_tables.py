"""Times of whole passes on a device: the tables that a plan carries and its cycles are priced with.

Passes that commit run under the target's one assignment, since their numerics must not change; a
draft's state is thrown away, so each of its passes takes the placement that is fastest for it.
"""

import itertools
from collections.abc import Iterable, Sequence

from planner.placement import Assignment, Machine, PlacedPass, Work, place, price
from profiles.errors import FulcrumError
from profiles.words import AttentionKernel, ProcessorKind, SubLayerId
from runtime.cycle import commit_width
from runtime.plan_cycles import NumericsClass, runs_alone
from runtime.plan_tables import CostTables, PassKind, PassTable

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
LONE_ROWS = 2
"""Rows of the narrowest pass on a CPU: one alone is summed by kernels of its own."""
NGRAM_US = 10.0
"""One look-up in a dictionary and the update after it; assumed."""


def context_grid(context: int) -> tuple[int, ...]:
    """Contexts that the tables list: powers of two from 64 up to ``context``."""
    powers = (64 << i for i in range(32))
    return (*itertools.takewhile(lambda at: at < context, powers), context)


class PassTimes:
    """Prices of the passes of one model on one device with one assignment of the target."""

    def __init__(self, machine: Machine, target: Assignment) -> None:
        self.machine = machine
        self.target = target
        self.cycle_us = machine.profile.cycle_us.value
        self.all = tuple(SubLayerId(i) for i in range(machine.spec.sub_layers))
        self.classes = numerics_classes(machine, target)
        self._committing: dict[tuple[int, int, int], PlacedPass] = {}
        self._drafting: dict[tuple[tuple[SubLayerId, ...], int], PlacedPass] = {}

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
                min_width=LONE_ROWS if processor.kind is ProcessorKind.CPU else 1,
                width_step=processor.width_step,
                attention=AttentionKernel.FUSED,
            )
        )
    return tuple(classes)


def cost_tables(
    times: PassTimes, masks: Sequence[Sequence[SubLayerId]], context: int
) -> CostTables:
    """What the runtime looks up; ``masks[0]`` is the full target.

    AR is one row alone; the verify pass of one row is plain decoding beside drafts. Both are listed
    without the head, which runs over as many rows as are needed; a drafting pass with it, since it
    may be placed elsewhere.
    """
    contexts, widths = context_grid(context), possible_widths(times)
    full = tuple(
        tuple(_without_head(times.committing(width, at)) for at in contexts) for width in widths
    )
    alone = tuple(_without_head(times.alone(at)) for at in contexts)
    tables = [
        PassTable(PassKind.AR, 0, (1,), contexts, (alone,)),
        PassTable(PassKind.VERIFY, 0, widths, contexts, full),
    ]
    for index, skipped in enumerate(masks):
        row = tuple(times.drafting(skipped, at).us for at in contexts)
        tables.append(PassTable(PassKind.DRAFT, index, (1,), contexts, (row,)))
    head = tuple(times.committing(width, contexts[0]).head_us for width in widths)
    return CostTables(tuple(tables), widths, head, times.cycle_us, NGRAM_US)


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
    return min(chunks, key=lambda w: times.committing(w, context, head_rows=1).us / w)
