"""A bucket's cycle as a picture: the draft above the KV, the target's pass below it."""

import msgspec

from planner.inspect.figures import (
    BucketFigures,
    attention_count,
    handovers,
    kv_bytes,
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
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import DraftSource, NumericsClass
from runtime.plan_tables import PassKind

KV_FILL, KV_STROKE = "#e9edf1", "#9aa7b4"

_LOOP_ROOM = 34.0
_KV_GAP, _KV_HEIGHT = 26.0, 24.0
_LOOKUP_HEIGHT = 76.0
_LAST_HEIGHT = 32.0
_FEEDBACK_X = MARGIN - 16


class _Heights(msgspec.Struct, frozen=True):
    """Where the rows of a bucket begin."""

    source: float
    """Draft, or the target's pass where nobody drafts."""
    kv: float
    target: float
    row: float
    """Height of a pass."""
    source_row: float
    """Height of the source."""
    end: float


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
    draft = passes.get(PassKind.DRAFT)
    heights = _heights(figures, lanes.height, y, drafts=draft is not None)
    whole = Row(target, frozenset[SubLayerId](), heights.target, lanes, scale, colours)
    rows = [whole]
    if draft is not None:
        rows.insert(0, Row(draft, figures.skipped, heights.source, lanes, scale, colours))
    _kv(canvas, plan, whole, heights.kv)
    for row in rows:
        draw_bands(canvas, row)
        _kv_links(canvas, row, heights.kv)
        draw_pass(canvas, plan, row)
    if draft is not None:
        _draft_loop(canvas, figures, rows[0], heights.row)
    elif figures.bucket.cycle.draft is DraftSource.NGRAM:
        _lookup(canvas, plan, figures, heights.source)
    _target_stage(canvas, figures, whole, heights.row)
    if heights.source < heights.target:
        _drafted_arrow(canvas, figures, heights.source + heights.source_row, heights.target)
    commit_y = _commit(canvas, whole, heights.row)
    _cursor(canvas, plan, figures, whole, (commit_y, heights.kv + _KV_HEIGHT / 2))
    _feedback(canvas, figures, commit_y, heights)
    return heights.end


def _heights(figures: BucketFigures, row: float, y: float, *, drafts: bool) -> _Heights:
    source, source_row = y + 10, row
    kv = source
    target = kv + _KV_HEIGHT + _KV_GAP
    if drafts:
        source = y + _LOOP_ROOM
        kv = source + row + _KV_GAP
        target = kv + _KV_HEIGHT + _KV_GAP
    elif figures.bucket.cycle.draft is DraftSource.NGRAM:
        source_row = _LOOKUP_HEIGHT
        kv = source + (source_row - _KV_HEIGHT) / 2
        target = source + source_row + _KV_GAP
    else:
        source = target
    return _Heights(source, kv, target, row, source_row, target + row + 32)


def _stage(canvas: Canvas, y: float, height: float, lines: tuple[str, ...]) -> None:
    """A box in the first column: a bold title and lines below it."""
    canvas.rect(STAGE_X, y, STAGE_WIDTH, height, stroke=INK, radius=6)
    lines = lines[: int((height - 6) // 13)]
    step = min(16.0, (height - 6) / len(lines))
    first = y + height / 2 + 4.5 - step / 2 * (len(lines) - 1)
    for number, line in enumerate(lines):
        size, bold = (11, False) if number else (14, True)
        shown = fitting(line, STAGE_WIDTH - 12, size, bold=bold)
        canvas.text(
            STAGE_X + STAGE_WIDTH / 2,
            first + step * number,
            shown,
            size=size,
            bold=bold,
            fill=MUTED if number else INK,
            anchor="middle",
        )


def _crossings(row: Row) -> tuple[str, ...]:
    """Handovers in sum, for rows too narrow to label each."""
    placement = row.placement
    count = handovers(placement)
    transfer_us = sum(span.transfer_us for span in placement.spans)
    size = bytes_label(placement.handover_bytes)
    return (
        (counted(count, "handover"), f"{size}, {time_label(transfer_us)}")
        if count > 0 and not row.scale.labelled
        else ()
    )


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
    _stage(canvas, row.y, height, (*lines, *_crossings(row)))
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


def _target_stage(canvas: Canvas, figures: BucketFigures, row: Row, height: float) -> None:
    """The target's pass: a decoding step or the verification of a draft."""
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
    _stage(canvas, row.y, height, (*lines, *_crossings(row)))
    canvas.line((STAGE_X + STAGE_WIDTH, row.in_y), (EMBED_X, row.in_y), tip=True)


def _drafted_arrow(canvas: Canvas, figures: BucketFigures, top: float, bottom: float) -> None:
    x = STAGE_X + STAGE_WIDTH / 2
    canvas.line((x, top), (x, bottom), tip=True)
    tokens = counted(figures.bucket.cycle.length, "token")
    if figures.bucket.cycle.draft is DraftSource.NGRAM:
        tokens = f"up to {tokens}"
    canvas.text(x + 8, (top + bottom) / 2 + 4, tokens, size=11, fill=MUTED)


def _kv(canvas: Canvas, plan: ExecutionPlan, row: Row, y: float) -> None:
    """The KV strip, a piece per numerics class."""
    for numerics in plan.numerics:
        layers = attention_count(numerics.first, numerics.end)
        if not layers:
            continue
        left, right = row.scale.start(numerics.first), row.scale.end(numerics.end)
        size = bytes_label(kv_bytes(plan, layers, row.placement.context))
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
        if not attention_count(span.first, span.end):
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


def _commit(canvas: Canvas, row: Row, height: float) -> float:
    """Accept and commit after the sampler; returns the centre of the commit box."""
    boxes = ["commit"] if row.placement.kind is PassKind.AR else ["accept", "commit"]
    step = _LAST_HEIGHT + max(6.0, min(20.0, height - 2 * _LAST_HEIGHT))
    # level with the sampler where the row has room below it
    highest = row.y + height - _LAST_HEIGHT / 2 - step * (len(boxes) - 1)
    first = max(row.y + _LAST_HEIGHT / 2, min(row.out_y, highest))
    center = LAST_X + LAST_WIDTH / 2
    for number, name in enumerate(boxes):
        middle = first + number * step
        top = middle - _LAST_HEIGHT / 2
        if number:
            canvas.line((center, top - step + _LAST_HEIGHT), (center, top), tip=True)
        canvas.rect(LAST_X, top, LAST_WIDTH, _LAST_HEIGHT, stroke=INK, radius=6)
        canvas.text(center, middle + 4.5, name, size=12, anchor="middle", bold=True)
    leaves = SAMPLER_X + SAMPLER_WIDTH
    bend = (leaves + LAST_X) / 2
    points = ((leaves, row.out_y), (bend, row.out_y), (bend, first), (LAST_X, first))
    canvas.line(*points, tip=True)
    return first + (len(boxes) - 1) * step


def _cursor(
    canvas: Canvas, plan: ExecutionPlan, figures: BucketFigures, row: Row, ends: tuple[float, float]
) -> None:
    """From commit to the KV, which keeps the accepted rows; ``ends`` are their centre lines."""
    commit_y, kv_y = ends
    strip_end = max((row.scale.end(one.end) for one in plan.numerics), default=SPANS_END) + 4
    side = RIGHT + 14
    points = ((RIGHT, commit_y), (side, commit_y), (side, kv_y), (strip_end, kv_y))
    canvas.line(*points, dash="2 2", color=KV_STROKE, tip=True)
    speculates = figures.bucket.cycle.draft is not DraftSource.OFF
    words = "roll back to the accepted path" if speculates else "advance by one"
    canvas.text(RIGHT, kv_y - 6, words, size=10, fill=MUTED, anchor="end")


def _feedback(canvas: Canvas, figures: BucketFigures, commit_y: float, heights: _Heights) -> None:
    """The arrow from commit back to the start of the next cycle."""
    y, center = heights.target + heights.row + 20, LAST_X + LAST_WIDTH / 2
    source_y = heights.source + heights.source_row / 2
    canvas.line(
        (center, commit_y + _LAST_HEIGHT / 2),
        (center, y),
        (_FEEDBACK_X, y),
        (_FEEDBACK_X, source_y),
        (STAGE_X, source_y),
        tip=True,
    )
    tokens = three_digits(figures.bucket.forecast.tokens_per_cycle)
    words = f"next cycle; {tokens} tokens committed a cycle"
    canvas.chip((center + STAGE_X) / 2, y, [words], size=11)
