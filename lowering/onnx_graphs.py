"""ONNX graphs of a plan, all built from one template of a sub-layer.

The ``layers`` graph is one pass: (hidden rows, switches, positions, mask, past keys and values) ->
(hidden rows, new keys and values). Every sub-layer sits behind an ``If``, so one session with one
copy of the weights serves every skip mask and every exit. The past is only read: what a pass
computed is written by the runtime when, and only if, it is committed.

Attention sums integers in float64: probabilities are rounded to a grid relative to the row's
largest, values to a grid per channel, and every sum stays under 2**53. It is then exact in any
order, hence equal bit by bit whatever the width, padding, gaps and split of the context
(``docs/numerics.md``).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lowering.quantize import SMALLEST_ROW, STEPS, ZERO_POINT
from profiles.words import Format
from runtime.model_spec import ModelSpec
from runtime.plan import WEIGHTS_FILE, TensorRef, TensorType

Constant = np.ndarray[Any, Any]

OPSET = 21
IR_VERSION = 10
CONTRIB = "com.microsoft"
VALUE_BITS = 21
"""Magnitude of a value on its channel's grid."""
EXACT_BITS = 52
OFFSET_BLOCK = 32
"""Weights that share an offset, in every type that has one."""
INTEGER_ACCURACY = 4
"""``MatMulNBits`` rounds activations to bytes by block and multiplies integers."""
ELEMENT = {TensorType.F32: TensorProto.FLOAT, TensorType.U8: TensorProto.UINT8}


def probability_bits(slots: int) -> int:
    """Bits of the probability grid so that a sum over ``slots`` values is exact in float64."""
    return min(20, EXACT_BITS - VALUE_BITS - math.ceil(math.log2(max(slots, 2))))


