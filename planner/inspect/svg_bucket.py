"""A bucket's cycle as a picture: the draft above the KV, the target's pass below it."""

import itertools

from planner.inspect.figures import (
    BucketFigures,
    mask_counts,
    pass_us,
    sub_layers_label,
)
from planner.inspect.svg_canvas import (
    INK,
    MUTED,
    Canvas,
    first_fitting,
    fitting,
)
from planner.inspect.svg_pass import Row, draw_bands, draw_pass, span_left, span_right
from planner.inspect.svg_scale import (
    EMBED_X,
    LAST_WIDTH,
    LAST_X,
    MARGIN,
    RIGHT,
    SAMPLER_WIDTH,
    SAMPLER_X,
    SPANS_END,
    STAGE_WIDTH,
    STAGE_X,
    Colours,
    lanes_of,
    scale_of,
)
from planner.inspect.units import TIMES, bytes_label, clean, counted, three_digits, time_label
from profiles.words import SubLayerId
from runtime.plan import DraftSource, ExecutionPlan, NumericsClass, PassKind, Placement

KV_FILL, KV_STROKE = "#e9edf1", "#9aa7b4"

_LOOP_ROOM = 34.0
_KV_GAP, _KV_HEIGHT = 26.0, 24.0
_LOOKUP_HEIGHT = 76.0
_STAGE_MIN = 76.0
_FEEDBACK_X = MARGIN - 16


def draw_cycle(
    canvas: Canvas,
    plan: ExecutionPlan,
    figures: BucketFigures,
    colours: dict[str, Colours],
    y: float,
) -> float:
    """Draws the cycle below ``y`` and returns where it ends.

    Of several placements of one kind the first is drawn.
    """
    passes = {one.kind: one for one in reversed(figures.cycle_passes)}
    target = passes.get(PassKind.VERIFY) or passes.get(PassKind.AR)
    if target is None:
        canvas.text(STAGE_X, y + 30, "This bucket's passes are not placed.", fill=MUTED)
        return y + 44
    lanes, scale = lanes_of(figures), scale_of(plan, tuple(passes.values()))
    row_height = max(_STAGE_MIN, lanes.height)
    draft, stage_y, kv_y = passes.get(PassKind.DRAFT), y + 10, y + 10
    drafting = None
    if draft is not None:
        stage_y = y + _LOOP_ROOM
        drafting = Row(draft, figures.skipped, stage_y, lanes, scale, colours)
        kv_y = stage_y + row_height + _KV_GAP
    target_y = kv_y + _KV_HEIGHT + _KV_GAP
    if figures.bucket.cycle.draft is DraftSource.NGRAM:
        kv_y = stage_y + (_LOOKUP_HEIGHT - _KV_HEIGHT) / 2
        target_y = stage_y + _LOOKUP_HEIGHT + _KV_GAP
    whole = Row(target, frozenset[SubLayerId](), target_y, lanes, scale, colours)
    _kv(canvas, plan, whole, kv_y)
    for row in (drafting, whole):
        if row is not None:
            draw_bands(canvas, row)
            _kv_links(canvas, row, kv_y)
            draw_pass(canvas, plan, row)
    source_y, source_height = target_y, row_height
    if drafting is not None:
        source_y = drafting.y
        _draft_loop(canvas, figures, drafting, row_height)
    elif figures.bucket.cycle.draft is DraftSource.NGRAM:
        source_y, source_height = stage_y, _LOOKUP_HEIGHT
        _lookup(canvas, plan, figures, stage_y)
    bottom = _target_stage(canvas, figures, whole, row_height)
    if source_y < target_y:
        _drafted_arrow(canvas, figures, source_y + source_height, target_y)
    commit_y = _commit(canvas, plan, figures, whole, row_height, kv_y)
    return _feedback(canvas, figures, (commit_y, bottom), source_y + source_height / 2)


def _stage(canvas: Canvas, y: float, height: float, lines: tuple[str, ...]) -> None:
    """A box in the first column: a bold title and lines below it."""
    canvas.rect(STAGE_X, y, STAGE_WIDTH, height, stroke=INK, radius=6)
    first = y + height / 2 + 5 - 8 * (len(lines) - 1)
    for number, line in enumerate(lines):
        size, bold = (11, False) if number else (14, True)
        shown = fitting(line, STAGE_WIDTH - 12, size, bold=bold)
        canvas.text(
            STAGE_X + STAGE_WIDTH / 2,
            first + 16 * number,
            shown,
            size=size,
            bold=bold,
            fill=MUTED if number else INK,
            anchor="middle",
        )


