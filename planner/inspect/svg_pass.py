"""One pass as a row of the picture: embedding, spans in lanes, head and sampler."""

from collections.abc import Sequence

import msgspec

from planner.inspect.figures import HIDDEN_BYTES, format_of, rows_bytes, runs, sub_layers_label
from planner.inspect.svg_canvas import (
    BAND,
    INK,
    LINE,
    MUTED,
    WHITE,
    Canvas,
    first_fitting,
    fitting,
)
from planner.inspect.svg_scale import (
    BAND_END,
    BAND_X,
    BOX_HEIGHT,
    EMBED_WIDTH,
    EMBED_X,
    HEAD_WIDTH,
    HEAD_X,
    SAMPLER_WIDTH,
    SAMPLER_X,
    SPANS_X,
    Colours,
    Lanes,
    Scale,
)
from planner.inspect.units import bytes_label, clean, counted, time_label
from profiles.words import SubLayerId, layer_of
from runtime.plan import ExecutionPlan
from runtime.plan_tables import Placement, Span

CELL_HEIGHT = 14.0
HOLLOW = "#b6c0ca"

_CELL_TOP = 21.0
_PAD = 4.0
_ROOMY = 30.0


class Row(msgspec.Struct, frozen=True):
    """A pass and where it is drawn."""

    placement: Placement
    skipped: frozenset[SubLayerId]
    y: float
    lanes: Lanes
    scale: Scale
    colours: dict[str, Colours]

    @property
    def first_processor(self) -> str:
        """Where the embedding is drawn: the lane that takes its rows."""
        spans = self.placement.spans
        return spans[0].processor if spans else self.placement.head_processor

    @property
    def in_y(self) -> float:
        """Height at which tokens come in."""
        return self.lanes.middle(self.first_processor, self.y)

    @property
    def out_y(self) -> float:
        """Height at which sampled tokens go out."""
        return self.lanes.middle(self.placement.head_processor, self.y)


def draw_pass(canvas: Canvas, plan: ExecutionPlan, row: Row) -> None:
    """The whole row; arrows into the embedding and out of the sampler are the caller's."""
    _box(canvas, EMBED_X, row.in_y, EMBED_WIDTH, ("embed",), LINE)
    for before, span in zip((None, *row.placement.spans), row.placement.spans, strict=False):
        _handover(canvas, plan, row, before, span)
    for span in row.placement.spans:
        _span(canvas, plan, row, span)
    _head(canvas, plan, row)


def draw_bands(canvas: Canvas, row: Row) -> None:
    """The lanes behind a pass, each with its processor's name."""
    busy = {row.placement.head_processor, *(span.processor for span in row.placement.spans)}
    for processor in row.lanes.processors:
        top = row.lanes.top(processor, row.y)
        canvas.rect(BAND_X, top, BAND_END - BAND_X, row.lanes.lane_height, fill=BAND, radius=4)
        name = fitting(clean(processor), SPANS_X - BAND_X - 46, 11, bold=True)
        idle = "" if processor in busy else "idle"
        dark = row.colours[processor].dark
        canvas.text(BAND_X + 7, top + 12, name, size=11, fill=dark, bold=True, then=idle)


def _box(
    canvas: Canvas, x: float, middle: float, width: float, lines: tuple[str, ...], stroke: str
) -> None:
    height = BOX_HEIGHT if len(lines) > 1 else 30.0
    canvas.rect(x, middle - height / 2, width, height, stroke=stroke, radius=4)
    first = middle + 4 - 7.5 * (len(lines) - 1)
    for number, line in enumerate(lines):
        size = 10 if number else 12
        shown = fitting(line, width - 4, size)
        canvas.text(
            x + width / 2,
            first + 15 * number,
            shown,
            size=size,
            fill=MUTED if number else INK,
            anchor="middle",
        )


def span_left(row: Row, span: Span) -> float:
    """Left end of a span's cells."""
    return row.scale.start(span.first)


def span_right(row: Row, span: Span) -> float:
    """Right end of a span's cells."""
    return row.scale.end(span.end)


def box_margin(row: Row, span: Span) -> float:
    """By how much a span's box is larger than its cells."""
    return _PAD if span_right(row, span) - span_left(row, span) > _ROOMY else 1.0


def _handover(
    canvas: Canvas, plan: ExecutionPlan, row: Row, before: Span | None, span: Span
) -> None:
    """The hidden rows into a span: bytes, and the predicted time where it is not nothing."""
    tip = (span_left(row, span) - box_margin(row, span), row.lanes.middle(span.processor, row.y))
    size = bytes_label(rows_bytes(plan, row.placement.width))
    lines = [size] + ([time_label(span.transfer_us)] if span.transfer_us else [])
    if before is None:
        tail = (EMBED_X + EMBED_WIDTH, row.in_y)
        canvas.line(tail, tip, tip=True)
        _beside(canvas, (tail[0] + tip[0]) / 2, tip[1], lines)
        return
    tail_x = span_right(row, before) + box_margin(row, before)
    tail_y = row.lanes.middle(before.processor, row.y)
    bend = (tail_x + tip[0]) / 2
    points = ((tail_x, tail_y), (bend, tail_y), (bend, tip[1]), tip)
    if not row.scale.labelled:
        canvas.line(*points, color=MUTED, width=0.8)
        return
    canvas.line(*points, tip=True)
    if tail_y == tip[1]:
        _beside(canvas, bend, tail_y, lines)
    else:
        canvas.chip(bend, (tail_y + tip[1]) / 2, lines)


