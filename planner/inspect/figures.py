"""What every view of a plan derives from it: the passes of a bucket's cycle and their times.

Nothing here decides or measures; all times are the plan's predictions.
"""

import msgspec

from profiles.words import LayerId, SubLayerId, SubLayerKind, sub_layer_id
from runtime.model_spec import ModelSpec
from runtime.plan import Bucket, ExecutionPlan
from runtime.plan_cycles import Cycle, DraftShape, DraftSource, NumericsClass
from runtime.plan_tables import PassKind, Placement, Span

HIDDEN_BYTES = 4
"""Hidden rows and logits travel as f32."""
TOKEN_BYTES = 4
"""Token ids travel as 32-bit integers."""

_SAME_SHARE = 0.01
_BILLIONS_FROM = 4e8
"""Smaller models are called by their millions."""


class CyclePart(msgspec.Struct, frozen=True):
    """A stretch of a cycle's time."""

    name: str
    """``draft``, ``lookup``, ``verify``, ``decode``, ``head`` or ``constant``."""
    us: float
    """All repeats together."""
    repeats: float


class BucketFigures(msgspec.Struct, frozen=True):
    """A bucket with what follows from it."""

    index: int
    bucket: Bucket
    skipped: frozenset[SubLayerId]
    """Sub-layers that the drafting passes leave out."""
    passes: tuple[Placement, ...]
    """Every placement of this bucket, in the plan's order."""
    cycle_passes: tuple[Placement, ...]
    """Those that its cycle runs: draft and verify, or AR when it does not speculate."""
    parts: tuple[CyclePart, ...]
    """The cycle's time, piece by piece; empty when its passes are not placed."""

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted speed; None where no time is predicted."""
        forecast = self.bucket.forecast
        return forecast.tokens_per_cycle * 1e6 / forecast.cycle_us if forecast.cycle_us else None

    @property
    def ar_tokens_per_s(self) -> float | None:
        """Predicted speed of plain autoregressive decoding."""
        ar_us = self.bucket.forecast.ar_us
        return 1e6 / ar_us if ar_us else None

    @property
    def speedup(self) -> float | None:
        """Predicted speed over that of plain autoregressive decoding."""
        ours, plain = self.tokens_per_s, self.ar_tokens_per_s
        return ours / plain if ours is not None and plain else None

    @property
    def parts_us(self) -> float:
        """Sum of the parts, every draft at full length."""
        return sum(part.us for part in self.parts)

    @property
    def parts_explain_cycle(self) -> bool:
        """Whether the parts add up to the forecast within 1 %.

        They need not: the forecast averages over contexts and over lookups that find nothing.
        """
        forecast_us = self.bucket.forecast.cycle_us
        return abs(self.parts_us - forecast_us) <= _SAME_SHARE * forecast_us


def bucket_figures(plan: ExecutionPlan) -> tuple[BucketFigures, ...]:
    """One entry per bucket, in the plan's order."""
    return tuple(_figures_of(plan, index) for index in range(len(plan.buckets)))


def _figures_of(plan: ExecutionPlan, index: int) -> BucketFigures:
    bucket = plan.buckets[index]
    passes = tuple(placement for placement in plan.placements if placement.bucket == index)
    running = cycle_kinds(bucket.cycle)
    cycle_passes = tuple(
        placement for kind in running for placement in passes if placement.kind is kind
    )
    skips = bucket.cycle.draft is DraftSource.SKIP
    return BucketFigures(
        index=index,
        bucket=bucket,
        skipped=skipped_by(plan, bucket.cycle.mask) if skips else frozenset(),
        passes=passes,
        cycle_passes=cycle_passes,
        parts=_cycle_parts(plan, bucket, cycle_passes),
    )


def cycle_kinds(cycle: Cycle) -> tuple[PassKind, ...]:
    """The kinds of pass that a cycle runs, in order."""
    if cycle.draft is DraftSource.OFF:
        return (PassKind.AR,)
    if cycle.draft is DraftSource.NGRAM:
        return (PassKind.VERIFY,)
    if cycle.draft is DraftSource.MODEL:
        return (PassKind.PROPOSE, PassKind.VERIFY)
    return (PassKind.DRAFT, PassKind.VERIFY)


def draft_passes(plan: ExecutionPlan, cycle: Cycle) -> int:
    """Drafting passes of a cycle at full length: of a tree at least one for each depth."""
    if cycle.shape is DraftShape.ONLINE:
        return plan.growths[cycle.tree].max_depth
    if cycle.shape is DraftShape.STATIC:
        depths = [0]
        for parent in plan.trees[cycle.tree].parents:
            depths.append(depths[parent] + 1)
        return max(depths)
    return cycle.length


def _cycle_parts(
    plan: ExecutionPlan, bucket: Bucket, passes: tuple[Placement, ...]
) -> tuple[CyclePart, ...]:
    if not passes:
        return ()
    parts: list[CyclePart] = []
    if bucket.cycle.draft is DraftSource.NGRAM:
        parts.append(CyclePart("lookup", plan.tables.ngram_us, 1))
    # a placement is one example; several of a kind do not all run in one cycle
    for placement in {placement.kind: placement for placement in reversed(passes)}.values():
        if placement.kind in (PassKind.DRAFT, PassKind.PROPOSE):
            drafts = draft_passes(plan, bucket.cycle)
            parts.insert(0, CyclePart("draft", drafts * pass_us(placement), drafts))
        else:
            name = "decode" if placement.kind is PassKind.AR else "verify"
            parts.append(CyclePart(name, layers_us(placement), 1))
            parts.append(CyclePart("head", placement.head_us, 1))
    parts.append(CyclePart("constant", plan.tables.cycle_us, 1))
    return tuple(parts)


