"""The weights of a plan as one file, in execution order, read one source tensor at a time."""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from lowering.onnx_graphs import VALUE_BITS
from lowering.quantize import dequantize_channels, quantize_channels
from lowering.source import ModelSource
from profiles.words import Format
from runtime.model_spec import ModelSpec
from runtime.plan import TensorRef

Array = np.ndarray[Any, Any]


class TensorSink(Protocol):
    """Where tensors go: ``runtime.plan_folder.WeightsWriter``."""

    def add(self, name: str, array: Array) -> TensorRef:
        """Append ``array`` and say where it lies."""
        ...


def write_weights(
    source: ModelSource, fmt: Format, context: int, sink: TensorSink
) -> list[TensorRef]:
    """All constants of a model in ``fmt``; ``context`` positions of rotary tables.

    Tensor names are those of the ONNX graphs. Matrices are [in, out]; in 8-bit formats each has a
    ``.scale`` [out] beside it. ``embed`` is [vocab, hidden] with a scale per row of the table: it
    is the same 8-bit table as a tied head, in the layout that a row look-up wants.
    """
    refs: list[TensorRef] = []
    for name, array in _tensors(source, fmt, context):
        refs.append(sink.add(name, array))
    return refs


def _tensors(source: ModelSource, fmt: Format, context: int) -> Iterator[tuple[str, Array]]:
    spec = source.spec
    yield from _embedding(source, fmt)
    yield from rotary_tables(spec, context).items()
    for layer in range(spec.layers):
        yield from _layer(source, fmt, f"layers.{layer}")
    yield "final_norm", source.tensor("final_norm")
    yield from _matrix("head", source.tensor("head"), fmt)


def _embedding(source: ModelSource, fmt: Format) -> Iterator[tuple[str, Array]]:
    table = source.tensor("embed")
    if fmt is Format.F32:
        yield "embed", table
        return
    stored, scale = quantize_channels(table)
    yield "embed", np.ascontiguousarray(stored.T)
    yield "embed.scale", scale


def _layer(source: ModelSource, fmt: Format, layer: str) -> Iterator[tuple[str, Array]]:
    norm = source.tensor(f"{layer}.attn_norm")
    yield f"{layer}.attn_norm", norm
    parts = [source.tensor(f"{layer}.{name}") for name in ("q", "k", "v")]
    qkv = np.concatenate(parts)
    yield from _matrix(f"{layer}.qkv", qkv, fmt)
    grid = value_grid(parts[2], norm, fmt)
    heads = source.spec.heads // source.spec.kv_heads
    yield f"{layer}.value_grid", grid
    by_head = (1 / grid).reshape(source.spec.kv_heads, 1, -1)
    yield f"{layer}.value_ungrid", by_head.repeat(heads, axis=1).reshape(-1)
    yield from _matrix(f"{layer}.o", source.tensor(f"{layer}.o"), fmt)
    yield f"{layer}.mlp_norm", source.tensor(f"{layer}.mlp_norm")
    gate_up = np.concatenate([source.tensor(f"{layer}.{name}") for name in ("gate", "up")])
    yield from _matrix(f"{layer}.gate_up", gate_up, fmt)
    yield from _matrix(f"{layer}.down", source.tensor(f"{layer}.down"), fmt)


def _matrix(name: str, weight: Array, fmt: Format) -> Iterator[tuple[str, Array]]:
    """``weight`` [out, in] as the graphs take it."""
    if fmt is Format.F32:
        yield name, np.ascontiguousarray(weight.T)
        return
    stored, scale = quantize_channels(weight)
    yield name, stored
    yield f"{name}.scale", scale


def value_grid(weight: Array, norm: Array, fmt: Format) -> Array:
    """Grid steps per unit for each value channel: powers of two, [kv_dim] float32.

    A normed row has Euclidean length at most sqrt(hidden) times the norm's weights, so by
    Cauchy-Schwarz channel j never exceeds ``|weight_j * norm| * sqrt(hidden)``; two per cent more
    cover the rounding of weights and activations. The grid puts that bound at ``VALUE_BITS`` bits.
    """
    if fmt is not Format.F32:
        weight = dequantize_channels(*quantize_channels(weight))
    length = np.linalg.norm((weight * norm).astype(np.float64), axis=1)
    bound = np.maximum(length * math.sqrt(weight.shape[1]) * 1.02, 1e-6)
    return np.exp2(np.floor(VALUE_BITS - np.log2(bound))).astype(np.float32)


def rotary_tables(spec: ModelSpec, context: int) -> dict[str, Array]:
    """Cosines and sines [context, head_dim / 2], computed in float64, stored in float32."""
    half = np.arange(spec.head_dim // 2, dtype=np.float64)
    frequency = spec.rope.theta ** (-2 * half / spec.head_dim)
    angle = np.arange(context, dtype=np.float64)[:, None] * frequency
    return {
        "rope.cos": np.cos(angle).astype(np.float32),
        "rope.sin": np.sin(angle).astype(np.float32),
    }
