"""``plan bench``: measures ways to decode against each other on this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.bench import bench_data, measure
from planner.commands.verify import choose_prompts
from planner.inspect.text import columns
from planner.inspect.units import bytes_label, counted, rate_label, ratio_label, three_digits
from planner.modes import best_mask, parse_modes
from planner.prompt_file import Prompt
from planner.terminal import Terminal
from profiles.measure import cpu_description
from runtime.plan import ExecutionPlan
from runtime.session import load

__all__ = ["bench_plan", "choose_prompts"]


def default_modes(plan: ExecutionPlan) -> str:
    """Plain decoding, the plan's cycles, and a long chain where the plan has a mask for one."""
    return "ar,spec" if best_mask(plan) is None else "ar,spec,chain8"


def bench_plan(
    terminal: Terminal,
    path: Path,
    prompts: Sequence[Prompt],
    *,
    modes: str | None,
    repeat: int,
    max_new_tokens: int,
    emulate: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure and show; ``modes`` None takes the usual ones."""
    with load(path, emulate=emulate, threads=threads) as session:
        wanted = parse_modes(modes or default_modes(session.plan), session.plan)
        samples = measure(
            *(session, prompts, wanted),
            rounds=repeat,
            max_new_tokens=max_new_tokens,
            report=terminal.report,
        )
        comparable = session.plan.device.soc == cpu_description()
        data = bench_data(samples, session, comparable)
    if as_json:
        terminal.result_json(data)
    else:
        terminal.result(bench_text(data))


def bench_text(data: Mapping[str, Any]) -> str:
    """The measurements for people."""
    header = ("mode", "measured", "vs plain", "in all")
    header += ("accepted", "drafted", "predicted", "vs plain")
    rows: list[tuple[str, ...]] = [header]
    for name, mode in data["modes"].items():
        rows.append(
            (
                name,
                rate_label(mode["tokens_per_s"]),
                ratio_label(mode["speedup_vs_ar"]),
                ratio_label(mode["total_speedup_vs_ar"]),
                three_digits(mode["mean_accepted"]),
                three_digits(mode["mean_drafted"]),
                rate_label(mode["predicted_tokens_per_s"]),
                ratio_label(mode["predicted_speedup_vs_ar"]),
            )
        )
    return "\n".join([*columns(rows, left=1, indent=0), "", *_notes(data)])


def _notes(data: Mapping[str, Any]) -> list[str]:
    scope = f"{counted(data['prompts'], 'prompt')}, {counted(data['rounds'], 'round')}"
    notes = [
        f"{scope}, medians over prompts; in all: total times; accepted, drafted: tokens a cycle",
        f"peak memory {bytes_label(data['peak_rss_bytes'])}",
    ]
    device = data["device"]
    if not data["device_is_here"]:
        notes.append(
            f"measured on this machine; predicted for {device}, where nothing was measured"
        )
    if not data["plan_speculates"] and "spec" in data["modes"]:
        notes.append("the plan is OFF everywhere: spec is plain decoding, by construction")
    inexact = [name for name, mode in data["modes"].items() if not mode["token_exact"]]
    if inexact:
        notes.append(f"the output differs from plain decoding in {', '.join(inexact)}: a bug")
    return notes
