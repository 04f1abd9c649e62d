"""What a plan needs in DRAM, part by part, and whether the budget allows it."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from lowering.linear_nodes import PART_KINDS, product_name
from planner.roofline import WEIGHT_BYTES
from profiles.errors import InfeasibleError
from profiles.words import AttentionKernel, SubLayerId, SubLayerKind, kind_of
from runtime.embedding import EMBEDDING_TENSORS, KEPT_ROWS
from runtime.model_spec import ModelSpec
from runtime.plan import ALIGNMENT_BYTES, Formats, MemoryNeed, TensorRef, TensorType
from runtime.plan_types import WIDEST_PASS

F32_BYTES = 4
MEBIBYTE = 1 << 20
LIBRARIES_BYTES = 72 * MEBIBYTE
"""Python, numpy and ONNX Runtime with a small session: 70 MiB on x86-64 Linux."""
TOKEN_BYTES = 600
"""Of the tokenizer for each token of the vocabulary: 470 to 720 were measured, 49k and 152k."""
SCORE_BYTES = 20
"""Of exact attention for each head, row and slot: scores, their grid and its float64 copy."""
_ATTENTION_SMALL = ("attn_norm", "qkv_bias", "qk_norm", "value_grid", "value_ungrid")


class SubLayerBytes(NamedTuple):
    """A sub-layer in memory."""

    resident: int
    """Packed by ONNX Runtime, its mapped pages given back."""
    streamed: int
    """Its range of the weights file: what is read in every pass, and what a ring slot holds."""


class Model(NamedTuple):
    """A model as emitted."""

    spec: ModelSpec
    tensors: Sequence[TensorRef]


def memory_need(
    spec: ModelSpec,
    formats: Formats,
    context: int,
    stored_bytes: int | None = None,
) -> MemoryNeed:
    """Estimate for a resident plan with a full context, before its tensors are known.

    ``stored_bytes`` are those of the weights file; where it is not written yet they are estimated.
    """
    if stored_bytes is None:
        attention = 2 * spec.hidden * (spec.heads * spec.head_dim + spec.kv_dim)
        layer = attention * WEIGHT_BYTES[formats.attention]
        layer += 3 * spec.hidden * spec.intermediate * WEIGHT_BYTES[formats.mlp]
        tables = 2 * spec.hidden * spec.vocab * WEIGHT_BYTES[formats.head]
        stored_bytes = round(spec.layers * layer + tables)
    return MemoryNeed(
        weights_bytes=stored_bytes,
        kv_bytes=kv_bytes(spec, context),
        interpreter_bytes=interpreter_bytes(spec),
    )


def plan_memory(
    target: Model,
    context: int,
    *,
    growth_tokens: int = 0,
    pass_bytes: int = 0,
    streamed: Collection[SubLayerId] = (),
    slots: int = 0,
    draft: Model | None = None,
    draft_growth_tokens: int = 0,
) -> MemoryNeed:
    """Peak of decoding up to a full context, loading apart.

    ``pass_bytes`` are those of the largest pass (``widest_pass_bytes``), of the target's and of the
    draft's together, since each session keeps its buffers; the sub-layers ``streamed`` are in a
    ring of ``slots`` for each kind only.
    """
    spec = target.spec
    held = [i for i in range(spec.sub_layers) if i not in streamed]
    sizes = sub_layer_bytes(target)
    kv = kv_bytes(spec, context, growth_tokens)
    if draft is not None:
        kv += kv_bytes(draft.spec, context, draft_growth_tokens)
    return MemoryNeed(
        weights_bytes=sum(sizes[i].resident for i in held) + head_bytes(target),
        kv_bytes=kv,
        interpreter_bytes=interpreter_bytes(spec) + pass_bytes,
        draft_bytes=0 if draft is None else draft_bytes(draft),
        ring_bytes=ring_bytes(sizes, streamed, slots),
    )


def sub_layer_bytes(model: Model) -> tuple[SubLayerBytes, ...]:
    """Of each sub-layer, in order."""
    by_name = {tensor.name: tensor for tensor in model.tensors}
    members: dict[int, list[TensorRef]] = {}
    for tensor in model.tensors:
        if (at := _sub_layer(tensor.name)) is not None:
            members.setdefault(at, []).append(tensor)
    return tuple(
        SubLayerBytes(
            resident=sum(_packed(tensor, by_name) for tensor in members[i]),
            streamed=_range_bytes(members[i]),
        )
        for i in range(model.spec.sub_layers)
    )


def head_bytes(model: Model) -> int:
    """What is in memory besides the sub-layers: head, rotary tables, rows of the embedding."""
    by_name = {tensor.name: tensor for tensor in model.tensors}
    rest = [t for t in model.tensors if _sub_layer(t.name) is None]
    others = sum(_packed(t, by_name) for t in rest if t.name not in EMBEDDING_TENSORS)
    return others + F32_BYTES * model.spec.hidden * min(KEPT_ROWS, model.spec.vocab)


def draft_bytes(draft: Model) -> int:
    """All of a draft model's weights, packed; its tokens are the target's."""
    return sum(size.resident for size in sub_layer_bytes(draft)) + head_bytes(draft)


def ring_bytes(sizes: Sequence[SubLayerBytes], streamed: Collection[SubLayerId], slots: int) -> int:
    """Of a ring with ``slots`` for each kind of sub-layer that streams."""
    largest = (
        max((sizes[i].streamed for i in streamed if kind_of(i) is kind), default=0)
        for kind in SubLayerKind
    )
    return slots * sum(largest)


def kv_bytes(spec: ModelSpec, context: int, growth_tokens: int = 0) -> int:
    """Keys and values of a full context, scratch rows included.

    With growth 0 all capacity counts: huge pages give all of it at the first row. A cache that
    grows holds the old capacity besides while it copies.
    """
    slots = context + WIDEST_PASS
    if growth_tokens:
        last = -(-context // growth_tokens) * growth_tokens
        slots = 2 * last - growth_tokens
    return slots * kv_bytes_per_token(spec)


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """One key and one value row per layer, float32."""
    return 2 * F32_BYTES * spec.layers * spec.kv_dim


def interpreter_bytes(spec: ModelSpec) -> int:
    """Libraries and tokenizer."""
    return LIBRARIES_BYTES + TOKEN_BYTES * spec.vocab


def widest_pass_bytes(
    spec: ModelSpec, attention: AttentionKernel, width: int, slots: int, head_rows: int
) -> int:
    """Buffers of a pass of ``width`` rows over ``slots`` that gives ``head_rows`` of logits."""
    projected = spec.heads * spec.head_dim + 2 * spec.kv_dim
    features = 4 * spec.intermediate + 4 * spec.hidden + 2 * projected
    total = F32_BYTES * (width * features + 2 * head_rows * spec.vocab)
    if attention is AttentionKernel.EXACT:
        total += SCORE_BYTES * spec.heads * width * (slots + width)
        # values as float64, one layer at a time
        total += 8 * spec.kv_dim * slots
    return total


def check_budget(need: MemoryNeed, budget_bytes: int) -> None:
    """``InfeasibleError`` that says the smallest budget that works."""
    total = need.total_bytes
    if total <= budget_bytes:
        return
    named = {
        "weights": need.weights_bytes,
        "draft model": need.draft_bytes,
        "ring": need.ring_bytes,
        "keys and values": need.kv_bytes,
        "interpreter": need.interpreter_bytes,
    }
    parts = ", ".join(f"{name} {size // MEBIBYTE} MiB" for name, size in named.items() if size)
    raise InfeasibleError(
        "the plan does not fit into memory",
        found=f"{-(-total // MEBIBYTE)} MiB: {parts}",
        expected=f"at most {budget_bytes // MEBIBYTE} MiB",
        hint=f"the smallest budget that works is --dram-budget {-(-total // MEBIBYTE)}MiB;"
        " a shorter --context or a smaller --target-format needs less",
    )


def _sub_layer(name: str) -> int | None:
    """The sub-layer that a tensor belongs to; None for the embedding, the head, rotary tables."""
    if not name.startswith("layers."):
        return None
    _, layer, part, *_ = name.split(".")
    of_attention = part in _ATTENTION_SMALL or part in _ATTENTION_PRODUCTS
    return 2 * int(layer) + (not of_attention)


def _products(parts: Sequence[str]) -> set[str]:
    """Names of the matrices that neighbours among ``parts`` may be stored as."""
    ends = range(len(parts) + 1)
    return {product_name("", parts[a:b]) for a in ends for b in ends if a < b}


_ATTENTION_PRODUCTS = _products(
    [part for part, kind in PART_KINDS.items() if kind is SubLayerKind.ATTENTION]
)


def _packed(tensor: TensorRef, by_name: Mapping[str, TensorRef]) -> int:
    """Bytes of a constant as ONNX Runtime holds it; it packs matrices into memory of its own.

    With 8-bit blocks it keeps the sum of each beside its scale.
    """
    if tensor.name.endswith(".scale"):
        matrix = by_name[tensor.name.removesuffix(".scale")]
        if len(matrix.shape) == 3 and _size(matrix) > 16 * math.prod(matrix.shape[:2]):
            return 2 * _size(tensor)
    return _size(tensor)


def _size(tensor: TensorRef) -> int:
    return math.prod(tensor.shape) * (F32_BYTES if tensor.type is TensorType.F32 else 1)


def _range_bytes(tensors: Iterable[TensorRef]) -> int:
    """From the first tensor to the end of the last, in whole blocks of the file."""
    spans = [(t.offset_bytes, t.offset_bytes + _size(t)) for t in tensors]
    length = max(end for _, end in spans) - min(first for first, _ in spans)
    return -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
