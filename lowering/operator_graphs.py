"""Small ONNX graphs of one operator, to be timed: made of the very pieces of the plan's graphs.

An operator stands in its graph several times, each time with weights or keys of its own, so that
the working set leaves the caches as it does in a real pass. Each repeat has inputs and outputs of
its own too; otherwise the optimiser would merge what repeats have in common.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from onnx import TensorProto, numpy_helper

from lowering.attention_nodes import attend, fused, prologue, split_heads
from lowering.flash_image import rotary_tables
from lowering.linear_nodes import (
    OFFSET_BLOCK,
    BlockMatrix,
    block_linear,
    gated,
    linear,
    linear_constants,
    norm,
)
from lowering.onnx_graphs import slot_counts
from lowering.onnx_nodes import Nodes, onnx_model, switch, tensor_info
from lowering.quantize import ZERO_POINT
from lowering.template import Template
from profiles.points import AttentionShape, GlueShape, LinearShape
from profiles.words import AttentionKernel, Format
from runtime.model_spec import ModelSpec, RopeSpec, TokenizerSpec

Array = np.ndarray[Any, Any]

INTERMEDIATE_PER_HIDDEN = 8 / 3
"""Width of a gated MLP that has as many weights as a plain one of four times the hidden size."""


class OperatorGraph(msgspec.Struct, frozen=True):
    """One operator, several times over."""

    model: bytes
    """The serialised graph, weights inside: onnxruntime wants external ones to be files."""
    repeats: int
    """How often the operator runs in one run of the graph."""


def linear_graph(shape: LinearShape, fmt: Format, repeats: int) -> OperatorGraph:
    """Products ``x.i`` [w, k] times constant weights ``w.i`` -> ``y.i`` [w, n]."""
    g, constants = Nodes("linear"), dict(linear_constants(fmt))
    if fmt in (Format.W4, Format.W8):
        return _block_linear_graph(shape, 4 if fmt is Format.W4 else 8, repeats)
    for i, matrix in enumerate(_matrices(shape, fmt, repeats)):
        constants[f"w.{i}"] = matrix
        if fmt is not Format.F32:
            # of the size that a model's have, so that outputs neither vanish nor overflow
            scale = np.full(shape.n, 1 / (64 * math.sqrt(shape.k)), np.float32)
            constants[f"w.{i}.scale"] = scale
        g.named(f"y.{i}", "Identity", linear(g, f"x.{i}", f"w.{i}", fmt))
    inputs = [tensor_info(f"x.{i}", ["w", shape.k]) for i in range(repeats)]
    outputs = [tensor_info(f"y.{i}", ["w", shape.n]) for i in range(repeats)]
    return _graph(g, inputs, outputs, constants, repeats)


def streamed_linear_graph(shape: LinearShape, fmt: Format, repeats: int) -> OperatorGraph:
    """The same with weights from outside: inputs ``w.i`` [k, n] u8 and ``w.i.scale`` [n] too."""
    g = Nodes("linear")
    inputs: list[Any] = []
    for i in range(repeats):
        inputs.append(tensor_info(f"x.{i}", ["w", shape.k]))
        inputs += _weight_inputs(f"w.{i}", shape)
        g.named(f"y.{i}", "Identity", linear(g, f"x.{i}", f"w.{i}", fmt))
    outputs = [tensor_info(f"y.{i}", ["w", shape.n]) for i in range(repeats)]
    return _graph(g, inputs, outputs, linear_constants(fmt), repeats)


def streamed_mlp_graph(spec: ModelSpec, fmt: Format) -> OperatorGraph:
    """One MLP whose weights are inputs: ``hidden`` [w, d] -> ``hidden_out`` [w, d]."""
    g = Nodes("mlp")
    both = linear(g, norm(g, "hidden", "norm", spec), "gate_up", fmt)
    g.named("hidden_out", "Add", "hidden", linear(g, gated(g, both), "down", fmt))
    inputs = [
        tensor_info("hidden", ["w", spec.hidden]),
        tensor_info("norm", [spec.hidden]),
        *_weight_inputs("gate_up", LinearShape(spec.hidden, 2 * spec.intermediate)),
        *_weight_inputs("down", LinearShape(spec.intermediate, spec.hidden)),
    ]
    outputs = [tensor_info("hidden_out", ["w", spec.hidden])]
    return _graph(g, inputs, outputs, linear_constants(fmt), 1)


def _weight_inputs(name: str, shape: LinearShape) -> list[Any]:
    return [
        tensor_info(name, [shape.k, shape.n], TensorProto.UINT8),
        tensor_info(f"{name}.scale", [shape.n]),
    ]


def _block_linear_graph(shape: LinearShape, bits: int, repeats: int) -> OperatorGraph:
    """The same with weights in blocks; 4-bit ones have an offset, as in most files."""
    g, constants = Nodes("linear"), dict(linear_constants(Format.W4))
    blocks = shape.k // OFFSET_BLOCK
    steps = np.resize(
        np.random.default_rng(0).integers(0, 256, 65_521, np.uint8),
        (repeats, shape.n, blocks, OFFSET_BLOCK * bits // 8),
    )
    for i in range(repeats):
        constants[f"w.{i}"] = steps[i]
        constants[f"w.{i}.scale"] = np.full(shape.n * blocks, 1 / math.sqrt(shape.k), np.float32)
        if bits == 4:
            constants[f"w.{i}.offset"] = np.full((blocks, shape.n), 0.01, np.float32)
        matrix = BlockMatrix(f"w.{i}", shape.k, shape.n, bits, OFFSET_BLOCK, offset=bits == 4)
        g.named(f"y.{i}", "Identity", block_linear(g, f"x.{i}", matrix))
    inputs = [tensor_info(f"x.{i}", ["w", shape.k]) for i in range(repeats)]
    outputs = [tensor_info(f"y.{i}", ["w", shape.n]) for i in range(repeats)]
    return _graph(g, inputs, outputs, constants, repeats)


def attention_graph(shape: AttentionShape, context: int, repeats: int) -> OperatorGraph:
    """Everything between the QKV product and the output product of ``repeats`` layers.

    Fused attention. Inputs: ``qkv.i`` [w, (heads + 2 kv_heads) hd], ``key.i`` and ``value.i``
    [1, kv_heads, t, hd], to be bound as outputs ``new_key.i`` and ``new_value.i`` too,
    ``positions`` [1, w] int64, ``slots`` and ``last_slot`` int32. Outputs besides: ``out.i``
    [w, heads hd]. Positions and slots stay under ``context``.
    """
    spec = probe_spec(attention=shape, layers=repeats)
    t = Template(spec, Format.F32, context, AttentionKernel.FUSED)
    g = Nodes("attention")
    constants = t.constants | rotary_tables(spec, context)
    held = [1, spec.kv_heads, "t", spec.head_dim]
    for i in range(repeats):
        rows, k, v = fused(g, f"qkv.{i}", i, t)
        g.named(f"out.{i}", "Identity", rows)
        g.rename(k, f"new_key.{i}")
        g.rename(v, f"new_value.{i}")
    inputs = [tensor_info("positions", [1, "w"], TensorProto.INT64), *slot_counts()]
    return _graph(g, *_attention_ports(spec, inputs, held, held), constants, repeats)


def exact_attention_graph(shape: AttentionShape, context: int, repeats: int) -> OperatorGraph:
    """The same in the exact kernel, the past being read only.

    Inputs: ``hidden`` [w, d], of which the width is taken, ``mask`` [w, slots] with
    slots = t + w, ``positions``, ``qkv.i`` and ``key.i``, ``value.i`` [kv_heads, t, hd]. Outputs:
    ``out.i``, ``new_key.i`` and ``new_value.i`` [kv_heads, w, hd].
    """
    spec = probe_spec(attention=shape, layers=repeats)
    t = Template(spec, Format.F32, context, AttentionKernel.EXACT)
    g = Nodes("attention")
    constants = t.constants | rotary_tables(spec, context)
    prologue(g)
    for i in range(repeats):
        layer = f"layers.{i}"
        grid = np.full(spec.kv_dim, 2.0**12, np.float32)
        constants[f"{layer}.value_grid"] = grid
        constants[f"{layer}.value_ungrid"] = np.resize(1 / grid, spec.heads * spec.head_dim)
        q, k, v = split_heads(g, f"qkv.{i}", layer, t)
        g.named(f"out.{i}", "Identity", attend(g, q, k, v, i, t))
        g.named(f"new_key.{i}", "Identity", k)
        g.named(f"new_value.{i}", "Identity", v)
    past, new = ([spec.kv_heads, rows, spec.head_dim] for rows in ("t", "w"))
    inputs = [
        tensor_info("hidden", ["w", spec.hidden]),
        tensor_info("positions", [1, "w"], TensorProto.INT64),
        tensor_info("mask", ["w", "slots"]),
    ]
    return _graph(g, *_attention_ports(spec, inputs, past, new), constants, repeats)


def _attention_ports(
    spec: ModelSpec, inputs: Sequence[Any], past: list[Any], new: list[Any]
) -> tuple[list[Any], list[Any]]:
    """``inputs`` and those of each layer, then the outputs."""
    inputs, outputs, q_dim = list(inputs), list[Any](), spec.heads * spec.head_dim
    for i in range(spec.layers):
        inputs.append(tensor_info(f"qkv.{i}", ["w", q_dim + 2 * spec.kv_dim]))
        inputs += [tensor_info(f"{kind}.{i}", past) for kind in ("key", "value")]
        outputs.append(tensor_info(f"out.{i}", ["w", q_dim]))
        outputs += [tensor_info(f"new_{kind}.{i}", new) for kind in ("key", "value")]
    return inputs, outputs


def glue_graph(shape: GlueShape, pairs: int) -> OperatorGraph:
    """What remains of ``2 * pairs`` sub-layers, attention and MLP in turn, each behind its switch.

    Attention keeps norm and residual, the MLP its activation besides. The residual adds the normed
    row, since there is no product. Inputs: ``hidden`` [w, d], ``both.i`` [w, 2 n] (gate and up of
    an MLP of ``INTERMEDIATE_PER_HIDDEN``), ``on.s`` bool scalars. Outputs: ``hidden_out`` [w, d],
    ``gated.i`` [w, n].
    """
    spec = probe_spec(hidden=shape.hidden, layers=pairs)
    g, constants = Nodes("glue"), {}
    inputs = [tensor_info("hidden", ["w", spec.hidden])]
    outputs = [tensor_info("hidden_out", ["w", spec.hidden])]
    x = "hidden"
    for sub_layer in range(2 * pairs):
        constants[f"norm.{sub_layer}"] = np.ones(spec.hidden, np.float32)
        inputs.append(tensor_info(f"on.{sub_layer}", [], TensorProto.BOOL))
        inner = Nodes(f"sub_layer.{sub_layer}")
        after = f"sub_layer.{sub_layer}.hidden"
        results = {after: inner("Add", x, norm(inner, x, f"norm.{sub_layer}", spec))}
        otherwise = [x]
        if sub_layer % 2:
            i = sub_layer // 2
            inputs.append(tensor_info(f"both.{i}", ["w", 2 * spec.intermediate]))
            outputs.append(tensor_info(f"gated.{i}", ["w", spec.intermediate]))
            results[f"gated.{i}"] = gated(inner, f"both.{i}")
            otherwise.append(f"both.{i}")
        switch(g, sub_layer, inner, results, otherwise)
        x = after
    g.named("hidden_out", "Identity", x)
    return _graph(g, inputs, outputs, constants, 2 * pairs)


def node_chain(nodes: int) -> OperatorGraph:
    """``nodes`` operators in a row that compute next to nothing: ``x`` [64] -> ``y`` [64]."""
    g = Nodes("chain")
    x = "x"
    for _ in range(nodes - 1):
        x = g("Sigmoid", x)
    g.named("y", "Sigmoid", x)
    return _graph(g, [tensor_info("x", [64])], [tensor_info("y", [64])], {}, nodes)


def probe_spec(
    *,
    layers: int,
    hidden: int = 64,
    attention: AttentionShape | None = None,
    vocab: int = 64,
    max_context: int = 4096,
) -> ModelSpec:
    """A model that exists only to be timed: its dimensions matter, its tokens do not."""
    shape = attention or AttentionShape(4, 2, 16)
    return ModelSpec(
        name="probe",
        architecture="llama",
        layers=layers,
        hidden=hidden,
        intermediate=round(hidden * INTERMEDIATE_PER_HIDDEN / 16) * 16,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=vocab,
        max_context=max_context,
        norm_eps=1e-5,
        rope=RopeSpec(theta=10_000.0),
        tied_head=False,
        tokenizer=TokenizerSpec(None, False, (), None, "0" * 64),
        weights_digest="0" * 64,
    )


def _matrices(shape: LinearShape, fmt: Format, count: int) -> Iterator[Array]:
    """``count`` different matrices [k, n], u8 as ``quantize_channels`` gives them or float32."""
    # of prime length, so that no matrix is a shifted copy of its neighbours row by row
    steps = np.random.default_rng(0).integers(1, 256, 65_521, np.uint8)
    stored = np.resize(steps, (count, shape.k, shape.n))
    if fmt is not Format.F32:
        yield from stored
        return
    for matrix in stored:
        yield (matrix.astype(np.float32) - ZERO_POINT) / np.float32(64 * math.sqrt(shape.k))


def _graph(
    g: Nodes,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    constants: Mapping[str, Array],
    repeats: int,
) -> OperatorGraph:
    inside = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    model = onnx_model(g.scope, g, inputs, outputs, inside, [])
    return OperatorGraph(model.SerializeToString(deterministic=True), repeats)
