"""Plans of many shapes for the tests of the views: any depth, placement and draft source."""

from collections.abc import Sequence

from profiles.words import Format, ProcessorKind, SubLayerId
from runtime.model_spec import ModelSpec, RopeSpec, TokenizerSpec
from runtime.plan import (
    FORMAT,
    Artefact,
    Bucket,
    CalibrationSummary,
    Candidate,
    Decision,
    DeviceIdentity,
    ExecutionPlan,
    Forecast,
    KvLayout,
    MemoryNeed,
    Prefill,
    Quality,
    SamplingRule,
    SkipMask,
)
from runtime.plan_cycles import Cycle, DraftSource, NumericsClass
from runtime.plan_tables import CostTables, PassKind, Placement, Span

DIGEST = "0123456789abcdef" * 4
SUB_LAYER_US = 400.0
TRANSFER_US = 120.0
HEAD_US = 1800.0
CYCLE_US = 90.0
NGRAM_US = 12.0
HIDDEN = 576
BUCKET_TOKENS = 512
PROCESSORS = {"cpu": ProcessorKind.CPU, "npu": ProcessorKind.NPU}

SKIP = Cycle(DraftSource.SKIP, 4, mask=1)
NGRAM = Cycle(DraftSource.NGRAM, 6, ngram_min=2, ngram_max=4)
OFF = Cycle(DraftSource.OFF, 0)


def varied_plan(
    *,
    layers: int = 30,
    cycles: Sequence[Cycle] = (SKIP, NGRAM, OFF),
    cuts: Sequence[int] = (),
    skipped: Sequence[int] | None = None,
    name: str = "SmolLM2-135M-Instruct",
    processor_names: Sequence[str] = ("npu", "cpu"),
    decisions: Sequence[Decision] = (),
    assumptions: Sequence[str] = ("Acceptance in use is that of the calibration text.",),
) -> ExecutionPlan:
    """A plan with a bucket per cycle; ``cuts`` are sub-layers where the processor changes."""
    ranges = _ranges(2 * layers, cuts)
    names = [processor_names[number % len(processor_names)] for number in range(len(ranges))]
    if skipped is None:
        skipped = [sub_layer for sub_layer in range(2, 2 * layers - 2) if sub_layer % 5 in (0, 3)]
    placements = [
        _placement(number, kind, ranges, names, cycle, skipped)
        for number, cycle in enumerate(cycles)
        for kind in _kinds(cycle)
    ]
    return ExecutionPlan(
        format=FORMAT,
        model=_model(name, layers),
        device=DeviceIdentity("oneplus12", "SM8650", DIGEST, 2 * 10**9, 6),
        target_format=Format.W8A16,
        numerics=_numerics(ranges, names),
        context=max(1, len(cycles)) * BUCKET_TOKENS,
        prefill=Prefill(64),
        masks=(SkipMask(0, ()), SkipMask(1, tuple(SubLayerId(one) for one in skipped))),
        buckets=tuple(_bucket(number, cycle, placements) for number, cycle in enumerate(cycles)),
        hysteresis_tokens=32,
        placements=tuple(placements),
        tables=CostTables((), (1,), (HEAD_US,), CYCLE_US, NGRAM_US),
        graphs=(),
        weights=Artefact("weights.bin", 10**8, DIGEST),
        tensors=(),
        tokenizer=Artefact("tokenizer.json", 10**6, DIGEST),
        kv=KvLayout(64, layers * 2 * 192 * 4),
        sampling=SamplingRule("philox4x32"),
        quality=Quality(2048, 0.991, 14.31, 14.26),
        calibration=CalibrationSummary(DIGEST, 24, 4000, 2000, 2048),
        memory=MemoryNeed(136 * 10**6, 47 * 10**6, 60 * 10**6),
        energy_j_per_token=0.214,
        decisions=tuple(decisions),
        assumptions=tuple(assumptions),
    )


