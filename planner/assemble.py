"""Puts what was emitted, measured and decided together into the plan document."""

from collections.abc import Sequence

import msgspec

from lowering.emission import Emission
from lowering.source import ModelSource
from planner.calibrate import Calibration
from planner.cycles import MARGIN, Option, decide, forecast, template_depth
from planner.memory import kv_bytes_per_token
from planner.pass_tables import NGRAM_US, PassTimes, best_chunk, cost_tables
from planner.placement import Machine, PlacedPass
from planner.prompt_file import Split
from planner.search import BucketChoice, Mask
from planner.variants import EXACT_GROWTH_TOKENS, Models, Variant
from profiles.profile import digest, provenance_counts
from profiles.words import AttentionKernel, Provenance, SubLayerId
from runtime.plan import (
    FORMAT,
    Bucket,
    CalibrationSummary,
    Candidate,
    Decision,
    DeviceIdentity,
    ExecutionPlan,
    KvLayout,
    Prefill,
    Quality,
    SamplingRule,
    SkipMask,
)
from runtime.plan_cycles import Cycle, DraftShape, DraftSource, Growth, TreeTemplate
from runtime.plan_tables import PassKind, Placement
from runtime.sampling import GENERATOR

HYSTERESIS_TOKENS = 32
PREFILL_CONTEXT = 256


class Decided(msgspec.Struct, frozen=True):
    """The outcome of all decisions."""

    models: Models
    variant: Variant
    choices: tuple[BucketChoice, ...]
    reported: tuple[Option, ...]
    """The chosen option of each bucket as the report split has it."""
    plain: tuple[Option, ...]
    """The fastest plain decoding of each bucket within the budget."""
    ranking: tuple[tuple[str, float], ...]
    """All variants with the speed of their cycles, best first."""
    refused: tuple[str, ...]
    """What does not fit into the budget."""

    @property
    def times(self) -> PassTimes:
        """Prices under the chosen variant."""
        return self.variant.times

    @property
    def machine(self) -> Machine:
        """Of the target."""
        return self.variant.times.machine


class Numbers(msgspec.Struct, frozen=True):
    """Masks, trees and envelopes of a plan; a cycle refers to them by position.

    A plan that does not use them carries them too, so that a bench can show what they would do.
    """

    masks: tuple[Mask, ...]
    trees: tuple[TreeTemplate, ...]
    growths: tuple[Growth, ...]

    def cycle(self, option: Option) -> Cycle:
        """The option's cycle with its numbers."""
        tree = 0
        if option.template is not None:
            tree = self.trees.index(option.template)
        elif option.growth is not None:
            tree = self.growths.index(option.growth)
        mask = self.masks.index(option.skipped)
        return msgspec.structs.replace(option.cycle, mask=mask, tree=tree)


def numbers_of(choices: Sequence[BucketChoice]) -> Numbers:
    """Of every option that reached the last round, each bucket's best first."""
    ranked = [option for choice in choices for option in choice.ranked]
    return Numbers(
        tuple(all_masks(choices)),
        tuple(dict.fromkeys(o.template for o in ranked if o.template is not None)),
        tuple(dict.fromkeys(o.growth for o in ranked if o.growth is not None)),
    )


def assemble(
    source: ModelSource,
    emission: Emission,
    decided: Decided,
    calibration: Calibration,
    quality: Quality,
) -> ExecutionPlan:
    """The plan; deterministic in its arguments."""
    times, formats, models = decided.times, decided.machine.formats, decided.models
    context, residency = models.context, decided.variant.residency
    numbers = numbers_of(decided.choices)
    chunk = best_chunk(times, min(PREFILL_CONTEXT, context))
    buckets = tuple(
        Bucket(c.range.start, c.range.end, numbers.cycle(c.ranked[0]), forecast(option, plain))
        for c, option, plain in zip(decided.choices, decided.reported, decided.plain, strict=True)
    )
    exact = decided.machine.attention is AttentionKernel.EXACT
    growth_tokens = EXACT_GROWTH_TOKENS if exact else 0
    return ExecutionPlan(
        format=FORMAT,
        model=source.spec,
        device=device_identity(decided.machine, models.budget_bytes),
        target_format=formats.attention,
        numerics=times.classes,
        context=context,
        prefill=Prefill(chunk),
        masks=tuple(SkipMask(i, mask) for i, mask in enumerate(numbers.masks)),
        buckets=buckets,
        hysteresis_tokens=HYSTERESIS_TOKENS,
        placements=tuple(
            placement
            for index, (choice, bucket) in enumerate(zip(decided.choices, buckets, strict=True))
            for placement in placements(times, index, choice, bucket, chunk)
        ),
        tables=cost_tables(
            times, numbers.masks, context, [c.range.middle for c in decided.choices]
        ),
        graphs=emission.graphs,
        weights=emission.weights,
        tensors=emission.tensors,
        tokenizer=emission.tokenizer,
        kv=KvLayout(growth_tokens, kv_bytes_per_token(source.spec)),
        sampling=SamplingRule(GENERATOR),
        quality=quality,
        calibration=summary(calibration),
        memory=decided.variant.need,
        energy_j_per_token=energy(times, decided),
        decisions=decisions(decided),
        assumptions=assumptions(decided, calibration),
        formats=formats if len(set(msgspec.structs.astuple(formats))) > 1 else None,
        draft=models.draft if decided.variant.drafts else None,
        trees=numbers.trees,
        growths=numbers.growths,
        residency=residency,
    )


