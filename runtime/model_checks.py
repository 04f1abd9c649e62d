"""Checks of a model in a plan: the target, or the draft model."""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Protocol

from runtime.faults import Fault, once, outside
from runtime.model_spec import MAX_HEAD_DIM, MAX_ROPE_FACTOR, MIN_ROPE_FACTOR, ModelSpec
from runtime.plan import ALIGNMENT_BYTES, Artefact, Graph, GraphKind, TensorRef

EMBEDDING = "embed"
"""Name of the table that turns token ids into hidden rows."""
MAX_CONTEXT = 1 << 24
_MODEL_LIMITS = {
    "layers": 1024,
    "hidden": 1 << 16,
    "intermediate": 1 << 20,
    "heads": 1024,
    "kv_heads": 1024,
    "head_dim": MAX_HEAD_DIM,
    "vocab": 1 << 21,
    "max_context": MAX_CONTEXT,
}
_MAX_TENSOR_DIMENSIONS = 8


class Stored(Protocol):
    """What plans and draft models have in common."""

    @property
    def model(self) -> ModelSpec: ...
    @property
    def graphs(self) -> tuple[Graph, ...]: ...
    @property
    def weights(self) -> Artefact: ...
    @property
    def tensors(self) -> tuple[TensorRef, ...]: ...


def model_faults(model: ModelSpec, path: str) -> Iterator[Fault]:
    """Dimensions and tokens of a model."""
    for name, limit in _MODEL_LIMITS.items():
        yield from outside(f"{path}.{name}", getattr(model, name), 1, limit)
    if model.heads % model.kv_heads:
        expected = f"a divisor of heads, {model.heads}"
        yield Fault(f"{path}.kv_heads", "heads do not share keys evenly", model.kv_heads, expected)
    if model.head_dim % 2:
        what = "rotary embedding pairs the halves of a head"
        yield Fault(f"{path}.head_dim", what, model.head_dim, "an even number")
    yield from outside(f"{path}.norm_eps", model.norm_eps, 1e-30, 1)
    yield from outside(f"{path}.rope.theta", model.rope.theta, 1, 1e15)
    if len(model.rope.factors) not in (0, model.head_dim // 2):
        found, expected = len(model.rope.factors), f"none, or {model.head_dim // 2}"
        yield Fault(f"{path}.rope.factors", "one factor for each pair of a head", found, expected)
    for index, factor in enumerate(model.rope.factors):
        where = f"{path}.rope.factors[{index}]"
        yield from outside(where, factor, MIN_ROPE_FACTOR, MAX_ROPE_FACTOR)
    yield from _tokens(model, f"{path}.tokenizer")


def _tokens(model: ModelSpec, path: str) -> Iterator[Fault]:
    tokenizer = model.tokenizer
    for index, token in enumerate(tokenizer.eos_ids):
        yield from outside(f"{path}.eos_ids[{index}]", token, 0, model.vocab - 1)
    if tokenizer.bos_id is not None:
        yield from outside(f"{path}.bos_id", tokenizer.bos_id, 0, model.vocab - 1)
    elif tokenizer.add_bos:
        yield Fault(f"{path}.add_bos", "no token to put first", True, "a bos_id, or add_bos false")


def tensor_faults(part: Stored, path: str) -> Iterator[Fault]:
    """Where tensors lie in the weights file, and the tables that are looked into."""
    for index, tensor in enumerate(part.tensors):
        where = f"{path}[{index}]"
        if len(tensor.shape) > _MAX_TENSOR_DIMENSIONS or 0 in tensor.shape:
            expected = f"up to {_MAX_TENSOR_DIMENSIONS} dimensions, each at least 1"
            yield Fault(f"{where}.shape", "unusable shape", tensor.shape, expected)
        if tensor.offset_bytes % ALIGNMENT_BYTES:
            expected = f"a multiple of {ALIGNMENT_BYTES}"
            yield Fault(f"{where}.offset_bytes", "unaligned tensor", tensor.offset_bytes, expected)
        end = tensor.offset_bytes + tensor.size_bytes
        if end > part.weights.bytes:
            expected = f"<= {part.weights.bytes}, the length of {part.weights.path}"
            yield Fault(where, "tensor ends outside the weights", f"{end} bytes", expected)
    yield from once(path, [tensor.name for tensor in part.tensors])
    for one, other in pairwise(sorted(part.tensors, key=lambda tensor: tensor.offset_bytes)):
        end = one.offset_bytes + one.size_bytes
        if other.offset_bytes < end:
            found = f"{other.name!r} at {other.offset_bytes}"
            yield Fault(path, "tensors overlap", found, f">= {end}, the end of {one.name!r}")
    yield from _embedding(part, path)


def _embedding(part: Stored, path: str) -> Iterator[Fault]:
    """The tensors that the runtime itself looks into: the table, and its scales."""
    expected = (part.model.vocab, part.model.hidden)
    shapes = {tensor.name: tensor.shape for tensor in part.tensors}
    found = shapes.get(EMBEDDING)
    if found != expected:
        where = f"{path}, {EMBEDDING!r}"
        yield Fault(where, "no such embedding table", found, f"[vocab, hidden], {expected}")
    for name, shape in shapes.items():
        if name.startswith(f"{EMBEDDING}.") and shape[:1] != expected[:1]:
            where = f"{path}, {name!r}"
            yield Fault(where, "no row for each token", shape, f"{expected[0]} rows")


def graph_faults(part: Stored, needed: AbstractSet[GraphKind], path: str) -> Iterator[Fault]:
    """That there is one graph of each kind ``needed``, over tensors that there are."""
    known = {tensor.name for tensor in part.tensors}
    for index, graph in enumerate(part.graphs):
        for place, name in enumerate(graph.tensors):
            if name not in known:
                where = f"{path}.graphs[{index}].tensors[{place}]"
                yield Fault(where, "unknown tensor", name, f"a name from {path}.tensors")
    kinds = Counter(graph.kind for graph in part.graphs)
    for kind in GraphKind:
        expected = int(kind in needed)
        if kinds[kind] != expected:
            yield Fault(
                f"{path}.graphs", f"graphs of kind {kind}", kinds[kind], f"exactly {expected}"
            )
