"""ONNX nodes of a sub-layer apart from attention: products with weights, norm, activation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lowering.onnx_nodes import CONTRIB, Constant, Nodes
from lowering.quantize import SMALLEST_ROW, STEPS, ZERO_POINT
from profiles.words import Format, SubLayerKind
from runtime.model_spec import ModelSpec
from runtime.plan import TensorRef

if TYPE_CHECKING:
    from lowering.template import Template

OFFSET_BLOCK = 32
"""Weights that share an offset, in every type that has one."""
PART_KINDS = {
    **dict.fromkeys(("q", "k", "v", "o"), SubLayerKind.ATTENTION),
    **dict.fromkeys(("gate", "up", "down"), SubLayerKind.MLP),
    "head": None,
}
"""Where a matrix belongs, by its short name."""
INTEGER_ACCURACY = 4
"""``MatMulNBits`` rounds activations to bytes by block and multiplies integers."""


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


def product(g: Nodes, x: str, prefix: str, parts: Sequence[str], t: "Template") -> str:
    """``x`` times the matrices ``parts`` of a sub-layer, which may be stored as one or as several.

    Several where their blocks are of several kinds (``lowering.flash_image``).
    """
    whole = product_name(prefix, parts)
    fmt = t.formats.of(PART_KINDS[parts[0]])
    if fmt is not Format.W4:
        return linear(g, x, whole, fmt)
    for first in range(len(parts), 0, -1):
        name = product_name(prefix, parts[:first])
        if name in t.tensors:
            y = block_linear(g, x, block_matrix(t.spec, t.tensors, name))
            rest = parts[first:]
            return g("Concat", y, product(g, x, prefix, rest, t), axis=-1) if rest else y
    raise KeyError(whole)


def product_name(prefix: str, parts: Iterable[str]) -> str:
    """``layers.0.`` and q, k, v -> ``layers.0.qkv``; gate, up -> ``layers.0.gate_up``."""
    short = list(parts)
    return prefix + ("" if all(len(part) == 1 for part in short) else "_").join(short)


def block_matrix(spec: ModelSpec, tensors: Mapping[str, TensorRef], name: str) -> BlockMatrix:
    """The stored matrix ``name`` [n, blocks, bytes of a block]."""
    short = name.rpartition(".")[2]
    k = {"o": spec.heads * spec.head_dim, "down": spec.intermediate}.get(short, spec.hidden)
    n, blocks, size_bytes = tensors[name].shape
    size = k // blocks
    return BlockMatrix(name, k, n, 8 * size_bytes // size, size, f"{name}.offset" in tensors)


def block_matrices(spec: ModelSpec, tensors: Iterable[TensorRef]) -> list[BlockMatrix]:
    """All matrices of a plan that are stored in blocks."""
    by_name = {tensor.name: tensor for tensor in tensors}
    return [block_matrix(spec, by_name, n) for n, t in by_name.items() if len(t.shape) == 3]


def norm(g: Nodes, x: str, weight: str, spec: ModelSpec) -> str:
    """RMS norm of ``x`` [w, d] with weights [d]."""
    return g("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=spec.norm_eps)


def gated(g: Nodes, both: str) -> str:
    """``both`` [w, 2 n], gate before up -> silu(gate) * up [w, n]."""
    gate, up = g.many("Split", 2, both, axis=-1, num_outputs=2)
    return g("Mul", g("Mul", gate, g("Sigmoid", gate)), up)