def _crossings(placement: Placement) -> tuple[str, ...]:
    """Handovers in sum, for rows too narrow to label each."""
    count = len(placement.spans) - 1
    transfer_us = sum(span.transfer_us for span in placement.spans)
    size = bytes_label(placement.handover_bytes)
    return (counted(count, "handover"), f"{size}, {time_label(transfer_us)}") if count > 0 else ()


def _draft_loop(canvas: Canvas, figures: BucketFigures, row: Row, height: float) -> None:
    """The drafting passes: a row that runs once per drafted token."""
    length = figures.bucket.cycle.length
    attention, mlp = mask_counts(figures.skipped)
    lines = (
        f"Draft {TIMES}{length}",
        f"skip mask {figures.bucket.cycle.mask}",
        f"without {attention} attn, {mlp} MLP",
        f"{length} {TIMES} {time_label(pass_us(row.placement))}",
    )
    if not row.scale.labelled:
        lines = (*lines[:3], *_crossings(row.placement))
    _stage(canvas, row.y, height, lines)
    canvas.line((STAGE_X + STAGE_WIDTH, row.in_y), (EMBED_X, row.in_y), tip=True)
    loop_y, back_x = row.y - 16, SAMPLER_X + SAMPLER_WIDTH / 2
    canvas.line(
        (back_x, row.out_y - 15),
        (back_x, loop_y),
        (STAGE_X + STAGE_WIDTH / 2, loop_y),
        (STAGE_X + STAGE_WIDTH / 2, row.y),
        dash="5 3",
        tip=True,
    )
    canvas.chip((back_x + STAGE_X) / 2, loop_y, [f"next drafted token, {length} times"], size=11)


def _lookup(canvas: Canvas, plan: ExecutionPlan, figures: BucketFigures, y: float) -> None:
    cycle = figures.bucket.cycle
    lines = (
        "Draft",
        "n-gram lookup",
        f"by the last {cycle.ngram_min}-{cycle.ngram_max} tokens",
        time_label(plan.tables.ngram_us),
    )
    _stage(canvas, y, _LOOKUP_HEIGHT, lines)


def _target_stage(canvas: Canvas, figures: BucketFigures, row: Row, height: float) -> float:
    """The target's pass; returns where its row ends."""
    placement = row.placement
    if placement.kind is PassKind.AR:
        title = "Decode"
        note = "one token, no draft"
    else:
        title = "Verify"
        note = f"{figures.bucket.cycle.length} drafted + 1 token"
    lines = (
        title,
        note,
        f"width {placement.width}",
        time_label(pass_us(placement)),
    )
    if not row.scale.labelled:
        lines = (
            (*lines[:2], *_crossings(placement), lines[3]) if len(placement.spans) > 1 else lines
        )
    _stage(canvas, row.y, height, lines)
    canvas.line((STAGE_X + STAGE_WIDTH, row.in_y), (EMBED_X, row.in_y), tip=True)
    return row.y + height


def _drafted_arrow(canvas: Canvas, figures: BucketFigures, top: float, bottom: float) -> None:
    x = STAGE_X + STAGE_WIDTH / 2
    canvas.line((x, top), (x, bottom), tip=True)
    tokens = counted(figures.bucket.cycle.length, "token")
    if figures.bucket.cycle.draft is DraftSource.NGRAM:
        tokens = f"up to {tokens}"
    canvas.text(x + 8, (top + bottom) / 2 + 4, tokens, size=11, fill=MUTED)


def _kv(canvas: Canvas, plan: ExecutionPlan, row: Row, y: float) -> None:
    """The KV strip, a piece per numerics class."""
    sub_layers = max(1, plan.model.sub_layers)
    for numerics in plan.numerics:
        left, right = row.scale.start(numerics.first), row.scale.end(numerics.end)
        share = (numerics.end - numerics.first) / sub_layers
        size = bytes_label(round(plan.kv.bytes_per_token * share * row.placement.context))
        canvas.rect(
            left - 4 if right - left > 30 else left - 1,
            y,
            right - left + (8 if right - left > 30 else 2),
            _KV_HEIGHT,
            fill=KV_FILL,
            stroke=KV_STROKE,
            radius=10 if right - left > 30 else 1,
            role="kv",
            tooltip=f"KV of sub-layers {sub_layers_label(numerics.first, numerics.end)}: {size}",
        )
        label = first_fitting(_kv_labels(numerics, size, row.placement.context), right - left, 11)
        canvas.text((left + right) / 2, y + 16, label, size=11, anchor="middle")


