"""The part of the plan that says what passes cost: placements and the tables to look up."""

from enum import StrEnum

from profiles.words import SubLayerId
from runtime.plan_types import Count, Document, Microseconds, Width


class Span(Document, frozen=True):
    """A run of sub-layers on one processor within a pass, as the planner placed it."""

    first: SubLayerId
    end: SubLayerId
    processor: str
    compute_us: Microseconds
    transfer_us: Microseconds
    """Handing the hidden rows to this processor."""


class PassKind(StrEnum):
    """What a pass is for."""

    AR = "ar"
    DRAFT = "draft"
    VERIFY = "verify"
    PREFILL = "prefill"
    PROPOSE = "propose"
    """Of the draft model, its head included."""


class Placement(Document, frozen=True):
    """Where the sub-layers of one pass of one bucket run, and what that is predicted to take."""

    bucket: Count
    kind: PassKind
    width: Width
    context: Count
    spans: tuple[Span, ...]
    head_processor: str
    head_rows: Count
    head_us: Microseconds
    handover_bytes: Count
    """Bytes of hidden rows that cross from span to span."""


class PassTable(Document, frozen=True):
    """Predicted device time of a pass under one mask and one placement."""

    kind: PassKind
    mask: Count
    widths: tuple[Width, ...]
    contexts: tuple[Count, ...]
    us: tuple[tuple[Microseconds, ...], ...]
    """By width, then by context."""


class StreamTable(Document, frozen=True):
    """Predicted time of a verify pass of a streamed target, without the head, in one bucket.

    It depends on how long the flash could read ahead into the ring before the pass began.
    """

    widths: tuple[Width, ...]
    ahead_us: tuple[Microseconds, ...]
    """Time from the end of the verify pass before to the begin of this one, ascending from 0."""
    us: tuple[tuple[Microseconds, ...], ...]
    """By width, then by ``ahead_us``."""


class CostTables(Document, frozen=True):
    """All that the runtime looks up; it never simulates."""

    passes: tuple[PassTable, ...]
    head_widths: tuple[Width, ...]
    head_us: tuple[Microseconds, ...]
    cycle_us: Microseconds
    """Constant of a pass: the call, sampling, bookkeeping. A chain of n pays it n + 1 times."""
    ngram_us: Microseconds
    """One n-gram lookup."""
    streams: tuple[StreamTable, ...] = ()
    """One for each bucket where sub-layers stream from flash; else none."""
