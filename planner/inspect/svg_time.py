"""The time of a cycle as a bar, above that of plain decoding for as many tokens."""

import math

from planner.inspect.figures import BucketFigures
from planner.inspect.svg_canvas import INK, LINE, MUTED, RULE, Canvas, first_fitting, text_width
from planner.inspect.svg_scale import BAND_X, RIGHT, SAMPLER_X, STAGE_X
from planner.inspect.units import TIMES, rate_label, three_digits, time_label

BAR_X, BAR_END = BAND_X, SAMPLER_X - 62

_BAR_HEIGHT, _BAR_STEP = 22.0, 32.0
_STEPS_SHOWN = 64
_FILLS = {
    "draft": "#7d97b0",
    "lookup": "#7d97b0",
    "verify": "#2f4b66",
    "decode": "#2f4b66",
    "head": "#b7c5d3",
    "constant": "#dfe5eb",
}
_WHITE_ON = frozenset({"draft", "lookup", "verify", "decode"})
_AR_FIRST, _AR_MORE = "#8d99a6", "#edf0f3"
_MARK = "#b3261e"


def longest_us(figures: tuple[BucketFigures, ...]) -> float:
    """The longest bar of a plan: all buckets share one time axis."""
    bars = [0.0]
    for entry in figures:
        forecast = entry.bucket.forecast
        bars += [entry.parts_us, forecast.cycle_us, forecast.tokens_per_cycle * forecast.ar_us]
    finite = [bar for bar in bars if math.isfinite(bar)]
    return max(finite) or 1.0


def draw_times(canvas: Canvas, figures: BucketFigures, axis_us: float, y: float) -> float:
    """Draws the bars below ``y`` and returns where they end."""
    scale = (BAR_END - BAR_X) / axis_us
    bars = 1 if _is_plain(figures) else 2
    _axis(canvas, axis_us, scale, y, y + bars * _BAR_STEP)
    _cycle_bar(canvas, figures, scale, y + 5)
    if bars == 2:
        _ar_bar(canvas, figures, scale, y + 5 + _BAR_STEP)
    return _key(canvas, figures, y + bars * _BAR_STEP + 36)


def _is_plain(figures: BucketFigures) -> bool:
    return not figures.bucket.cycle.length


def _axis(canvas: Canvas, axis_us: float, scale: float, top: float, bottom: float) -> None:
    rough = axis_us / 6
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(size * magnitude for size in (1, 2, 5, 10) if size * magnitude >= rough)
    for number in range(int(axis_us / step) + 1):
        x = BAR_X + number * step * scale
        canvas.line((x, top), (x, bottom + 2), color=RULE, width=1)
        label = time_label(number * step)
        canvas.text(x, bottom + 14, label, size=10, fill=MUTED, anchor="middle")


def _cycle_bar(canvas: Canvas, figures: BucketFigures, scale: float, y: float) -> None:
    forecast = figures.bucket.forecast
    title = "Step, predicted" if _is_plain(figures) else "Cycle, predicted"
    canvas.text(STAGE_X, y + 15, title, size=12, bold=True)
    x = BAR_X
    for part in figures.parts:
        width = part.us * scale
        canvas.rect(x, y, width, _BAR_HEIGHT, fill=_FILLS[part.name], role="part")
        repeats = f" {TIMES}{part.repeats:g}" if part.repeats != 1 else ""
        label = first_fitting(
            (f"{part.name}{repeats} {time_label(part.us)}", f"{part.name}{repeats}"), width - 8, 11
        )
        ink = "#ffffff" if part.name in _WHITE_ON else INK
        canvas.text(x + width / 2, y + 15, label, size=11, fill=ink, anchor="middle")
        x += width
    end = BAR_X + forecast.cycle_us * scale
    if not figures.parts_explain_cycle:
        canvas.mark(end, y, _MARK)
    tokens = three_digits(forecast.tokens_per_cycle)
    words = f"{time_label(forecast.cycle_us)} for {tokens} tokens:"
    _beside(canvas, max(x, end), y, words, rate_label(figures.tokens_per_s))


def _ar_bar(canvas: Canvas, figures: BucketFigures, scale: float, y: float) -> None:
    """A step of plain decoding, then as many as the cycle's tokens would take."""
    forecast = figures.bucket.forecast
    canvas.text(STAGE_X, y + 15, "Plain decoding, predicted", size=12, bold=True)
    step = forecast.ar_us * scale
    end = BAR_X + step * max(1.0, forecast.tokens_per_cycle)
    canvas.rect(BAR_X, y, end - BAR_X, _BAR_HEIGHT, fill=_AR_MORE, stroke=LINE)
    canvas.rect(BAR_X, y, step, _BAR_HEIGHT, fill=_AR_FIRST, stroke=LINE)
    for number in range(2, min(_STEPS_SHOWN, math.ceil(forecast.tokens_per_cycle))):
        left = BAR_X + number * step
        canvas.line((left, y), (left, y + _BAR_HEIGHT), width=1)
    label = first_fitting((f"AR {time_label(forecast.ar_us)}", "AR"), step - 8, 11)
    canvas.text(BAR_X + step / 2, y + 15, label, size=11, fill="#ffffff", anchor="middle")
    total_us = forecast.ar_us * max(1.0, forecast.tokens_per_cycle)
    words = f"{time_label(total_us)} for as many:"
    _beside(canvas, end, y, words, rate_label(figures.ar_tokens_per_s))


def _beside(canvas: Canvas, end: float, y: float, words: str, speed: str) -> None:
    """A bar's total to its right, or over its end when the bar leaves no room."""
    width = text_width(words, 12) + 6 + text_width(speed, 12, bold=True)
    left = min(end + 10, RIGHT - width)
    canvas.rect(left - 4, y + 2, width + 6, _BAR_HEIGHT - 4)
    canvas.text(left, y + 15, words, size=12, then=speed)


def _key(canvas: Canvas, figures: BucketFigures, y: float) -> float:
    """Every part with its time, and the measured acceptance."""
    x = BAR_X
    for part in figures.parts:
        canvas.rect(x, y - 9, 10, 10, fill=_FILLS[part.name], radius=2)
        repeats = f" ({part.repeats:g} passes)" if part.repeats != 1 else ""
        label = f"{part.name} {time_label(part.us)}{repeats}"
        canvas.text(x + 15, y, label, size=11, fill=MUTED)
        x += text_width(label, 11) + 36
    if figures.parts and not figures.parts_explain_cycle:
        canvas.mark(x + 4, y - 1, _MARK)
        canvas.text(x + 12, y, "forecast for the whole bucket", size=11, fill=MUTED)
        x += text_width("forecast for the whole bucket", 11) + 36
    shares = figures.bucket.forecast.acceptance
    if shares:
        shown = ", ".join(f"{100 * share:.0f}" for share in shares[:8])
        more = ", …" if len(shares) > 8 else ""
        depths = f"1 to {len(shares)}" if len(shares) > 1 else "1"
        label = f"accepted at depth {depths}: {shown}{more} % (measured)"
        canvas.text(RIGHT, y, label, size=11, fill=MUTED, anchor="end")
    return y + 8
