"""A plan as one self-contained SVG picture, 1600 pixels wide, bucket by bucket."""

from planner.inspect.figures import (
    BucketFigures,
    bucket_figures,
    context_label,
    cycle_label,
    processors_of,
)
from planner.inspect.svg_bucket import KV_FILL, KV_STROKE, draw_cycle
from planner.inspect.svg_canvas import INK, LINE, MUTED, RULE, Canvas, fitting, text_width
from planner.inspect.svg_pass import CELL_HEIGHT, HOLLOW
from planner.inspect.svg_scale import MARGIN, PAGE_WIDTH, RIGHT, Colours, colours_of
from planner.inspect.svg_time import draw_times, longest_us
from planner.inspect.units import bytes_label, clean, percent_label, rate_label, ratio_label
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import DraftSource

_NOTE = (
    "All times are predictions from the device profile; acceptance and the format's quality "
    "are measured in calibration."
)


def plan_svg(plan: ExecutionPlan) -> str:
    """The picture; the same plan gives the same bytes."""
    canvas = Canvas()
    figures = bucket_figures(plan)
    colours = colours_of(processors_of(plan))
    y = _title(canvas, plan)
    axis_us = longest_us(figures)
    for entry in figures:
        y = _panel(canvas, plan, entry, colours, axis_us, y)
    if not figures:
        canvas.text(MARGIN, y + 24, "This plan holds no buckets.", fill=MUTED)
        y += 40
    y = _legend(canvas, colours, y)
    title = f"{clean(plan.model.name)} on {clean(plan.device.name)}"
    return canvas.document(PAGE_WIDTH, y + MARGIN / 2, f"Plan of {title}", _NOTE)


def _title(canvas: Canvas, plan: ExecutionPlan) -> float:
    need = plan.memory
    total_bytes = need.total_bytes
    room = RIGHT - MARGIN
    title = f"{clean(plan.model.name, 90)} on {clean(plan.device.name, 40)}"
    facts = " · ".join(
        (
            f"{plan.part_formats}, agrees with f32 on "
            f"{percent_label(plan.quality.top1_agreement)} of tokens (measured)",
            f"{plan.model.layers} layers, {plan.model.sub_layers} sub-layers",
            f"context up to {plan.context}",
            f"{bytes_label(total_bytes)} of {bytes_label(plan.device.memory_budget_bytes)} memory",
            *([f"{len(plan.residency.streamed)} stream from flash"] if plan.residency else []),
            *([f"drafts with {clean(plan.draft.model.name, 40)}"] if plan.draft else []),
        )
    )
    canvas.text(MARGIN, 58, fitting(title, room, 26, bold=True), size=26, bold=True)
    canvas.text(MARGIN, 84, fitting(facts, room, 14), size=14)
    canvas.text(MARGIN, 106, _NOTE, size=12, fill=MUTED)
    return 122.0


def _panel(
    canvas: Canvas,
    plan: ExecutionPlan,
    figures: BucketFigures,
    colours: dict[str, Colours],
    axis_us: float,
    y: float,
) -> float:
    """A bucket: heading, graph, bars; returns where it ends."""
    canvas.line((MARGIN, y), (RIGHT, y), color=RULE, width=1)
    heading = f"Context {context_label(figures.bucket)}"
    cycle = figures.bucket.cycle
    canvas.text(MARGIN, y + 28, heading, size=17, bold=True, then=cycle_label(cycle, plan))
    speed = f"{rate_label(figures.tokens_per_s)} predicted"
    if cycle.draft is not DraftSource.OFF:
        speed += f", {ratio_label(figures.speedup)} plain decoding"
    canvas.text(RIGHT, y + 28, speed, size=17, anchor="end", bold=True)
    y = draw_cycle(canvas, plan, figures, colours, y + 36)
    return draw_times(canvas, figures, axis_us, y + 14) + 18


def _legend(canvas: Canvas, colours: dict[str, Colours], y: float) -> float:
    """What cells, strips and lines mean, on as many lines as it takes."""
    canvas.line((MARGIN, y), (RIGHT, y), color=RULE, width=1)
    x, y = MARGIN, y + 26

    def place(width: float) -> tuple[float, float]:
        nonlocal x, y
        if x + width > RIGHT and x > MARGIN:
            x, y = MARGIN, y + 24
        at = x
        x += width + 26
        return at, y

    for processor, pair in colours.items():
        label = f"{clean(processor, 24)}: attention, MLP"
        at, base = place(text_width(label, 12) + 36)
        for number, fill in enumerate((pair.dark, pair.light)):
            canvas.rect(at + 14 * number, base - 11, 12, CELL_HEIGHT, fill=fill, radius=1.5)
        canvas.text(at + 34, base, label, size=12)
    at, base = place(text_width("left out by the skip mask", 12) + 20)
    canvas.rect(at + 0.5, base - 10.5, 11, CELL_HEIGHT - 1, stroke=HOLLOW, radius=1.5)
    canvas.text(at + 19, base, "left out by the skip mask", size=12)
    at, base = place(text_width("KV cache", 12) + 34)
    canvas.rect(at, base - 10, 26, 13, fill=KV_FILL, stroke=KV_STROKE, radius=6)
    canvas.text(at + 33, base, "KV cache", size=12)
    lines = (
        ("tokens and hidden rows (bytes, predicted time)", LINE, ""),
        ("next pass of the draft", LINE, "5 3"),
        ("KV read, written, rolled back", KV_STROKE, "2 2"),
    )
    for label, color, dash in lines:
        at, base = place(text_width(label, 12) + 36)
        canvas.line((at, base - 4), (at + 28, base - 4), color=color, dash=dash, tip=True)
        canvas.text(at + 35, base, label, size=12, fill=INK)
    return y