def all_masks(choices: Sequence[BucketChoice]) -> list[Mask]:
    """The full target, then every mask that reached the last round, each bucket's best first."""
    masks: list[Mask] = [()]
    for choice in choices:
        masks += [o.skipped for o in skip_winners(choice) if o.skipped not in masks]
    return masks


def skip_winners(choice: BucketChoice) -> list[Option]:
    """The fastest chain under each mask of a bucket, fastest first."""
    best = {o.skipped: o for o in reversed(choice.ranked) if o.skipped}
    return sorted(best.values(), key=lambda o: -o.tokens_per_s)


def numbered(option: Option, masks: Sequence[Mask]) -> Option:
    """The option named by the number of its mask in the plan: many masks leave out as many."""
    if not option.skipped:
        return option
    number, length = masks.index(option.skipped), option.cycle.length
    name = f"skip mask {number} ({len(option.skipped)} left out), chain of {length}"
    return msgspec.structs.replace(option, name=name)


def device_identity(machine: Machine, budget_bytes: int) -> DeviceIdentity:
    """The profile by name, chip and digest."""
    profile = machine.profile
    threads = profile.processor(machine.cpu).threads
    return DeviceIdentity(profile.name, profile.soc, digest(profile), budget_bytes, threads)


def placements(
    times: PassTimes, index: int, choice: BucketChoice, bucket: Bucket, chunk: int
) -> list[Placement]:
    """The passes of a bucket as they are placed; a tree grown online has its mean size."""
    at, cycle = choice.range.middle, bucket.cycle
    grown = cycle.shape is DraftShape.ONLINE
    rows = 1 + (round(bucket.forecast.drafted_per_cycle) if grown else cycle.length)
    passes = [
        (PassKind.PREFILL, chunk, 1, times.committing(chunk, at, head_rows=1)),
        (PassKind.AR, 1, 1, times.alone(at) if cycle.lone else times.committing(1, at)),
    ]
    if cycle.draft is not DraftSource.OFF:
        passes.append((PassKind.VERIFY, rows, rows, times.committing(rows, at)))
    if cycle.draft is DraftSource.SKIP:
        passes.append((PassKind.DRAFT, 1, 1, times.drafting(choice.ranked[0].skipped, at)))
    if cycle.draft is DraftSource.MODEL:
        passes.append((PassKind.PROPOSE, 1, 1, times.proposing(1, at)))
    head, drafting = times.target.head, (PassKind.DRAFT, PassKind.PROPOSE)
    return [
        Placement(
            bucket=index,
            kind=kind,
            width=width if kind in drafting or cycle.lone else times.padded(width),
            context=at,
            spans=placed.spans,
            head_processor=placed.head_processor if kind in drafting else head,
            head_rows=head_rows,
            head_us=placed.head_us,
            handover_bytes=placed.handover_bytes,
        )
        for kind, width, head_rows, placed in passes
    ]


def summary(calibration: Calibration) -> CalibrationSummary:
    """Where the acceptance numbers come from."""
    return CalibrationSummary(
        digest=calibration.digest,
        prompts=sum(len(calibration.texts(split)) for split in Split),
        search_positions=calibration.positions(Split.SEARCH),
        rescore_positions=calibration.positions(Split.RESCORE),
        report_positions=calibration.positions(Split.REPORT),
    )


def energy(times: PassTimes, decided: Decided) -> float | None:
    """Joules per token in the first bucket; None where a processor's power is unknown."""
    choice, option = decided.choices[0], decided.reported[0]
    at = choice.range.middle
    cpu = decided.machine.cpu
    drafted = draft_passes(option)
    busy: dict[str, float] = {cpu: times.cycle_us * (1 + drafted)}
    rows = max(1, round(option.drafted) + 1)
    alone = option.cycle.lone
    passes: list[PlacedPass] = [times.alone(at) if alone else times.committing(rows, at)]
    if option.skipped:
        passes += [times.drafting(option.skipped, at)] * drafted
    elif drafted:
        passes += [times.proposing(1, at)] * drafted
    for placed in passes:
        for processor, us in placed.busy_us.items():
            busy[processor] = busy.get(processor, 0.0) + us
    joules = 0.0
    for processor, us in busy.items():
        power = decided.machine.profile.processor(processor).power_watt
        if power is None:
            return None
        joules += power.value * us / 1e6
    return joules / option.tokens


