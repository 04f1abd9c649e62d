"""``plan simulate``: the cycles of a plan on their lanes, and what would change their speed."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from planner.commands.devices import HOST, check_device, measured_host
from planner.inspect.figures import context_label, cycle_label
from planner.inspect.gantt import LEGEND, gantt
from planner.inspect.text import columns, field
from planner.inspect.units import bytes_label, clean, rate_label, three_digits, time_label
from planner.lanes import CycleWork
from planner.simulate import Timeline
from planner.terminal import Terminal
from planner.what_if import (
    Outcome,
    Setting,
    outcomes,
    setting_of,
    speeds,
    timelines,
    with_budget,
    with_flash,
    works,
)
from profiles.errors import InputError
from profiles.profile import DeviceProfile, digest, load_profile, shipped_profiles
from runtime.plan import ExecutionPlan
from runtime.plan_folder import read_plan


class Wish(NamedTuple):
    """What is to be other than in the plan; None leaves it."""

    device: str | None = None
    dram_budget_bytes: int | None = None
    flash_bytes_per_s: int | None = None


def simulate_plan(terminal: Terminal, path: Path, wish: Wish, as_json: bool) -> None:
    """Simulate every bucket of the plan in the folder ``path``."""
    plan = read_plan(path)
    own = own_profile(plan)
    other = None if wish.device is None else _profile(terminal, wish.device)
    setting = setting_of(plan, own, other)
    if wish.flash_bytes_per_s is not None:
        setting = with_flash(setting, wish.flash_bytes_per_s)
    if wish.dram_budget_bytes is not None:
        known = other or own
        if known is None:
            raise InputError(
                "the profile of the plan's device is not here, so nothing else can be priced",
                where=plan.device.name,
                hint="name a device with --device",
            )
        setting = with_budget(setting, known, wish.dram_budget_bytes)
    cycles = works(setting)
    lines = timelines(setting, cycles)
    others = outcomes(setting, own)
    if as_json:
        terminal.result_json(simulated_data(setting, cycles, lines, others))
    else:
        terminal.result(simulated_text(setting, cycles, lines, others))


def own_profile(plan: ExecutionPlan) -> DeviceProfile | None:
    """The profile that the plan was priced with, if it comes with Fulcrum or is kept here."""
    name = plan.device.name
    found = load_profile(name) if name in shipped_profiles() else measured_host()
    return found if found is not None and digest(found) == plan.device.digest else None


def _profile(terminal: Terminal, device: str) -> DeviceProfile:
    check_device(device)
    if device != HOST:
        return load_profile(device)
    # Late: it loads what it measures
    from planner.host_profile import host_profile

    return host_profile(progress=lambda done, n: terminal.report("measuring this machine", done, n))


def simulated_text(
    setting: Setting,
    cycles: Sequence[CycleWork],
    lines: Sequence[Timeline],
    others: Sequence[Outcome],
) -> str:
    """The steady cycle of each bucket, then what-ifs; 100 columns at most."""
    plan = setting.plan
    profile = setting.profile
    priced = f"prices of {clean(profile.name, 40)}" if profile else "the plan's own prices"
    device = clean(profile.name if profile else plan.device.name, 40)
    title = [f"{clean(plan.model.name, 40)} on {device}, simulated with {priced}"]
    title += field("memory", _memory_line(setting))
    if setting.residency is not None and setting.flash is not None:
        title += field("flash", _flash_line(setting))
    blocks = ["\n".join(title)]
    rates = speeds(setting, lines)
    for index, line in enumerate(lines):
        blocks.append("\n".join(_bucket_lines(setting, index, cycles[index], line, rates[index])))
    if lines:
        blocks[-1] += f"\n  {LEGEND}"
    if others:
        blocks.append("\n".join(["What if (tokens a second by bucket)", *_what_if(others)]))
    return "\n\n".join(blocks) + "\n"


def _memory_line(setting: Setting) -> str:
    need, total = setting.need, setting.plan.model.sub_layers
    away = len(setting.residency.streamed) if setting.residency else 0
    stay = "all sub-layers stay" if not away else f"{total - away} of {total} sub-layers stay"
    return f"{bytes_label(need.total_bytes)}; {stay}" + (
        f", ring {bytes_label(need.ring_bytes)}" if away else ""
    )


def _flash_line(setting: Setting) -> str:
    flash, residency = setting.flash, setting.residency
    if flash is None or residency is None:
        return "nothing streams"
    slows = f"; a pass beside it takes {1 + flash.slows_compute:.2f}x" * bool(flash.slows_compute)
    return (
        f"{bytes_label(round(flash.bytes_per_s))}/s, {residency.slots} slots a kind, reads of"
        f" {bytes_label(residency.read_bytes)}{slows}"
    )


def _bucket_lines(
    setting: Setting, index: int, cycle: CycleWork, line: Timeline, rate: float
) -> list[str]:
    bucket = setting.plan.buckets[index]
    forecast = bucket.forecast
    planned = 1e6 * forecast.tokens_per_cycle / forecast.cycle_us if forecast.cycle_us else None
    heading = (
        f"context {context_label(bucket)}: {cycle_label(bucket.cycle)}, "
        f"{three_digits(forecast.tokens_per_cycle)} tokens a cycle"
    )
    lines = [heading]
    about = f"{time_label(line.cycle_us)}, {rate_label(rate)} (the plan says {rate_label(planned)})"
    if not line.steady:
        about += "; never quite steady, an average"
    lines += field("cycle", about)
    lines += field(
        "target", f"{time_label(line.verify_us)}; all computing {time_label(cycle.compute_us)}"
    )
    if line.read_bytes:
        lines += field(
            "flash",
            f"{bytes_label(round(line.read_bytes))} a cycle, exposed"
            f" {time_label(line.exposed_io_us)}, of which passes wait"
            f" {time_label(line.stalled_us)}",
        )
    return [*lines, *(f"  {text}" for text in gantt(line))]


def _what_if(others: Sequence[Outcome]) -> list[str]:
    rows = [
        (
            each.name,
            "  ".join(map(three_digits, each.tokens_per_s)) if each.tokens_per_s else "infeasible",
            clean(each.note, 60),
        )
        for each in others
    ]
    return columns(rows, left=3)


def simulated_data(
    setting: Setting,
    cycles: Sequence[CycleWork],
    lines: Sequence[Timeline],
    others: Sequence[Outcome],
) -> dict[str, object]:
    """The same as plain data; keys in docs/commands.md."""
    plan, flash = setting.plan, setting.flash
    rates = speeds(setting, lines)
    return {
        "model": plan.model.name,
        "device": setting.profile.name if setting.profile else plan.device.name,
        "memory": msgspec.to_builtins(setting.need),
        "residency": msgspec.to_builtins(setting.residency),
        "flash_bytes_per_s": flash.bytes_per_s if flash and setting.residency else None,
        "buckets": [
            {
                "context_from": bucket.context_from,
                "context_to": bucket.context_to,
                "cycle": msgspec.to_builtins(bucket.cycle),
                "tokens_per_cycle": bucket.forecast.tokens_per_cycle,
                "predicted_tokens_per_s": rate,
                "compute_us": cycle.compute_us,
                **msgspec.to_builtins(line),
            }
            for bucket, rate, cycle, line in zip(plan.buckets, rates, cycles, lines, strict=True)
        ],
        "what_if": [msgspec.to_builtins(each) for each in others],
    }
