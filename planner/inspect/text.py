"""A plan as text: aligned columns, at most 100 wide, for a terminal or a log."""

import sys
import textwrap
from collections.abc import Sequence

from planner.inspect.figures import (
    BucketFigures,
    bucket_figures,
    context_label,
    cycle_label,
    format_of,
    handovers,
    mask_counts,
    mask_rows,
    pass_us,
    runs,
    sub_layers_label,
)
from planner.inspect.units import (
    TIMES,
    bytes_label,
    clean,
    counted,
    percent_label,
    rate_label,
    ratio_label,
    three_digits,
    time_label,
)
from profiles.words import SubLayerId
from runtime.plan import ExecutionPlan
from runtime.plan_tables import PassKind, Placement
from runtime.weight_ranges import aligned, sub_layer_bytes

COLUMNS = 100
RUNS, SKIPPED = "■", "□"
MASK_LAYERS = 80
"""Layers per line of a mask's picture."""
SPANS_SHOWN = 6
"""Longer lists of spans keep this many, from both ends."""

_LABEL = 12
_NAME_LIMIT = 40


def plan_text(plan: ExecutionPlan) -> str:
    """What a plan says, top to bottom; the same plan gives the same text."""
    figures = bucket_figures(plan)
    sections = (
        _head_lines(plan),
        ["Buckets (times predicted)", *_bucket_table(plan, figures)],
        ["Passes (times predicted)", *_pass_lines(plan, figures)],
        ["Skip masks", *_mask_lines(plan)],
        *_residency_sections(plan),
        _origin_lines(plan),
    )
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _head_lines(plan: ExecutionPlan) -> list[str]:
    model, device = plan.model, plan.device
    name = clean(model.name, _NAME_LIMIT)
    energy = plan.energy_j_per_token
    lines = [
        f"{name} on {clean(device.name, _NAME_LIMIT)}",
        *field(
            "model",
            f"{clean(model.architecture, 20)}, {model.layers} layers "
            f"({model.sub_layers} sub-layers), hidden {model.hidden}, "
            f"{model.heads} heads ({model.kv_heads} KV), vocabulary {model.vocab}",
        ),
        *field(
            "device",
            f"{clean(device.soc, _NAME_LIMIT)}, {counted(device.threads, 'CPU thread')}, "
            f"profile {device.digest[:12]}",
        ),
        *field("format", _format_line(plan)),
        *field("memory", _memory_line(plan)),
        *_flash_lines(plan),
        *_draft_lines(plan),
        *field(
            "context",
            f"{plan.context} tokens, read in chunks of {plan.prefill.chunk}; "
            f"buckets change {plan.hysteresis_tokens} tokens late",
        ),
    ]
    if energy is not None:
        lines.extend(field("energy", f"{three_digits(energy)} J a token (predicted)"))
    for number, text in enumerate(_numerics_lines(plan)):
        lines.extend(field("" if number else "numerics", text))
    return lines


def field(label: str, text: str, *, indent: int = 2, label_width: int = _LABEL) -> list[str]:
    """A label and its text, wrapped to the page with a hanging indent."""
    hanging = " " * (indent + label_width)
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=f"{' ' * indent}{label:<{label_width}}",
        subsequent_indent=hanging,
        break_on_hyphens=False,
    ) or [f"{' ' * indent}{label}"]


def _format_line(plan: ExecutionPlan) -> str:
    quality = plan.quality
    rise = quality.perplexity / quality.f32_perplexity - 1 if quality.f32_perplexity else 0.0
    return (
        f"{plan.part_formats}; agrees with f32 on {percent_label(quality.top1_agreement)} "
        f"of next tokens, perplexity {three_digits(quality.perplexity)}, "
        f"{percent_label(abs(rise))} {'below' if rise < 0 else 'above'} that of f32 "
        f"(measured, {quality.positions} positions)"
    )