def draft_passes(option: Option) -> int:
    """Passes of a model that drafts, in one cycle; of online growth about as many as nodes."""
    if option.template is not None:
        return template_depth(option.template)
    if option.growth is not None:
        return round(option.drafted)
    return option.cycle.length if option.skipped or option.cycle.draft is DraftSource.MODEL else 0


def decisions(decided: Decided) -> tuple[Decision, ...]:
    """The record of every pass."""
    masks = all_masks(decided.choices)
    names = [
        decide(
            f"cycle[{index}]",
            [numbered(option, masks) for option in choice.ranked],
            choice.off,
            note=f"context {choice.range.start} to {choice.range.end}, priced at"
            f" {choice.range.middle} tokens; speeds of the re-score split; off everywhere unless"
            f" drafts gain {MARGIN:.0%} over all contexts",
        )
        for index, choice in enumerate(decided.choices)
    ]
    residency = [decided.variant.decision] if decided.variant.decision else []
    layers = [mask_decision(e) for e in enumerate(decided.choices) if skip_winners(e[1])]
    return (placement_decision(decided), *residency, *layers, *names)


def placement_decision(decided: Decided) -> Decision:
    """Where the target runs."""
    ranking = decided.ranking
    (name, speed), *rivals = ranking
    reasons = "; ".join((*decided.refused, *decided.machine.reasons.values()))
    flips = "there is one processor"
    if rivals:
        flips = f"the times of {rivals[0][0]} fall by {1 - rivals[0][1] / speed:.1%}"
    return Decision(
        name="placement",
        chosen=name,
        objective="predicted tokens per second of the best cycles, geometric mean over octaves of"
        " context",
        value=speed,
        solver="NetworkX shortest path per width; the best of all ways to use the memory and"
        " the processors, each priced with its own cycles",
        gap=None,
        candidates=tuple(Candidate(*entry) for entry in ranking),
        flips_when=flips,
        note=reasons or "AR, verify and prefill share this assignment: one numerics class each",
    )


def mask_decision(entry: tuple[int, BucketChoice]) -> Decision:
    """Which sub-layers would draft best in a bucket, whether or not they do."""
    index, choice = entry
    options = skip_winners(choice)
    chosen = options[0]
    return Decision(
        name=f"layers[{index}]",
        chosen=f"leave out {len(chosen.skipped)}: {numbers(chosen.skipped)}",
        objective="predicted tokens per second of the best chain under the mask",
        value=chosen.tokens_per_s,
        solver="OR-Tools knapsack (branch and bound, optimal per budget and surrogate),"
        " survivors re-scored by measured agreement",
        gap=None,
        candidates=tuple(
            Candidate(f"leave out {len(o.skipped)}: {numbers(o.skipped)}", o.tokens_per_s)
            for o in options
        ),
        flips_when=mask_flip(options),
        note=f"{choice.hopeful} of {choice.proposed} proposed sets could pay if every token were"
        " accepted; agreement by depth " + ", ".join(f"{rate:.2f}" for rate in chosen.acceptance),
    )


def mask_flip(options: Sequence[Option]) -> str:
    """What would make the second mask win."""
    if len(options) < 2:
        return "no other set was measured to full depth"
    first, second = options[:2]
    needed = first.tokens_per_s * second.us / 1e6
    return f"the second set commits {needed:.2f} tokens per cycle instead of {second.tokens:.2f}"


def numbers(sub_layers: Sequence[SubLayerId]) -> str:
    """Sub-layers as ``a3`` (attention of layer 3) and ``m7`` (MLP of layer 7)."""
    return " ".join(f"{'am'[s % 2]}{s // 2}" for s in sub_layers)


def assumptions(decided: Decided, calibration: Calibration) -> tuple[str, ...]:
    """What the predictions rest on."""
    profile = decided.machine.profile
    counts = provenance_counts(profile)
    parts = ", ".join(f"{counts[p]} {p}" for p in Provenance if counts.get(p))
    longest = max(len(text.tokens) for split in Split for text in calibration.texts(split))
    notes = [
        f"device times: profile {profile.name}, {parts} numbers; the cold state",
        f"acceptance was measured at contexts up to {longest} tokens and is taken to hold beyond",
        f"an n-gram look-up takes {NGRAM_US:.0f} us (assumed)",
    ]
    if not counts.get(Provenance.MEASURED):
        notes.append("nothing was measured on this device: all its times are predictions")
    return tuple(notes)