def _beside(canvas: Canvas, x: float, y: float, lines: Sequence[str]) -> None:
    """One line of text above a horizontal arrow, the next below it."""
    for line, baseline in zip(lines, (y - 7, y + 15), strict=False):
        canvas.text(x, baseline, line, size=10, fill=MUTED, anchor="middle")


def _span(canvas: Canvas, plan: ExecutionPlan, row: Row, span: Span) -> None:
    """A box with a cell per sub-layer; hollow cells are left out by the pass's mask."""
    left, right = span_left(row, span), span_right(row, span)
    top = row.lanes.middle(span.processor, row.y) - BOX_HEIGHT / 2
    colours = row.colours[span.processor]
    numbers = sub_layers_label(span.first, span.end)
    time, format_name = time_label(span.compute_us), format_of(plan, span)
    running = runs(span, row.skipped)
    left_out = span.end - span.first - running
    some = f", {left_out} left out" if left_out else ""
    margin = box_margin(row, span)
    canvas.rect(
        left - margin,
        top,
        right - left + 2 * margin,
        BOX_HEIGHT,
        stroke=colours.dark,
        radius=min(4.0, 2 * margin),
        role="span",
        tooltip=f"{clean(span.processor)}: sub-layers {numbers}{some}, {format_name}, {time}",
    )
    label = first_fitting(
        (
            f"sub-layers {numbers}{some} · {format_name} · {time}",
            f"{numbers}{some} · {format_name} · {time}",
            f"{numbers} · {time}",
            time,
        ),
        right - left,
        11,
    )
    canvas.text((left + right) / 2, top + 15, label, size=11, anchor="middle")
    for sub_layer in range(span.first, span.end):
        _cell(canvas, row, SubLayerId(sub_layer), top + _CELL_TOP, colours)


def _cell(canvas: Canvas, row: Row, sub_layer: SubLayerId, top: float, colours: Colours) -> None:
    slot = row.scale.slot
    seam = min(3.0, max(0.8, 0.14 * slot))
    left, width = row.scale.start(sub_layer) + seam / 2, slot - seam
    attention = sub_layer % 2 == 0
    skipped = sub_layer in row.skipped
    if skipped:
        canvas.rect(
            left + 0.5,
            top + 0.5,
            width - 1,
            CELL_HEIGHT - 1,
            stroke=HOLLOW,
            radius=1.5,
            role="cell skipped",
        )
    else:
        fill = colours.dark if attention else colours.light
        canvas.rect(left, top, width, CELL_HEIGHT, fill=fill, radius=1.5, role="cell")
    kind = "attention" if attention else "MLP"
    name = first_fitting((f"{kind} {layer_of(sub_layer)}",), width - 4, 9)
    ink = MUTED if skipped else (WHITE if attention else INK)
    canvas.text(left + width / 2, top + 10.5, name, size=9, fill=ink, anchor="middle")


def _head(canvas: Canvas, plan: ExecutionPlan, row: Row) -> None:
    placement, middle = row.placement, row.out_y
    rows_in = bytes_label(rows_bytes(plan, placement.head_rows))
    if placement.spans:
        last = placement.spans[-1]
        tail = (
            span_right(row, last) + box_margin(row, last),
            row.lanes.middle(last.processor, row.y),
        )
    else:
        tail = (EMBED_X + EMBED_WIDTH, row.in_y)
    bend = HEAD_X - 31
    canvas.line(tail, (bend, tail[1]), (bend, middle), (HEAD_X, middle), tip=True)
    if tail[1] == middle:
        _beside(canvas, bend, middle, (rows_in,))
    else:
        canvas.chip(bend, (tail[1] + middle) / 2, [rows_in])
    stroke = row.colours[placement.head_processor].dark
    _box(canvas, HEAD_X, middle, HEAD_WIDTH, ("head", time_label(placement.head_us)), stroke)
    canvas.line((HEAD_X + HEAD_WIDTH, middle), (SAMPLER_X, middle), tip=True)
    logits = bytes_label(placement.head_rows * plan.model.vocab * HIDDEN_BYTES)
    between = (HEAD_X + HEAD_WIDTH + SAMPLER_X) / 2
    _beside(canvas, between, middle, (logits, counted(placement.head_rows, "row")))
    _box(canvas, SAMPLER_X, middle, SAMPLER_WIDTH, ("sample",), LINE)