def _numerics_lines(plan: ExecutionPlan) -> list[str]:
    rows = [
        (
            clean(numerics.processor, 20),
            f"sub-layers {sub_layers_label(numerics.first, numerics.end)}",
            numerics.format.value,
            f"width from {numerics.min_width} in steps of {numerics.width_step}",
        )
        for numerics in plan.numerics
    ]
    return columns(_abbreviated(rows), left=4, indent=0)


def _memory_line(plan: ExecutionPlan) -> str:
    need = plan.memory
    parts = [
        f"weights {bytes_label(need.weights_bytes)}",
        f"KV {bytes_label(need.kv_bytes)} ({bytes_label(plan.kv.bytes_per_token)} a token)",
        f"interpreter {bytes_label(need.interpreter_bytes)}",
    ]
    if need.draft_bytes:
        parts.append(f"draft model {bytes_label(need.draft_bytes)}")
    if need.ring_bytes:
        parts.append(f"ring {bytes_label(need.ring_bytes)}")
    budget = bytes_label(plan.device.memory_budget_bytes)
    return f"{bytes_label(need.total_bytes)} of {budget}: {', '.join(parts)}"


def _flash_lines(plan: ExecutionPlan) -> list[str]:
    if plan.residency is None:
        return []
    away = plan.residency.streamed
    sizes = sub_layer_bytes(plan.tensors)
    read_bytes = sum(aligned(sizes[each].bytes) for each in away if each in sizes)
    attention, mlp = mask_counts(frozenset(away))
    text = (
        f"{len(away)} of {plan.model.sub_layers} sub-layers ({attention} attention, {mlp} MLP) "
        f"stream, {bytes_label(read_bytes)} a pass; ring of "
        f"{counted(plan.residency.slots, 'slot')} a kind, "
        f"reads of {bytes_label(plan.residency.read_bytes)}"
    )
    return field("flash", text)


def _draft_lines(plan: ExecutionPlan) -> list[str]:
    draft = plan.draft
    if draft is None:
        return []
    model = draft.model
    text = (
        f"{clean(model.name, _NAME_LIMIT)}: {model.layers} layers, hidden {model.hidden}, "
        f"{draft.formats}, {draft.attention} attention, "
        f"KV {bytes_label(draft.kv.bytes_per_token)} a token"
    )
    return field("draft model", text)


def _bucket_table(plan: ExecutionPlan, figures: Sequence[BucketFigures]) -> list[str]:
    if not figures:
        return ["  none"]
    rows = [("context", "cycle", "tokens/cycle", "cycle time", "speed", "AR step", "speedup")]
    for entry in figures:
        forecast = entry.bucket.forecast
        rows.append(
            (
                context_label(entry.bucket),
                cycle_label(entry.bucket.cycle, plan),
                three_digits(forecast.tokens_per_cycle),
                time_label(forecast.cycle_us),
                rate_label(entry.tokens_per_s),
                time_label(forecast.ar_us),
                ratio_label(entry.speedup),
            )
        )
    return columns(rows, left=2)


