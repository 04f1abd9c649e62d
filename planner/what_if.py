"""A plan's cycles simulated: as they are, on another device, under another budget or flash."""

from collections.abc import Sequence

import msgspec

from planner.cycle_work import (
    bucket_context,
    cycle_shape,
    device_work,
    planned_flash,
    planned_work,
    streamed_bytes,
)
from planner.inspect.units import bytes_label
from planner.lanes import CycleWork, Flash
from planner.memory import Model, head_bytes, sub_layer_bytes
from planner.pass_tables import PassTimes, Streaming
from planner.placement import Assignment, Machine, Work, place, stored_wide
from planner.residency import (
    Choice,
    Load,
    ReadSize,
    bound_to_memory,
    choose_residency,
    fastest,
    read_sizes,
)
from planner.simulate import Timeline, simulate
from profiles.errors import InfeasibleError, InputError
from profiles.profile import DeviceProfile, digest
from profiles.words import AttentionKernel, SubLayerId
from runtime.plan import ALIGNMENT_BYTES, ExecutionPlan, MemoryNeed, Residency
from runtime.plan_cycles import DraftSource
from runtime.plan_tables import PassKind

BUDGET_SHARES = (0.75, 0.5)
"""Of the plan's need, as other budgets to try."""
RATE_FACTORS = (0.5, 2.0)


class Setting(msgspec.Struct, frozen=True):
    """What is simulated."""

    plan: ExecutionPlan
    profile: DeviceProfile | None
    """Prices passes; None: the plan's own prices."""
    residency: Residency | None
    flash: Flash | None
    """None where nothing streams."""
    need: MemoryNeed


class Outcome(msgspec.Struct, frozen=True):
    """A setting's speed, or why it cannot be."""

    name: str
    tokens_per_s: tuple[float, ...]
    """By bucket; empty where infeasible."""
    note: str = ""


def setting_of(
    plan: ExecutionPlan, own: DeviceProfile | None, other: DeviceProfile | None
) -> Setting:
    """The plan as it is, priced on ``other`` if there is one; ``own`` is the plan's device."""
    profile = other or own
    flash = planned_flash(plan, _slows(own))
    if other is not None and plan.residency is not None:
        flash = Flash(fastest(read_sizes(other)).bytes_per_s, _slows(profile))
    return Setting(plan, other, plan.residency, flash, plan.memory)


def with_flash(setting: Setting, bytes_per_s: float) -> Setting:
    """The same with flash of another rate."""
    slows = setting.flash.slows_compute if setting.flash else _slows(setting.profile)
    return msgspec.structs.replace(setting, flash=Flash(bytes_per_s, slows))


def with_budget(setting: Setting, profile: DeviceProfile, budget_bytes: int) -> Setting:
    """The same under another budget: residency chosen anew for the first bucket.

    Raises:
        InfeasibleError: Nothing fits; says the smallest budget that works.
    """
    chosen = rechosen(setting, profile, budget_bytes)
    flash = Flash(_rate(setting, profile), _slows(profile)) if chosen.residency else None
    return Setting(setting.plan, profile, chosen.residency, flash, chosen.need)


def rechosen(setting: Setting, profile: DeviceProfile, budget_bytes: int) -> Choice:
    """The residency of the plan's model under a budget on a device."""
    plan, bucket = setting.plan, setting.plan.buckets[0]
    everything = tuple(SubLayerId(s) for s in range(plan.model.sub_layers))
    rate = _rate(setting, profile)
    # Slots and size of reads do not matter to what the passes compute
    all_away = Residency(everything, 1, ALIGNMENT_BYTES)
    away = pass_times(plan, profile, all_away, Flash(rate))
    work = device_work(plan, 0, pass_times(plan, profile, None, None))
    rows, context = cycle_shape(plan, 0).rows, bucket_context(bucket)
    load = Load(
        "first bucket",
        bucket.forecast.tokens_per_cycle,
        *(work.before, work.stages, away.stages(rows, context), work.after),
        tuple(size.resident for size in sub_layer_bytes(Model(plan.model, plan.tensors))),
    )
    kept = set(bound_to_memory(plan.part_formats, everything))
    for entry in plan.buckets:
        if entry.cycle.draft is DraftSource.SKIP:
            skipped = {s for m in plan.masks if m.id == entry.cycle.mask for s in m.skipped}
            kept |= set(everything) - skipped
    read = ReadSize(fastest(read_sizes(profile)).bytes, rate)
    return choose_residency(budget_bytes, _fixed(plan), [load], [read], kept, _slows(profile))


def _fixed(plan: ExecutionPlan) -> MemoryNeed:
    """What the budget holds besides sub-layers and ring."""
    weights = head_bytes(Model(plan.model, plan.tensors))
    return msgspec.structs.replace(plan.memory, weights_bytes=weights, ring_bytes=0)