class Nodes:
    """Collects the nodes of one (sub)graph; names are ``scope/Op_index``, so bytes repeat."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.nodes: list[onnx.NodeProto] = []

    def __call__(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        return self.many(op, 1, *inputs, domain=domain, **attributes)[0]

    def many(
        self, op: str, outputs: int, *inputs: str, domain: str = "", **attributes: Any
    ) -> list[str]:
        name = f"{self.scope}/{op}_{len(self.nodes)}"
        names = [name] if outputs == 1 else [f"{name}.{i}" for i in range(outputs)]
        self.nodes.append(
            helper.make_node(op, list(inputs), names, name=name, domain=domain, **attributes)
        )
        return names

    def named(self, output: str, op: str, *inputs: str, **attributes: Any) -> None:
        """A node whose output name is given, to be seen from subgraphs or outside."""
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))


class Template:
    """Shapes and constants shared by all sub-layers of a model in one format."""

    def __init__(
        self, spec: ModelSpec, fmt: Format, context: int, tensors: Iterable[TensorRef] = ()
    ) -> None:
        self.spec = spec
        self.fmt = fmt
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.group = spec.heads // spec.kv_heads
        kv, hd, q_dim = spec.kv_heads, spec.head_dim, spec.heads * spec.head_dim
        shift = probability_bits(context) * math.log(2)
        self.constants: dict[str, Constant] = {
            "grid_shift": np.array(shift, np.float32),
            "value_low": np.array(-(1 << VALUE_BITS), np.float32),
            "value_high": np.array(1 << VALUE_BITS, np.float32),
            "last_axis": np.array([-1]),
            "mask_axes": np.array([0, 2]),
            "one_kv": np.array([kv]),
            "one_group": np.array([self.group]),
            "one_head_dim": np.array([hd]),
            "any": np.array([-1]),
            "split_qk_v": np.array([q_dim + spec.kv_dim, spec.kv_dim]),
            "split_q_k": np.array([q_dim, spec.kv_dim]),
            "shape_rotary": np.array([1, -1, q_dim + spec.kv_dim]),
            "shape_q": np.array([-1, kv, self.group * hd]),
            "shape_q_rows": np.array([kv, -1, hd]),
            "shape_kv": np.array([-1, kv, hd]),
            "shape_out_rows": np.array([kv, -1, self.group * hd]),
            "shape_out": np.array([-1, q_dim]),
        }
        if spec.qk_norm:
            self.constants["shape_heads"] = np.array([-1, spec.heads + kv, hd])
            self.constants["unit_norm"] = np.ones(hd, np.float32)
        self.constants |= linear_constants(fmt)

    def initializers(self) -> list[onnx.TensorProto]:
        """The small constants, stored inside the graph."""
        return [numpy_helper.from_array(np.asarray(v), k) for k, v in self.constants.items()]


def linear_constants(fmt: Format) -> dict[str, Constant]:
    """Constants that ``linear`` refers to."""
    if fmt is Format.F32:
        return {}
    if fmt is Format.W4:
        return {"by_block": np.array([0, -1, OFFSET_BLOCK]), "last_axis": np.array([-1])}
    constants: dict[str, Constant] = {
        "smallest": np.asarray(SMALLEST_ROW),
        "zero_point": np.array(ZERO_POINT, np.uint8),
        "step": np.array(1 / STEPS, np.float32),
        "last_axis": np.array([-1]),
    }
    if fmt is Format.W8A16:
        constants["fine_step"] = np.array(1 / (STEPS * 256), np.float32)
        constants["fine"] = np.array(1 / 256, np.float32)
    return constants


def linear(g: Nodes, x: str, weight: str, fmt: Format) -> str:
    """``x`` [w, in] times constant ``weight`` [in, out] in ``fmt`` (``lowering.quantize``)."""
    if fmt is Format.F32:
        return g("MatMul", x, weight)
    largest = g("Max", g("ReduceMax", g("Abs", x), "last_axis", keepdims=1), "smallest")
    unit = g("Div", x, largest)
    rows = high = g("QuantizeLinear", unit, "step", "zero_point")
    if fmt is Format.W8A16:
        rest = g("Sub", unit, g("DequantizeLinear", high, "step", "zero_point"))
        low = g("QuantizeLinear", rest, "fine_step", "zero_point")
        rows = g("Concat", high, low, axis=0)
    y = g(
        "MatMulIntegerToFloat",
        *(rows, weight, "step", f"{weight}.scale", "zero_point", "zero_point"),
        domain=CONTRIB,
    )
    if fmt is Format.W8A16:
        coarse, fine = g.many("Split", 2, y, axis=0, num_outputs=2)
        y = g("Add", coarse, g("Mul", fine, "fine"))
    return g("Mul", y, largest)


class BlockMatrix(NamedTuple):
    """A matrix of ``lowering.blocks`` as a graph sees it."""

    name: str
    k: int
    """Input features."""
    n: int
    bits: int
    size: int
    offset: bool
    """There is ``name.offset`` [k / size, n]."""


def block_linear(g: Nodes, x: str, weight: BlockMatrix) -> str:
    """``x`` [w, k] times ``weight``: each block of a row of ``x`` is rounded to bytes as well.

    The offsets, one for a block, meet the sum of the block's activations.
    """
    y = g(
        "MatMulNBits",
        *(x, weight.name, f"{weight.name}.scale"),
        domain=CONTRIB,
        K=weight.k,
        N=weight.n,
        bits=weight.bits,
        block_size=weight.size,
        accuracy_level=INTEGER_ACCURACY,
    )
    if not weight.offset:
        return y
    sums = g("ReduceSum", g("Reshape", x, "by_block"), "last_axis", keepdims=0)
    return g("Gemm", sums, f"{weight.name}.offset", y)


def product(g: Nodes, x: str, prefix: str, parts: Sequence[str], t: Template) -> str:
    """``x`` times the matrices ``parts`` of a sub-layer, which may be stored as one or as several.

    Several where their blocks are of several kinds (``lowering.flash_image``).
    """
    whole = product_name(prefix, parts)
    if t.fmt is not Format.W4:
        return linear(g, x, whole, t.fmt)
    for first in range(len(parts), 0, -1):
        name = product_name(prefix, parts[:first])
        if name in t.tensors:
            y = block_linear(g, x, block_matrix(t, name))
            rest = parts[first:]
            return g("Concat", y, product(g, x, prefix, rest, t), axis=-1) if rest else y
    raise KeyError(whole)


def product_name(prefix: str, parts: Iterable[str]) -> str:
    """``layers.0.`` and q, k, v -> ``layers.0.qkv``; gate, up -> ``layers.0.gate_up``."""
    short = list(parts)
    return prefix + ("" if all(len(part) == 1 for part in short) else "_").join(short)


def block_matrix(t: Template, name: str) -> BlockMatrix:
    """The stored matrix ``name`` [n, blocks, bytes of a block]."""
    short = name.rpartition(".")[2]
    spec = t.spec
    k = {"o": spec.heads * spec.head_dim, "down": spec.intermediate}.get(short, spec.hidden)
    n, blocks, size_bytes = t.tensors[name].shape
    size = k // blocks
    return BlockMatrix(name, k, n, 8 * size_bytes // size, size, f"{name}.offset" in t.tensors)


def norm(g: Nodes, x: str, weight: str, spec: ModelSpec) -> str:
    """RMS norm of ``x`` [w, d] with weights [d]."""
    return g("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=spec.norm_eps)


def split_heads(g: Nodes, qkv: str, layer: str, t: Template) -> tuple[str, str, str]:
    """``qkv`` [w, q_dim + 2 kv_dim] into heads, biased, normed, rotated, values on their grid.

    Queries [kv, w * group, hd], keys [kv, w, hd], values [kv, w, hd].
    """
    spec = t.spec
    if spec.qkv_bias:
        qkv = g("Add", qkv, f"{layer}.qkv_bias")
    qk, v = g.many("Split", 2, qkv, "split_qk_v", axis=-1)
    if spec.qk_norm:
        # Each head is a row of the norm; its weights differ between queries and keys
        qk = norm(g, g("Reshape", qk, "shape_heads"), "unit_norm", spec)
        qk = g("Mul", qk, f"{layer}.qk_norm")
    qk = g(
        "RotaryEmbedding",
        *(g("Reshape", qk, "shape_rotary"), "positions", "rope.cos", "rope.sin"),
        domain=CONTRIB,
        num_heads=spec.heads + spec.kv_heads,
    )
    q, k = g.many("Split", 2, qk, "split_q_k", axis=-1)
    q = g("Transpose", g("Reshape", q, "shape_q"), perm=[1, 0, 2])
    v = g("Round", g("Mul", v, f"{layer}.value_grid"))
    v = g("Clip", v, "value_low", "value_high")
    k, v = (g("Transpose", g("Reshape", r, "shape_kv"), perm=[1, 0, 2]) for r in (k, v))
    return g("Reshape", q, "shape_q_rows"), k, v


def attend(g: Nodes, q: str, k: str, v: str, layer: int, t: Template) -> str:
    """Attention of [kv, w * group, hd] queries over past and new rows -> [w, heads * hd]."""
    scale = 1 / math.sqrt(t.spec.head_dim)
    past, new = (
        g("FusedMatMul", q, keys, domain=CONTRIB, transB=1, alpha=scale)
        for keys in (f"key.{layer}", k)
    )
    scores = g("Add", g("Reshape", g("Concat", past, new, axis=-1), "shape_scores"), "mask_rows")
    largest = g("ReduceMax", scores, "last_axis", keepdims=1)
    grid = g("Exp", g("Sub", scores, g("Sub", largest, "grid_shift")))
    p = g("Cast", g("Round", grid), to=TensorProto.DOUBLE)
    total = g("ReduceSum", p, "last_axis", keepdims=1)
    p_past, p_new = g.many("Split", 2, g("Reshape", p, "shape_p"), "split_context", axis=-1)
    v_past, v_new = (g("Cast", rows, to=TensorProto.DOUBLE) for rows in (f"value.{layer}", v))
    summed = g("Add", g("MatMul", p_past, v_past), g("MatMul", p_new, v_new))
    mean = g("Div", g("Reshape", summed, "shape_summed"), total)
    rows = g("Reshape", g("Cast", mean, to=TensorProto.FLOAT), "shape_out_rows")
    rows = g("Reshape", g("Transpose", rows, perm=[1, 0, 2]), "shape_out")
    return g("Mul", rows, f"layers.{layer}.value_ungrid")


def _attention(g: Nodes, x: str, layer: int, t: Template) -> tuple[str, str, str]:
    name = f"layers.{layer}"
    qkv = product(g, norm(g, x, f"{name}.attn_norm", t.spec), f"{name}.", ("q", "k", "v"), t)
    q, k, v = split_heads(g, qkv, name, t)
    out = product(g, attend(g, q, k, v, layer, t), f"{name}.", ("o",), t)
    return g("Add", x, out), k, v


def gated(g: Nodes, both: str) -> str:
    """``both`` [w, 2 n], gate before up -> silu(gate) * up [w, n]."""
    gate, up = g.many("Split", 2, both, axis=-1, num_outputs=2)
    return g("Mul", g("Mul", gate, g("Sigmoid", gate)), up)


def _mlp(g: Nodes, x: str, layer: int, t: Template) -> str:
    name = f"layers.{layer}"
    normed = norm(g, x, f"{name}.mlp_norm", t.spec)
    both = product(g, normed, f"{name}.", ("gate", "up"), t)
    return g("Add", x, product(g, gated(g, both), f"{name}.", ("down",), t))


def tensor_info(name: str, shape: Sequence[str | int], kind: int = TensorProto.FLOAT) -> Any:
    """The declaration of an input or output; dimensions are numbers or names."""
    return helper.make_tensor_value_info(name, kind, shape)


def switch(
    g: Nodes, sub_layer: int, inner: Nodes, computed: dict[str, str], otherwise: Sequence[str]
) -> None:
    """``If(on.N)``: ``computed`` (output name -> value in ``inner``), else ``otherwise``."""
    then = helper.make_graph(
        inner.nodes, f"{inner.scope}.on", [], [_untyped(n) for n in computed.values()]
    )
    through = Nodes(f"{inner.scope}.off")
    passed = [through("Identity", name) for name in otherwise]
    other = helper.make_graph(
        through.nodes, f"{inner.scope}.off", [], [_untyped(n) for n in passed]
    )
    g.nodes.append(
        helper.make_node(
            *("If", [f"on.{sub_layer}"], list(computed)),
            name=f"{inner.scope}.if",
            then_branch=then,
            else_branch=other,
        )
    )


def _untyped(name: str) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def prologue(g: Nodes) -> str:
    """Shapes that depend on width and context, once a pass; returns zero rows [kv, w, hd]."""
    width = g("Shape", "hidden", start=0, end=1)
    slots = g("Shape", "mask", start=1, end=2)
    g.named("shape_scores", "Concat", "one_kv", width, "one_group", slots, axis=0)
    g.named("shape_p", "Concat", "one_kv", "any", slots, axis=0)
    g.named("shape_summed", "Concat", "one_kv", width, "one_group", "one_head_dim", axis=0)
    g.named("split_context", "Concat", g("Sub", slots, width), width, axis=0)
    g.named("mask_rows", "Unsqueeze", "mask", "mask_axes")
    shape = g("Concat", "one_kv", width, "one_head_dim", axis=0)
    return g("ConstantOfShape", shape)


def layers_graph(
    spec: ModelSpec, fmt: Format, context: int, tensors: Sequence[TensorRef]
) -> onnx.ModelProto:
    """All sub-layers as one pass.

    Inputs: ``hidden`` [w, d] f32, ``positions`` [1, w] int64, ``mask`` [w, t + w] f32 (0 where a
    row may look, -1e30 where not; the last w columns are the pass's own rows), ``key.L`` and
    ``value.L`` [kv, t, hd] f32, ``on.S`` bool scalars. Outputs: ``hidden_out`` [w, d],
    ``new_key.L`` and ``new_value.L`` [kv, w, hd]; zeros where the attention is off.
    """
    t = Template(spec, fmt, context, tensors)
    g = Nodes("pass")
    zeros = prologue(g)
    kv, hd = spec.kv_heads, spec.head_dim
    inputs = [
        tensor_info("hidden", ["w", spec.hidden]),
        tensor_info("positions", [1, "w"], TensorProto.INT64),
        tensor_info("mask", ["w", "slots"]),
    ]
    outputs = [tensor_info("hidden_out", ["w", spec.hidden])]
    x = "hidden"
    for layer in range(spec.layers):
        for kind in ("key", "value"):
            inputs.append(tensor_info(f"{kind}.{layer}", [kv, "t", hd]))
            outputs.append(tensor_info(f"new_{kind}.{layer}", [kv, "w", hd]))
        inputs += [tensor_info(f"on.{2 * layer + i}", [], TensorProto.BOOL) for i in (0, 1)]
        inner = Nodes(f"attention.{layer}")
        y, k, v = _attention(inner, x, layer, t)
        after = f"attention.{layer}.hidden"
        results = {after: y, f"new_key.{layer}": k, f"new_value.{layer}": v}
        switch(g, 2 * layer, inner, results, (x, zeros, zeros))
        inner = Nodes(f"mlp.{layer}")
        y, x = _mlp(inner, after, layer, t), f"mlp.{layer}.hidden"
        switch(g, 2 * layer + 1, inner, {x: y}, (after,))
    g.named("hidden_out", "Identity", x)
    return onnx_model("layers", g, inputs, outputs, t.initializers(), tensors)


def head_graph(spec: ModelSpec, fmt: Format, tensors: Sequence[TensorRef]) -> onnx.ModelProto:
    """Final norm and LM head: ``hidden`` [w, d] -> ``logits`` [w, vocab], float32."""
    g, t = Nodes("head"), Template(spec, fmt, 1, tensors)
    y = product(g, norm(g, "hidden", "final_norm", spec), "", ("head",), t)
    g.named("logits", "Identity", y)
    constants = [
        numpy_helper.from_array(np.asarray(v), k) for k, v in linear_constants(fmt).items()
    ]
    inputs = [tensor_info("hidden", ["w", spec.hidden])]
    return onnx_model(
        "head", g, inputs, [tensor_info("logits", ["w", spec.vocab])], constants, tensors
    )


def onnx_model(
    name: str,
    g: Nodes,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    constants: Sequence[onnx.TensorProto],
    tensors: Sequence[TensorRef],
) -> onnx.ModelProto:
    """The graph of ``g``; ``constants`` lie inside it, ``tensors`` in the plan's weights file."""
    external = [external_tensor(tensor) for tensor in tensors]
    graph = helper.make_graph(g.nodes, name, inputs, outputs, [*constants, *external])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="fulcrum")
    model.ir_version = IR_VERSION
    return model


def external_tensor(tensor: TensorRef) -> onnx.TensorProto:
    """An initializer that points into the plan's ``weights.bin``."""
    proto = TensorProto(name=tensor.name, data_type=ELEMENT[tensor.type], dims=tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    size = math.prod(tensor.shape) * (4 if tensor.type is TensorType.F32 else 1)
    facts = {"location": WEIGHTS_FILE, "offset": tensor.offset_bytes, "length": size}
    for key, value in facts.items():
        proto.external_data.add(key=key, value=str(value))
    return proto