def columns(
    rows: Sequence[Sequence[str]], *, left: int, indent: int = 2, room: int | None = COLUMNS
) -> list[str]:
    """Rows with aligned columns: the first ``left`` flush left, the others flush right.

    A table wider than ``room`` (None: no limit) loses space between columns, then the end of its
    lines.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    spare = (room or sys.maxsize) - indent - sum(widths)
    space = " " * min(2, max(1, spare // max(1, len(widths) - 1)))
    lines: list[str] = []
    for row in rows:
        cells = [
            f"{cell:<{width}}" if number < left else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = (" " * indent + space.join(cells)).rstrip()
        lines.append(line if room is None or len(line) <= room else line[: room - 1] + "…")
    return lines


def _pass_lines(plan: ExecutionPlan, figures: Sequence[BucketFigures]) -> list[str]:
    lines: list[str] = []
    for entry in figures:
        lines.append(f"  context {context_label(entry.bucket)}")
        if not entry.passes:
            lines.append("    not placed")
        for placement in entry.passes:
            lines.extend(_placement_lines(plan, entry, placement))
    return lines or ["  none"]


def _placement_lines(
    plan: ExecutionPlan, figures: BucketFigures, placement: Placement
) -> list[str]:
    drafts = placement.kind is PassKind.DRAFT
    skipped = figures.skipped if drafts else frozenset[SubLayerId]()
    repeats = f" {TIMES}{figures.bucket.cycle.length}" if drafts else ""
    count = handovers(placement)
    crossing = (
        f", {counted(count, 'handover')} ({bytes_label(placement.handover_bytes)})" if count else ""
    )
    heading = (
        f"    {placement.kind.value}{repeats}: {time_label(pass_us(placement))} at width "
        f"{placement.width}, context {placement.context}{crossing}"
    )
    rows: list[tuple[str, ...]] = []
    for span in placement.spans:
        running = runs(span, skipped)
        rows.append(
            (
                clean(span.processor, 20),
                f"sub-layers {sub_layers_label(span.first, span.end)}",
                f"{running} run" if running < span.end - span.first else "",
                format_of(plan, span),
                time_label(span.compute_us),
                f"handed over in {time_label(span.transfer_us)}" if span.transfer_us else "",
            )
        )
    head_rows = counted(placement.head_rows, "row")
    head = (clean(placement.head_processor, 20), f"head, {head_rows}", "", "")
    rows = [*_abbreviated(rows), (*head, time_label(placement.head_us), "")]
    return [heading, *columns(rows, left=4, indent=6)]


def _abbreviated(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """A long list of spans without its middle."""
    if len(rows) <= SPANS_SHOWN:
        return rows
    half = SPANS_SHOWN // 2
    left_out = (f"… {len(rows) - 2 * half} more", *("" for _ in rows[0][1:]))
    return [*rows[:half], left_out, *rows[-half:]]


def _mask_lines(plan: ExecutionPlan) -> list[str]:
    masks = [mask for mask in plan.masks if mask.skipped]
    if not masks:
        return ["  none: every pass runs all sub-layers"]
    lines = [f"  {RUNS} runs, {SKIPPED} left out; one column per layer"]
    for mask in masks:
        skipped = frozenset(mask.skipped)
        attention, mlp = mask_counts(skipped)
        lines.append(
            f"  mask {mask.id}: {len(skipped)} of {plan.model.sub_layers} left out "
            f"({attention} attention, {mlp} MLP)"
        )
        lines.extend(_picture(plan, skipped))
    return lines


def _residency_sections(plan: ExecutionPlan) -> list[list[str]]:
    """What streams, as a picture; nothing for a plan that is all in memory."""
    if plan.residency is None:
        return []
    legend = f"  {RUNS} stays in memory, {SKIPPED} streams from flash; one column per layer"
    return [["Residency", legend, *_picture(plan, frozenset(plan.residency.streamed))]]


def _picture(plan: ExecutionPlan, hollow: frozenset[SubLayerId]) -> list[str]:
    """A row of cells for attention and one for MLP, those of ``hollow`` being empty."""
    rows = mask_rows(plan.model.layers, hollow)
    return [
        f"    {kind.value:<{_LABEL - 2}}"
        + "".join(RUNS if full else SKIPPED for full in cells[start : start + MASK_LAYERS])
        for start in range(0, plan.model.layers, MASK_LAYERS)
        for kind, cells in rows.items()
    ]


def _origin_lines(plan: ExecutionPlan) -> list[str]:
    summary = plan.calibration
    return [
        "Where the numbers come from",
        *field(
            "predicted",
            "every time, speed and size of memory, from the device profile; this plan was not "
            "timed on the device",
        ),
        *field(
            "measured",
            f"acceptance, in the plan's own numerics on {counted(summary.prompts, 'prompt')}: "
            f"{summary.search_positions} positions to search, {summary.rescore_positions} to "
            f"re-score, {summary.report_positions} to report "
            f"(calibration {clean(summary.digest, 12)}); the format's quality",
        ),
    ]
