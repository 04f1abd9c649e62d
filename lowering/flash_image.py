"""The weights of a plan as one file, in execution order, read one source tensor at a time."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from lowering.blocks import FLOAT_BLOCK, Blocks, from_floats, from_packed, stacked
from lowering.linear_nodes import product_name
from lowering.quantize import ZERO_POINT, dequantize_channels, quantize_channels
from lowering.source import ModelSource, row_blocks, stored_name, tensor_shapes
from lowering.template import VALUE_BITS
from profiles.errors import UnsupportedError
from profiles.words import Format
from runtime.model_spec import ModelSpec
from runtime.plan import Formats, TensorRef, formats_of
from runtime.plan_types import WIDEST_PASS

Array = np.ndarray[Any, Any]


class TensorSink(Protocol):
    """Where tensors go: ``runtime.plan_folder.WeightsWriter``."""

    def add(self, name: str, array: Array) -> TensorRef:
        """Append ``array`` and say where it lies."""
        ...


def write_weights(
    source: ModelSource, fmt: Format | Formats, context: int, sink: TensorSink
) -> list[TensorRef]:
    """All constants of a model in ``fmt``; ``context`` positions of rotary tables.

    Tensor names are those of the ONNX graphs. Matrices are [in, out]; in the channel formats each
    has a ``.scale`` [out] beside it; ``w4`` has [out, blocks, bytes] with ``.scale`` [out * blocks]
    and, where the blocks store one, ``.offset`` [blocks, out]. ``embed`` is [vocab, hidden] with a
    scale per row or block: what a tied head stores, in the layout that a row look-up wants.
    """
    refs: list[TensorRef] = []
    for name, array in _tensors(source, formats_of(fmt), context):
        refs.append(sink.add(name, array))
    return refs


def _tensors(source: ModelSource, formats: Formats, context: int) -> Iterator[tuple[str, Array]]:
    spec = source.spec
    yield from _embedding(source, formats.head)
    # Rows that pad a pass at the end of the context have positions too
    yield from rotary_tables(spec, context + WIDEST_PASS).items()
    for layer in range(spec.layers):
        yield from _layer(source, formats, f"layers.{layer}")
    yield "final_norm", source.tensor("final_norm")
    yield from _product(source, "", ["head"], formats.head)


def _embedding(source: ModelSource, fmt: Format) -> Iterator[tuple[str, Array]]:
    if fmt is Format.W4:
        blocks = _blocks(source, "embed")
        yield "embed", blocks.steps + np.uint8(ZERO_POINT - blocks.middle)
        yield "embed.scale", blocks.scale
        if blocks.offset is not None:
            yield "embed.offset", blocks.offset
        return
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


def _layer(source: ModelSource, formats: Formats, layer: str) -> Iterator[tuple[str, Array]]:
    fmt, mlp = formats.attention, formats.mlp
    spec, parts = source.spec, ("q", "k", "v")
    norm = source.tensor(f"{layer}.attn_norm")
    yield f"{layer}.attn_norm", norm
    yield from _product(source, f"{layer}.", parts, fmt)
    bias = None
    if spec.qkv_bias:
        biases = [source.tensor(f"{layer}.{part}_bias") for part in parts]
        bias = biases[2]
        yield f"{layer}.qkv_bias", np.concatenate(biases)
    if spec.qk_norm:
        yield f"{layer}.qk_norm", _head_norms(source, layer)
    grid = value_grid(_deployed(source, f"{layer}.v", fmt), norm, bias)
    yield f"{layer}.value_grid", grid
    by_head = (1 / grid).reshape(spec.kv_heads, 1, -1)
    heads = spec.heads // spec.kv_heads
    yield f"{layer}.value_ungrid", by_head.repeat(heads, axis=1).reshape(-1)
    yield from _product(source, f"{layer}.", ["o"], fmt)
    yield f"{layer}.mlp_norm", source.tensor(f"{layer}.mlp_norm")
    yield from _product(source, f"{layer}.", ["gate", "up"], mlp)
    yield from _product(source, f"{layer}.", ["down"], mlp)


def _head_norms(source: ModelSource, layer: str) -> Array:
    """Norm weights of every query head and then every key head, [heads + kv_heads, head_dim]."""
    parts = (("q", source.spec.heads), ("k", source.spec.kv_heads))
    return np.concatenate([np.tile(source.tensor(f"{layer}.{p}_norm"), (n, 1)) for p, n in parts])


def _product(
    source: ModelSource, prefix: str, parts: Sequence[str], fmt: Format
) -> Iterator[tuple[str, Array]]:
    """The matrices that one row is multiplied with: stored as one, or as one per kind of block."""
    if fmt is not Format.W4:
        yield from _matrix(product_name(prefix, parts), source, [prefix + p for p in parts], fmt)
        return
    blocks = [(part, _blocks(source, prefix + part)) for part in parts]
    for _, group in groupby(blocks, key=lambda item: item[1].kind):
        same = list(group)
        name = product_name(prefix, [part for part, _ in same])
        yield from _block_matrix(name, stacked([part for _, part in same]))


def _blocks(source: ModelSource, name: str) -> Blocks:
    """A tensor as its file stores it, or else rounded: 4 bits, but 8 for the two tables."""
    packed = source.packed(name)
    blocks = from_packed(packed) if packed else None
    if blocks is not None:
        if not blocks.finite:
            source.tensor(name)  # refuses it and says where
        return blocks
    weight = source.tensor(name)
    if weight.shape[1] % FLOAT_BLOCK:
        raise UnsupportedError(
            f"w4 needs rows of whole blocks, and tensor {name} has none",
            where=source.spec.name,
            found=f"rows of {weight.shape[1]}",
            expected=f"a multiple of {FLOAT_BLOCK}",
            hint="choose another --target-format",
        )
    return from_floats(weight, 8 if name in ("embed", "head") else 4)


def _block_matrix(name: str, blocks: Blocks) -> Iterator[tuple[str, Array]]:
    yield name, blocks.packed_steps()
    yield f"{name}.scale", blocks.scale.reshape(-1)
    if blocks.offset is not None:
        yield f"{name}.offset", np.ascontiguousarray(blocks.offset.T)


def _deployed(source: ModelSource, name: str, fmt: Format) -> Array:
    """The weights [out, in] that the plan multiplies with, as float32."""
    if fmt is Format.W4:
        return _blocks(source, name).dequantize()
    weight = source.tensor(name)
    return weight if fmt is Format.F32 else dequantize_channels(*quantize_channels(weight))


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


def value_grid(weight: Array, norm: Array, bias: Array | None = None) -> Array:
    """Grid steps per unit for each value channel: powers of two, [kv_dim] float32.

    ``weight`` [kv_dim, hidden] as deployed. A normed row has Euclidean length at most sqrt(hidden)
    times the norm's weights, so by Cauchy-Schwarz channel j never exceeds
    ``|weight_j * norm| * sqrt(hidden) + |bias_j|``; three per cent more cover the rounding of
    activations. The grid puts that bound at ``VALUE_BITS`` bits.
    """
    length = np.linalg.norm((weight * norm).astype(np.float64), axis=1)
    largest = length * math.sqrt(weight.shape[1])
    if bias is not None:
        largest += np.abs(bias)
    bound = np.maximum(largest * 1.03, 1e-6)
    return np.exp2(np.floor(VALUE_BITS - np.log2(bound))).astype(np.float32)


def rotary_tables(spec: ModelSpec, context: int) -> dict[str, Array]:
    """Cosines and sines [context, head_dim / 2], computed in float64, stored in float32."""
    frequencies = np.array(spec.rope.frequencies(spec.head_dim))
    angle = np.arange(context, dtype=np.float64)[:, None] * frequencies
    return {
        "rope.cos": np.cos(angle).astype(np.float32),
        "rope.sin": np.sin(angle).astype(np.float32),
    }
