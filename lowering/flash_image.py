"""The weights of a plan as one file, in execution order, read one source tensor at a time."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from lowering.onnx_graphs import VALUE_BITS
from lowering.quantize import dequantize_channels, quantize_channels
from lowering.source import ModelSource, row_blocks, stored_name, tensor_shapes
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
    yield from _matrix("head", source, ["head"], fmt)


def _embedding(source: ModelSource, fmt: Format) -> Iterator[tuple[str, Array]]:
    if fmt is Format.F32:
        yield "embed", source.tensor("embed")
        return
    stored = np.empty((source.spec.vocab, source.spec.hidden), np.uint8)
    scale = np.empty(source.spec.vocab, np.float32)
    at = 0
    for block in row_blocks(source, ["embed"]):
        rows = slice(at, at := at + len(block))
        columns, scale[rows] = quantize_channels(block)
        stored[rows] = columns.T
    yield "embed", stored
    yield "embed.scale", scale


def _layer(source: ModelSource, fmt: Format, layer: str) -> Iterator[tuple[str, Array]]:
    spec, parts = source.spec, ("q", "k", "v")
    norm = source.tensor(f"{layer}.attn_norm")
    yield f"{layer}.attn_norm", norm
    yield from _matrix(f"{layer}.qkv", source, [f"{layer}.{part}" for part in parts], fmt)
    bias = None
    if spec.qkv_bias:
        biases = [source.tensor(f"{layer}.{part}_bias") for part in parts]
        bias = biases[2]
        yield f"{layer}.qkv_bias", np.concatenate(biases)
    if spec.qk_norm:
        yield f"{layer}.qk_norm", _head_norms(source, layer)
    grid = value_grid(source.tensor(f"{layer}.v"), norm, fmt, bias)
    yield f"{layer}.value_grid", grid
    by_head = (1 / grid).reshape(spec.kv_heads, 1, -1)
    heads = spec.heads // spec.kv_heads
    yield f"{layer}.value_ungrid", by_head.repeat(heads, axis=1).reshape(-1)
    yield from _matrix(f"{layer}.o", source, [f"{layer}.o"], fmt)
    yield f"{layer}.mlp_norm", source.tensor(f"{layer}.mlp_norm")
    yield from _matrix(f"{layer}.gate_up", source, [f"{layer}.gate", f"{layer}.up"], fmt)
    yield from _matrix(f"{layer}.down", source, [f"{layer}.down"], fmt)


def _head_norms(source: ModelSource, layer: str) -> Array:
    """Norm weights of every query head and then every key head, [heads + kv_heads, head_dim]."""
    parts = (("q", source.spec.heads), ("k", source.spec.kv_heads))
    return np.concatenate([np.tile(source.tensor(f"{layer}.{p}_norm"), (n, 1)) for p, n in parts])


def _matrix(
    name: str, source: ModelSource, parts: Sequence[str], fmt: Format
) -> Iterator[tuple[str, Array]]:
    """The matrices ``parts`` [out, in], one under the other, as the graphs take them."""
    shapes = tensor_shapes(source.spec)
    sizes = [shapes[stored_name(part, source.spec.tied_head)] for part in parts]
    out, width = sum(rows for rows, _ in sizes), sizes[0][1]
    stored = np.empty((width, out), np.float32 if fmt is Format.F32 else np.uint8)
    scale = np.empty(out, np.float32)
    at = 0
    for block in row_blocks(source, parts):
        rows = slice(at, at := at + len(block))
        if fmt is Format.F32:
            stored[:, rows] = block.T
        else:
            stored[:, rows], scale[rows] = quantize_channels(block)
    yield name, stored
    if fmt is not Format.F32:
        yield f"{name}.scale", scale


def value_grid(weight: Array, norm: Array, fmt: Format, bias: Array | None = None) -> Array:
    """Grid steps per unit for each value channel: powers of two, [kv_dim] float32.

    A normed row has Euclidean length at most sqrt(hidden) times the norm's weights, so by
    Cauchy-Schwarz channel j never exceeds ``|weight_j * norm| * sqrt(hidden) + |bias_j|``; two per
    cent more cover the rounding of weights and activations. The grid puts that bound at
    ``VALUE_BITS`` bits.
    """
    if fmt is not Format.F32:
        weight = dequantize_channels(*quantize_channels(weight))
    length = np.linalg.norm((weight * norm).astype(np.float64), axis=1)
    largest = length * math.sqrt(weight.shape[1])
    if bias is not None:
        largest += np.abs(bias)
    bound = np.maximum(largest * 1.02, 1e-6)
    return np.exp2(np.floor(VALUE_BITS - np.log2(bound))).astype(np.float32)


def rotary_tables(spec: ModelSpec, context: int) -> dict[str, Array]:
    """Cosines and sines [context, head_dim / 2], computed in float64, stored in float32."""
    frequencies = np.array(spec.rope.frequencies(spec.head_dim))
    angle = np.arange(context, dtype=np.float64)[:, None] * frequencies
    return {
        "rope.cos": np.cos(angle).astype(np.float32),
        "rope.sin": np.sin(angle).astype(np.float32),
    }
