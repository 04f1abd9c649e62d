"""What ``plan bench`` measured, for people: at most 100 columns."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.inspect.text import columns, field
from planner.inspect.units import (
    TIMES,
    bytes_label,
    clean,
    counted,
    rate_label,
    ratio_label,
    three_digits,
    time_label,
)

_NAME_LIMIT = 20
_DEPTHS_SHOWN = 12
_LABEL = 11

Figures = Mapping[str, Any]


def bench_text(data: Figures) -> str:
    """The measurements: rates, what cycles spent, rivals, notes."""
    ways = {**data["modes"], **data["rivals"]}
    blocks = [_rates(ways), _cycles(ways), _rivals(data), _depths(data["modes"]), _notes(data)]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _rates(ways: Mapping[str, Figures]) -> list[str]:
    header = ("mode", "measured", "vs plain", "quartiles", "in all")
    header += ("accepted", "drafted", "predicted", "vs plain")
    rows: list[tuple[str, ...]] = [header]
    for name, mode in ways.items():
        low, high = mode["speedup_quartiles"]
        rows.append(
            (
                clean(name, _NAME_LIMIT),
                rate_label(mode["tokens_per_s"]),
                ratio_label(mode["speedup_vs_ar"]),
                f"{low:.2f}-{high:.2f}{TIMES}",
                ratio_label(mode["total_speedup_vs_ar"]),
                three_digits(mode["mean_accepted"]),
                three_digits(mode["mean_drafted"]),
                rate_label(mode["predicted_tokens_per_s"]),
                ratio_label(mode["predicted_speedup_vs_ar"]),
            )
        )
    return columns(rows, left=1, indent=0)


def _cycles(ways: Mapping[str, Figures]) -> list[str]:
    """What a cycle spent, where weights stream."""
    if not any(mode["flash_bytes_per_token"] for mode in ways.values()):
        return []
    rows = [("per cycle", "draft", "verify", "exposed", "expected", "stalled", "flash", "a token")]
    for name, mode in ways.items():
        cycle = mode["per_cycle"]
        rows.append(
            (
                clean(name, _NAME_LIMIT),
                time_label(cycle["draft_us"]),
                time_label(cycle["verify_us"]),
                time_label(cycle["exposed_io_us"]),
                time_label(cycle["expected_exposed_io_us"]),
                time_label(cycle["stalled_us"]),
                f"{bytes_label(round(mode['flash_bytes_per_s']))}/s",
                bytes_label(round(mode["flash_bytes_per_token"])),
            )
        )
    return columns(rows, left=1, indent=0)


def _rivals(data: Figures) -> list[str]:
    """How much faster each mode was than each rival: median over prompts, and in all."""
    if not data["rivals"]:
        return []
    rows = [("speedup over", "mode", "median", "quartiles", "in all")]
    for rival in data["rivals"]:
        for name, mode in data["modes"].items():
            found = mode["speedup_vs_rivals"][rival]
            low, high = found["quartiles"]
            rows.append(
                (
                    clean(rival, 40),
                    clean(name, _NAME_LIMIT),
                    ratio_label(found["speedup"]),
                    f"{low:.2f}-{high:.2f}{TIMES}",
                    ratio_label(found["total_speedup"]),
                )
            )
    return columns(rows, left=2, indent=0)


def _depths(modes: Mapping[str, Figures]) -> list[str]:
    """Acceptance by depth of each mode that drafted."""
    lines: list[str] = []
    for name, mode in modes.items():
        if shares := mode["acceptance_by_depth"]:
            shown = " ".join(f"{share:.2f}" for share in shares[:_DEPTHS_SHOWN])
            more = " ..." if len(shares) > _DEPTHS_SHOWN else ""
            lines += field(clean(name, _NAME_LIMIT), shown + more, label_width=_LABEL)
    return ["accepted at depth 1, 2, ... given all above:", *lines] if lines else []


def _notes(data: Figures) -> list[str]:
    scope = f"{counted(data['prompts'], 'prompt')}, {counted(data['rounds'], 'round')}"
    notes = [
        f"{scope}, medians over prompts; in all: total times; accepted, drafted: tokens a cycle",
        f"peak memory {bytes_label(data['peak_rss_bytes'])}, loading included"
        + (", all plans together" if data["rivals"] else ""),
        *_memory(data),
        *_forecast(data),
        *_categories(data),
    ]
    if data["flash_rate_bytes_per_s"]:
        notes.append(f"flash slowed to {bytes_label(data['flash_rate_bytes_per_s'])}/s")
    if not data["device_is_here"]:
        notes.append(
            f"measured on this machine; predicted for {data['device']}, where nothing was measured"
        )
    if not data["plan_speculates"] and "spec" in data["modes"]:
        notes.append("the plan is OFF everywhere: spec is plain decoding, by construction")
    inexact = [name for name, mode in data["modes"].items() if not mode["token_exact"]]
    if inexact:
        notes.append(f"the output differs from plain decoding in {', '.join(inexact)}: a bug")
    others = [clean(name, 40) for name, mode in data["rivals"].items() if not mode["token_exact"]]
    if others:
        notes.append(f"other tokens, as formats or passes differ: {', '.join(others)}")
    return notes


def _memory(data: Figures) -> Sequence[str]:
    """What decoding took beside what the plan foresaw."""
    ways = {**data["modes"], **data["rivals"]}
    peaks = {name: mode["decode_peak_bytes"] for name, mode in ways.items()}
    if None in peaks.values():
        return ()
    most = max(peaks, key=peaks.__getitem__)
    need, budget = data["memory_need_bytes"], data["memory_budget_bytes"]
    return (
        f"while decoding at most {bytes_label(peaks[most])} ({clean(most, _NAME_LIMIT)});"
        f" the plan needs {bytes_label(need)} of {bytes_label(budget)}",
    )


def _forecast(data: Figures) -> Sequence[str]:
    """What the compile expected of ``spec`` beside what was measured."""
    forecast = data["forecast_speedup_vs_ar"]
    if forecast is None or not data["plan_speculates"]:
        return ()
    measured = ratio_label(data["modes"]["spec"]["total_speedup_vs_ar"])
    return (f"spec over plain, in all: forecast {ratio_label(forecast)}, measured {measured}",)


def _categories(data: Figures) -> Sequence[str]:
    """The headline mode's speedup by the prompts' category."""
    parts = data["modes"][data["headline_mode"]]["by_category"]
    if len(parts) < 2:
        return ()
    told = [f"{clean(name, 20)} {ratio_label(p['speedup_vs_ar'])}" for name, p in parts.items()]
    return field(f"{data['headline_mode']}:", ", ".join(told), indent=0, label_width=6)