def _kv_labels(numerics: NumericsClass, size: str, context: int) -> tuple[str, ...]:
    name = clean(numerics.processor, 20)
    return (
        f"KV cache, written by {name}: {size} at {context} tokens of context",
        f"KV cache: {size} at context {context}",
        f"KV {size}",
        size,
        "KV",
    )


def _kv_links(canvas: Canvas, row: Row, kv_y: float) -> None:
    """A line from each span to the KV that it reads and extends."""
    above = row.y < kv_y
    many = not row.scale.labelled and len(row.placement.spans) > 1
    for span in row.placement.spans:
        if not any(sub_layer % 2 == 0 for sub_layer in range(span.first, span.end)):
            continue
        x = (span_left(row, span) + span_right(row, span)) / 2
        middle = row.lanes.middle(span.processor, row.y)
        ends = (kv_y, middle) if above else (kv_y + _KV_HEIGHT, middle)
        edge = middle + 20 if above else middle - 20
        canvas.line(
            (x, ends[0]),
            (x, edge),
            color=KV_STROKE,
            width=0.7 if many else 1.1,
            dash="2 2",
            tip=not many,
            tail=not many,
        )


def _commit(
    canvas: Canvas,
    plan: ExecutionPlan,
    figures: BucketFigures,
    row: Row,
    height: float,
    kv_y: float,
) -> float:
    """Accept and commit, and the cursor that rolls the KV back; returns where commit ends."""
    boxes = ["commit"] if row.placement.kind is PassKind.AR else ["accept", "commit"]
    room = 32.0
    gap = (height - room * len(boxes)) / (len(boxes) + 1)
    tops = [row.y + gap + number * (room + gap) for number in range(len(boxes))]
    center = LAST_X + LAST_WIDTH / 2
    for name, top in zip(boxes, tops, strict=True):
        canvas.rect(LAST_X, top, LAST_WIDTH, room, stroke=INK, radius=6)
        canvas.text(center, top + 20.5, name, size=12, anchor="middle", bold=True)
    for upper, lower in itertools.pairwise(tops):
        canvas.line((center, upper + room), (center, lower), tip=True)
    leaves, enters = row.out_y, tops[0] + room / 2
    bend = (SAMPLER_X + SAMPLER_WIDTH + LAST_X) / 2
    canvas.line(
        (SAMPLER_X + SAMPLER_WIDTH, leaves),
        (bend, leaves),
        (bend, enters),
        (LAST_X, enters),
        tip=True,
    )
    strip_end = max((row.scale.end(one.end) for one in plan.numerics), default=SPANS_END) + 4
    kv_middle, side = kv_y + _KV_HEIGHT / 2, RIGHT + 14
    canvas.line(
        (RIGHT, tops[-1] + room / 2),
        (side, tops[-1] + room / 2),
        (side, kv_middle),
        (strip_end, kv_middle),
        dash="2 2",
        color=KV_STROKE,
        tip=True,
    )
    speculates = figures.bucket.cycle.draft is not DraftSource.OFF
    words = "roll back to the accepted path" if speculates else "advance by one"
    canvas.text(RIGHT, kv_middle - 6, words, size=10, fill=MUTED, anchor="end")
    return tops[-1] + room


def _feedback(
    canvas: Canvas, figures: BucketFigures, leaves: tuple[float, float], source_y: float
) -> float:
    """The arrow from commit back to the next cycle's start; returns where the drawing ends.

    ``leaves`` are the lower ends of the commit box and of the row.
    """
    commit_y, bottom = leaves
    y, center = bottom + 20, LAST_X + LAST_WIDTH / 2
    canvas.line(
        (center, commit_y),
        (center, y),
        (_FEEDBACK_X, y),
        (_FEEDBACK_X, source_y),
        (STAGE_X, source_y),
        tip=True,
    )
    tokens = three_digits(figures.bucket.forecast.tokens_per_cycle)
    canvas.chip(
        (center + STAGE_X) / 2, y, [f"next cycle; {tokens} tokens committed a cycle"], size=11
    )
    return y + 12
