"""How numbers and names read wherever a plan is shown: three significant digits and a unit."""

import math

MISSING = "n/a"
"""Stands for a number that a plan does not hold."""

TIMES = "\N{MULTIPLICATION SIGN}"

_TIME_STEPS = ((1e6, "s"), (1e3, "ms"), (0.0, "µs"))
_BYTE_STEPS = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
_PLAIN_FROM, _PLAIN_TO = 1e-6, 1e9


def three_digits(value: float) -> str:
    """``value`` with three significant digits and no exponent where that stays readable."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if not _PLAIN_FROM <= abs(value) < _PLAIN_TO:
        return f"{value:.2e}"
    # rounding first: 99.96 has three digits as 100, not as 100.0
    rounded = float(f"{value:.2e}")
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{decimals}f}"


def time_label(us: float | None) -> str:
    """A duration in µs, ms or s; 0 µs as such."""
    if us is None:
        return MISSING
    # 999.6 µs would print as 1000 µs
    size = abs(float(f"{us:.2e}"))
    unit_us, unit = next((step for step in _TIME_STEPS if size >= step[0]), _TIME_STEPS[-1])
    return f"{three_digits(us / unit_us if unit_us else us)} {unit}"


def bytes_label(count: int | None) -> str:
    """A size in B, KB, MB or GB (powers of 1000)."""
    if count is None:
        return MISSING
    for unit_bytes, unit in _BYTE_STEPS:
        if float(f"{count:.2e}") >= unit_bytes:
            return f"{three_digits(count / unit_bytes)} {unit}"
    return f"{count} B"


def rate_label(tokens_per_s: float | None) -> str:
    """A decoding speed."""
    return MISSING if tokens_per_s is None else f"{three_digits(tokens_per_s)} tok/s"


def ratio_label(ratio: float | None) -> str:
    """A speedup."""
    if ratio is None:
        return MISSING
    # 0.987 and 1.02 in one column read better with equal decimals
    return (f"{ratio:.2f}" if abs(ratio) < 10 else three_digits(ratio)) + TIMES


def percent_label(share: float) -> str:
    """A share as a percentage."""
    return f"{three_digits(100 * share)} %"


def counted(count: int, noun: str) -> str:
    """``1 pass``, ``2 passes``: a count and its noun."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def clean(text: str, limit: int = 0) -> str:
    """``text`` on one line, without characters that a terminal or XML would trip over.

    ``limit`` is the greatest length, 0 being none; a longer text ends in an ellipsis.
    """
    line = " ".join(
        "".join(char if char.isprintable() else " " for char in text).split()  # no controls
    )
    return line if not limit or len(line) <= limit else line[: limit - 1].rstrip() + "…"