def pass_times(
    plan: ExecutionPlan,
    profile: DeviceProfile,
    residency: Residency | None,
    flash: Flash | None,
) -> PassTimes:
    """Prices of the plan's model on a device; where it is the plan's own, as the plan places it."""
    # Streamed sub-layers run in exact attention alone
    attention = AttentionKernel.EXACT
    if residency is None and plan.numerics:
        attention = plan.numerics[0].attention
    machine = Machine(
        *(profile, plan.model, plan.part_formats, stored_wide(plan.model, plan.tensors)),
        attention=attention,
        streamed=residency.streamed if residency else (),
    )
    streaming = None
    if residency is not None and flash is not None:
        sizes = streamed_bytes(plan)
        bytes_of = {s: sizes.get(s, 0) for s in residency.streamed}
        streaming = Streaming(bytes_of, residency.slots, flash)
    draft = None
    if plan.draft is not None:
        draft = Machine(
            profile, plan.draft.model, plan.draft.formats, attention=plan.draft.attention
        )
    target = _assignment(plan, machine)
    return PassTimes(machine, target, streaming=streaming, draft=draft)


def _assignment(plan: ExecutionPlan, machine: Machine) -> Assignment:
    bucket = plan.buckets[0]
    if digest(machine.profile) == plan.device.digest:
        names = [c.processor for c in plan.numerics for _ in range(c.first, c.end)]
        heads = [p.head_processor for p in plan.placements if p.kind is not PassKind.DRAFT]
        if len(names) == plan.model.sub_layers and heads:
            return Assignment(tuple(names), heads[0])
    rows = bucket.cycle.length + 1
    every = tuple(SubLayerId(s) for s in range(plan.model.sub_layers))
    return place(machine, Work(every, rows, rows, max(1, bucket.context_to // 2)))


def works(setting: Setting) -> tuple[CycleWork, ...]:
    """The cycle of each bucket."""
    plan, count = setting.plan, len(setting.plan.buckets)
    if setting.profile is None:
        return tuple(planned_work(plan, index) for index in range(count))
    times = pass_times(plan, setting.profile, setting.residency, setting.flash)
    return tuple(device_work(plan, index, times) for index in range(count))


def timelines(setting: Setting, cycles: Sequence[CycleWork]) -> tuple[Timeline, ...]:
    """The steady cycle of each bucket.

    Raises:
        InputError: Something streams, and nobody knows how fast.
    """
    slots = setting.residency.slots if setting.residency else 1
    flash = setting.flash
    if flash is None:
        if any(cycle.stream_bytes for cycle in cycles):
            what = "the plan does not say how fast its flash is"
            raise InputError(what, hint="give --flash-rate or --device")
        flash = Flash(1.0)
    return tuple(simulate(cycle, slots, flash) for cycle in cycles)


def speeds(setting: Setting, lines: Sequence[Timeline]) -> tuple[float, ...]:
    """Predicted tokens a second of each bucket."""
    buckets = setting.plan.buckets
    return tuple(
        1e6 * bucket.forecast.tokens_per_cycle / line.cycle_us if line.cycle_us else 0.0
        for bucket, line in zip(buckets, lines, strict=True)
    )


def outcomes(setting: Setting, own: DeviceProfile | None) -> tuple[Outcome, ...]:
    """What other flash, and where the device is known other budgets, would make of the plan."""
    found: list[Outcome] = []
    if setting.residency is not None and setting.flash is not None:
        for factor in RATE_FACTORS:
            changed = with_flash(setting, factor * setting.flash.bytes_per_s)
            found.append(_outcome(f"flash at {factor:g}x its rate", changed))
    profile = setting.profile or own
    if profile is not None:
        for share in BUDGET_SHARES:
            budget = round(share * setting.need.total_bytes)
            name = f"a budget of {bytes_label(budget)}"
            try:
                found.append(_outcome(name, with_budget(setting, profile, budget)))
            except InfeasibleError as error:
                found.append(Outcome(name, (), (error.hint or "").partition(";")[0]))
    return tuple(found)


def _outcome(name: str, setting: Setting) -> Outcome:
    lines = timelines(setting, works(setting))
    away = len(setting.residency.streamed) if setting.residency else 0
    note = f"{away} of {setting.plan.model.sub_layers} sub-layers stream" if away else ""
    return Outcome(name, speeds(setting, lines), note)


def _rate(setting: Setting, profile: DeviceProfile) -> float:
    return setting.flash.bytes_per_s if setting.flash else fastest(read_sizes(profile)).bytes_per_s


def _slows(profile: DeviceProfile | None) -> float:
    factor = profile.storage.reading_slowdown if profile else None
    return factor.value - 1 if factor else 0.0
