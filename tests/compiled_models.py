"""Tiny models compiled to plan folders that really run; the decisions in them are made by hand.

The tables hold round numbers, so that the predicted time of a cycle can be worked out in a test.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from tiny_models import GQA, ArraySource, TinyShape, tiny_spec, tiny_weights

from lowering.draft_emission import emit_draft
from lowering.emission import Emission, emit
from lowering.source import ModelSource
from profiles.measure import cpu_description
from profiles.words import (
    AttentionKernel,
    Format,
    LayerId,
    ProcessorKind,
    SubLayerId,
    SubLayerKind,
    sub_layer_id,
)
from runtime.model_spec import ModelSpec
from runtime.plan import (
    FORMAT,
    Bucket,
    CalibrationSummary,
    DeviceIdentity,
    ExecutionPlan,
    Forecast,
    Formats,
    KvLayout,
    MemoryNeed,
    Prefill,
    Quality,
    Residency,
    SamplingRule,
    SkipMask,
    formats_of,
)
from runtime.plan_cycles import OFF, Cycle, Growth, NumericsClass, TreeTemplate
from runtime.plan_tables import CostTables, PassKind, PassTable, StreamTable
from runtime.plan_writer import PlanWriter
from runtime.sampling import GENERATOR

FORMATS = (Format.F32, Format.W8A16, Format.W8A8)

AR_US, VERIFY_US, DRAFT_US = 100.0, 150.0, 40.0
HEAD_ROW_US, CYCLE_US, NGRAM_US = 10.0, 5.0, 2.0


class Recipe(msgspec.Struct, frozen=True):
    """What a compiled model is made of."""

    shape: TinyShape = GQA
    format: Format | Formats = Format.W8A16
    seed: int = 0
    context: int = 256
    eos_ids: tuple[int, ...] = ()
    masks: tuple[tuple[int, ...], ...] = ()
    """Skipped sub-layers of mask 1, 2, ..."""
    faint: tuple[int, ...] = ()
    """Sub-layers that add little, so that a draft without them is often right."""
    cycles: tuple[tuple[int, Cycle], ...] = ((0, OFF),)
    """(first context length, cycle) of each bucket."""
    width_step: int = 1
    """Of the first half of the sub-layers, which a step above 1 puts on an NPU."""
    soc: str = ""
    """The plan's chip; default: this machine's."""
    attention: AttentionKernel = AttentionKernel.FUSED
    growth_tokens: int = 32
    """Of the cache with exact attention."""
    chunk: int = 16
    residency: Residency | None = None
    draft_seed: int | None = None
    """Of a draft model of the same shape; the model's own seed makes a perfect one."""
    draft_format: Format = Format.W8A16
    cheap_drafts: bool = False
    """Only the verify pass takes time, so nothing but their envelope limits trees that grow."""
    trees: tuple[TreeTemplate, ...] = ()
    growths: tuple[Growth, ...] = ()


def recipe_source(recipe: Recipe) -> ArraySource:
    """The model before it is compiled."""
    spec = tiny_spec(recipe.shape)
    tokenizer = msgspec.structs.replace(spec.tokenizer, eos_ids=recipe.eos_ids)
    weights = tiny_weights(recipe.shape, recipe.seed)
    for index in range(spec.layers):
        for kind, name in ((SubLayerKind.ATTENTION, "o"), (SubLayerKind.MLP, "down")):
            if sub_layer_id(LayerId(index), kind) in recipe.faint:
                weights[f"layers.{index}.{name}"] *= np.float32(0.05)
    return ArraySource(msgspec.structs.replace(spec, tokenizer=tokenizer), weights)


def compile_recipe(recipe: Recipe, folder: Path) -> ExecutionPlan:
    """Write the plan folder of a recipe."""
    drafting = None
    if recipe.draft_seed is not None:
        drafting = recipe_source(msgspec.structs.replace(recipe, seed=recipe.draft_seed))
    return compile_source(recipe, recipe_source(recipe), drafting, folder)


def compile_source(
    recipe: Recipe, source: ModelSource, drafting: ModelSource | None, folder: Path
) -> ExecutionPlan:
    """Write a plan folder of other models than the recipe's own; its shape has to be like theirs
    in having grouped queries or not."""
    with PlanWriter(folder) as writer:
        streamed = recipe.residency.streamed if recipe.residency else ()
        emission = emit(source, recipe.format, recipe.context, writer, recipe.attention, streamed)
        plan = _plan(recipe, source.spec, emission)
        if drafting is not None:
            draft = emit_draft(
                drafting, recipe.draft_format, recipe.context, writer, AttentionKernel.EXACT
            )
            plan = msgspec.structs.replace(plan, draft=draft)
        writer.commit(plan)
    return plan


