"""The operators that a plan's graphs are made of: all that ``lowering`` emits, and nothing else.

ONNX Runtime's kernels trust what the library checked before, and some do so too readily: a missing
input can end the process. So a node that is not of one of these forms never gets there. Whoever
emits another operator adds it here.
"""

from collections.abc import Set as AbstractSet
from typing import NamedTuple

CONTRIB = "com.microsoft"


class Form(NamedTuple):
    """How an operator may be used."""

    inputs: range
    """Numbers of inputs."""
    attributes: AbstractSet[str] = frozenset()
    may_lack: AbstractSet[int] = frozenset()
    """Inputs that may be left out."""


def _takes(least: int, most: int = 0, *attributes: str) -> Form:
    return Form(range(least, (most or least) + 1), frozenset(attributes))


OPERATORS = {
    ("", "Abs"): _takes(1),
    ("", "Add"): _takes(2),
    ("", "Cast"): _takes(1, 1, "to"),
    ("", "Clip"): _takes(3),
    ("", "Concat"): _takes(2, 8, "axis"),
    ("", "ConstantOfShape"): _takes(1, 1, "value"),
    ("", "DequantizeLinear"): _takes(3),
    ("", "Div"): _takes(2),
    ("", "Exp"): _takes(1),
    ("", "Gemm"): _takes(3),
    ("", "Identity"): _takes(1),
    ("", "If"): _takes(1, 1, "then_branch", "else_branch"),
    ("", "MatMul"): _takes(2),
    ("", "Max"): _takes(2),
    ("", "Mul"): _takes(2),
    ("", "QuantizeLinear"): _takes(3),
    ("", "ReduceMax"): _takes(2, 2, "keepdims"),
    ("", "ReduceSum"): _takes(2, 2, "keepdims"),
    ("", "Reshape"): _takes(2),
    ("", "Round"): _takes(1),
    ("", "Shape"): _takes(1, 1, "start", "end"),
    ("", "Sigmoid"): _takes(1),
    ("", "SimplifiedLayerNormalization"): _takes(2, 2, "axis", "epsilon"),
    ("", "Split"): _takes(1, 2, "axis", "num_outputs"),
    ("", "Sub"): _takes(2),
    ("", "Transpose"): _takes(1, 1, "perm"),
    ("", "Unsqueeze"): _takes(2),
    (CONTRIB, "FusedMatMul"): _takes(2, 2, "alpha", "transB"),
    (CONTRIB, "GroupQueryAttention"): Form(
        range(7, 12), frozenset({"num_heads", "kv_num_heads", "do_rotary"}), frozenset({1, 2})
    ),
    (CONTRIB, "MatMulIntegerToFloat"): _takes(6),
    (CONTRIB, "MatMulNBits"): _takes(3, 3, "K", "N", "bits", "block_size", "accuracy_level"),
    (CONTRIB, "RotaryEmbedding"): _takes(4, 4, "num_heads"),
}
"""(domain, operator) -> how it may be used."""