def decision(
    name: str = "cycle[0]",
    *,
    chosen: str = "skip mask 1, 4 drafted",
    value: float = 41.3,
    rivals: Sequence[tuple[str, float]] = (("n-gram, 6 drafted", 33.1), ("off", 27.0)),
    gap: float | None = 0.0,
    note: str = "",
) -> Decision:
    """A decision that maximises, the chosen candidate first."""
    return Decision(
        name=name,
        chosen=chosen,
        objective="tokens per second, maximised",
        value=value,
        solver="enumeration",
        gap=gap,
        candidates=tuple(Candidate(*one) for one in ((chosen, value), *rivals)),
        flips_when="acceptance at depth 1 falls below 0.61",
        note=note,
    )


def _ranges(sub_layers: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    ends = [*sorted({cut for cut in cuts if 0 < cut < sub_layers}), sub_layers]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _numerics(ranges: Sequence[tuple[int, int]], names: Sequence[str]) -> tuple[NumericsClass, ...]:
    return tuple(
        NumericsClass(
            SubLayerId(first),
            SubLayerId(end),
            processor,
            PROCESSORS.get(processor, ProcessorKind.CPU),
            Format.W8A16,
            8,
            8,
        )
        for (first, end), processor in zip(ranges, names, strict=True)
    )


def _model(name: str, layers: int) -> ModelSpec:
    tokenizer = TokenizerSpec(1, add_bos=False, eos_ids=(2,), chat_template=None, digest=DIGEST)
    return ModelSpec(
        name=name,
        architecture="llama",
        layers=layers,
        hidden=HIDDEN,
        intermediate=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocab=49152,
        max_context=8192,
        norm_eps=1e-5,
        rope=RopeSpec(100000.0),
        tied_head=True,
        tokenizer=tokenizer,
        weights_digest=DIGEST,
    )


def _kinds(cycle: Cycle) -> tuple[PassKind, ...]:
    common = (PassKind.AR, PassKind.PREFILL)
    if cycle.draft is DraftSource.OFF:
        return common
    if cycle.draft is DraftSource.NGRAM:
        return (*common, PassKind.VERIFY)
    return (*common, PassKind.DRAFT, PassKind.VERIFY)


def _placement(
    bucket: int,
    kind: PassKind,
    ranges: Sequence[tuple[int, int]],
    names: Sequence[str],
    cycle: Cycle,
    skipped: Sequence[int],
) -> Placement:
    width = {PassKind.VERIFY: cycle.length + 1, PassKind.PREFILL: 64}.get(kind, 1)
    left_out = set(skipped) if kind is PassKind.DRAFT else set[int]()
    spans = tuple(
        Span(
            SubLayerId(first),
            SubLayerId(end),
            processor,
            SUB_LAYER_US
            * (1 + 0.02 * width)
            * sum(sub_layer not in left_out for sub_layer in range(first, end)),
            TRANSFER_US if first else 0.0,
        )
        for (first, end), processor in zip(ranges, names, strict=True)
    )
    return Placement(
        bucket=bucket,
        kind=kind,
        width=width,
        context=(bucket + 1) * BUCKET_TOKENS,
        spans=spans,
        head_processor="cpu",
        head_rows=width,
        head_us=HEAD_US,
        handover_bytes=(len(spans) - 1) * width * HIDDEN * 4,
    )


def _bucket(number: int, cycle: Cycle, placements: Sequence[Placement]) -> Bucket:
    def us(kind: PassKind) -> float:
        found = [one for one in placements if one.bucket == number and one.kind is kind]
        return sum(
            one.head_us + sum(span.compute_us + span.transfer_us for span in one.spans)
            for one in found
        )

    ar_us = us(PassKind.AR) + CYCLE_US
    cycle_us = ar_us
    if cycle.draft is not DraftSource.OFF:
        drafting = cycle.length * us(PassKind.DRAFT)
        lookup = NGRAM_US if cycle.draft is DraftSource.NGRAM else 0.0
        cycle_us = drafting + lookup + us(PassKind.VERIFY) + CYCLE_US
    tokens = 1.0 + 0.7 * cycle.length
    acceptance = tuple(0.9 - 0.02 * depth for depth in range(cycle.length))
    forecast = Forecast(tokens, float(cycle.length), cycle_us, ar_us, acceptance)
    start = number * BUCKET_TOKENS
    return Bucket(start, start + BUCKET_TOKENS, cycle, forecast)