def least_width(
    shape: TinyShape,
    fmt: Format | Formats = Format.W8A16,
    attention: AttentionKernel = AttentionKernel.EXACT,
) -> int:
    """Narrowest pass whose rows do not depend on its width: one query row takes another kernel."""
    formats = formats_of(fmt)
    lone = shape.heads == shape.kv_heads or Format.W4 in (formats.attention, formats.mlp)
    return 2 if lone or attention is AttentionKernel.FUSED else 1


def _plan(recipe: Recipe, spec: ModelSpec, emission: Emission) -> ExecutionPlan:
    skipped = [(), *(tuple(map(SubLayerId, mask)) for mask in recipe.masks)]
    soc = recipe.soc or cpu_description()
    return ExecutionPlan(
        format=FORMAT,
        model=spec,
        device=DeviceIdentity("tiny-device", soc, "0" * 64, 1 << 30, threads=1),
        target_format=formats_of(recipe.format).attention,
        formats=formats_of(recipe.format),
        numerics=_numerics(recipe, spec),
        context=recipe.context,
        prefill=Prefill(recipe.chunk),
        masks=tuple(SkipMask(index, mask) for index, mask in enumerate(skipped)),
        buckets=_buckets(recipe.cycles, recipe.context),
        hysteresis_tokens=4,
        placements=(),
        residency=recipe.residency,
        trees=recipe.trees,
        growths=recipe.growths,
        tables=_tables(recipe),
        graphs=emission.graphs,
        weights=emission.weights,
        tensors=emission.tensors,
        tokenizer=emission.tokenizer,
        kv=KvLayout(
            recipe.growth_tokens if recipe.attention is AttentionKernel.EXACT else 0,
            bytes_per_token=8 * spec.layers * spec.kv_dim,
        ),
        sampling=SamplingRule(GENERATOR),
        quality=Quality(1, 1.0, 1.0, 1.0),
        calibration=CalibrationSummary("0" * 64, 1, 1, 1, 1),
        memory=MemoryNeed(1, 1, 1),
        energy_j_per_token=None,
        decisions=(),
        assumptions=(),
    )


def _numerics(recipe: Recipe, spec: ModelSpec) -> tuple[NumericsClass, ...]:
    step, kernel = recipe.width_step, recipe.attention
    fmt = formats_of(recipe.format).attention
    least = least_width(recipe.shape, recipe.format, kernel)
    start, end = SubLayerId(0), SubLayerId(spec.sub_layers)
    if step == 1:
        return (NumericsClass(start, end, "cpu", ProcessorKind.CPU, fmt, least, 1, kernel),)
    middle = SubLayerId(spec.layers)
    return (
        NumericsClass(start, middle, "npu", ProcessorKind.NPU, fmt, step, step, kernel),
        NumericsClass(middle, end, "cpu", ProcessorKind.CPU, fmt, least, 1, kernel),
    )


def _buckets(cycles: Sequence[tuple[int, Cycle]], context: int) -> tuple[Bucket, ...]:
    ends = [*(start for start, _ in cycles[1:]), context]
    forecast = Forecast(1.0, 0.0, 1.0, 1.0, ())
    return tuple(
        Bucket(start, end, cycle, forecast)
        for (start, cycle), end in zip(cycles, ends, strict=True)
    )


def _tables(recipe: Recipe) -> CostTables:
    streams = len(recipe.cycles) if recipe.residency else 0
    scale = 1e-3 if recipe.cheap_drafts else 1.0

    def table(kind: PassKind, mask: int, us: float) -> PassTable:
        return PassTable(kind, mask, (1, 32), (0, 1024), ((us, us), (us, us)))

    drafts = [
        table(PassKind.DRAFT, mask, scale * DRAFT_US) for mask in range(len(recipe.masks) + 1)
    ]
    return CostTables(
        passes=(
            table(PassKind.AR, 0, AR_US),
            table(PassKind.VERIFY, 0, VERIFY_US),
            table(PassKind.PREFILL, 0, VERIFY_US),
            table(PassKind.PROPOSE, 0, scale * DRAFT_US),
            *drafts,
        ),
        head_widths=(1, 1024),
        head_us=(scale * HEAD_ROW_US, 1024 * scale * HEAD_ROW_US),
        cycle_us=scale * CYCLE_US,
        ngram_us=NGRAM_US,
        streams=(StreamTable((1, 32), (0.0,), ((VERIFY_US,), (VERIFY_US,))),) * streams,
    )