def layers_us(placement: Placement) -> float:
    """Predicted time of a pass without its head."""
    return sum(span.compute_us + span.transfer_us for span in placement.spans)


def pass_us(placement: Placement) -> float:
    """Predicted time of a pass, head included."""
    return layers_us(placement) + placement.head_us


def handovers(placement: Placement) -> int:
    """How often hidden rows go to another processor."""
    return sum(span.transfer_us > 0 for span in placement.spans)


def skipped_by(plan: ExecutionPlan, mask_id: int) -> frozenset[SubLayerId]:
    """The sub-layers that a mask leaves out; empty for a mask that the plan does not hold."""
    return frozenset(
        sub_layer for mask in plan.masks if mask.id == mask_id for sub_layer in mask.skipped
    )


def mask_counts(skipped: frozenset[SubLayerId]) -> tuple[int, int]:
    """How many attention and how many MLP sub-layers are left out."""
    mlp = sum(sub_layer % 2 for sub_layer in skipped)
    return len(skipped) - mlp, mlp


def mask_rows(layers: int, skipped: frozenset[SubLayerId]) -> dict[SubLayerKind, tuple[bool, ...]]:
    """For attention and for MLP: by layer, whether it runs."""
    return {
        kind: tuple(sub_layer_id(LayerId(layer), kind) not in skipped for layer in range(layers))
        for kind in SubLayerKind
    }


def runs(span: Span, skipped: frozenset[SubLayerId]) -> int:
    """Sub-layers of a span that are not left out."""
    return sum(sub_layer not in skipped for sub_layer in range(span.first, span.end))


def attention_count(first: int, end: int) -> int:
    """Attention sub-layers, each with its own KV, of a range."""
    return (end + 1) // 2 - (first + 1) // 2


def kv_bytes(plan: ExecutionPlan, layers: int, tokens: int) -> int:
    """Bytes of the KV of some layers."""
    return round(plan.kv.bytes_per_token / max(1, plan.model.layers) * layers * tokens)


def rows_bytes(plan: ExecutionPlan, width: int) -> int:
    """Bytes of ``width`` hidden rows."""
    return width * plan.model.hidden * HIDDEN_BYTES


def classes_of(plan: ExecutionPlan, span: Span) -> tuple[NumericsClass, ...]:
    """The numerics classes that a span touches."""
    return tuple(
        numerics
        for numerics in plan.numerics
        if numerics.first < span.end and span.first < numerics.end
    )


def format_of(plan: ExecutionPlan, span: Span) -> str:
    """The number format of a span; several are joined by a slash."""
    formats = dict.fromkeys(numerics.format.value for numerics in classes_of(plan, span))
    return "/".join(formats) or str(plan.part_formats)


def processors_of(plan: ExecutionPlan) -> tuple[str, ...]:
    """The processors that the plan uses, in alphabetical order."""
    used = {numerics.processor for numerics in plan.numerics}
    for placement in plan.placements:
        used.add(placement.head_processor)
        used.update(span.processor for span in placement.spans)
    return tuple(sorted(used))


def sub_layers_label(first: int, end: int) -> str:
    """A range of sub-layers, both ends included: ``0-59``."""
    return f"{first}" if end - first == 1 else f"{first}-{end - 1}"


def context_label(bucket: Bucket) -> str:
    """A bucket's context lengths, both ends included."""
    return f"{bucket.context_from}-{max(bucket.context_from, bucket.context_to - 1)}"


def cycle_label(cycle: Cycle, plan: ExecutionPlan | None = None) -> str:
    """A cycle in a few words; with its plan, the draft model is told by its size."""
    if cycle.draft is DraftSource.OFF:
        return "off (plain decoding)"
    source = _source_label(cycle, plan)
    if cycle.shape is DraftShape.STATIC:
        return f"{source}, tree of {cycle.length} nodes"
    if cycle.shape is DraftShape.ONLINE:
        return f"{source}, online, up to {cycle.length} nodes"
    if cycle.draft is DraftSource.MODEL:
        return f"{source}, chain of {cycle.length}"
    return f"{source}, {cycle.length} drafted"


def _source_label(cycle: Cycle, plan: ExecutionPlan | None) -> str:
    if cycle.draft is DraftSource.NGRAM:
        return f"n-gram {cycle.ngram_min}-{cycle.ngram_max}"
    if cycle.draft is DraftSource.SKIP:
        return f"skip mask {cycle.mask}"
    if plan is None or plan.draft is None:
        return "draft model"
    return f"{parameters_label(plan.draft.model)} draft"


def parameters_label(model: ModelSpec) -> str:
    """How large a model is, as people call it: ``0.5B``, ``135M``."""
    attention = 2 * model.hidden * (model.heads * model.head_dim + model.kv_dim)
    layer = attention + 3 * model.hidden * model.intermediate
    tables = model.vocab * model.hidden * (1 if model.tied_head else 2)
    count = model.layers * layer + tables
    return f"{count / 1e9:.1f}B" if count >= _BILLIONS_FROM else f"{count / 1e6:.0f}M"
