"""Shapes and constants that all sub-layers of a compiled model share."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from lowering.linear_nodes import linear_constants
from lowering.onnx_nodes import Constant
from profiles.words import AttentionKernel, Format
from runtime.model_spec import ModelSpec
from runtime.plan import Formats, TensorRef, formats_of

VALUE_BITS = 21
"""Magnitude of a value on its channel's grid."""
EXACT_BITS = 52


def probability_bits(slots: int) -> int:
    """Bits of the probability grid so that a sum over ``slots`` values is exact in float64."""
    return min(20, EXACT_BITS - VALUE_BITS - math.ceil(math.log2(max(slots, 2))))


class Names(NamedTuple):
    """What one layer's tensors are called in a graph."""

    layer: str
    """Before the dot of each constant's name."""
    key: str
    value: str


def names_of(layer: int | None) -> Names:
    """Of a numbered layer, or of any one, whose constants are inputs (None)."""
    if layer is None:
        return Names("layer", "key", "value")
    return Names(f"layers.{layer}", f"key.{layer}", f"value.{layer}")


class Template:
    """Shapes and constants shared by all sub-layers of a model in one format."""

    def __init__(
        self,
        spec: ModelSpec,
        formats: Format | Formats,
        context: int,
        attention: AttentionKernel,
        tensors: Iterable[TensorRef] = (),
        biased: bool = False,
    ) -> None:
        self.spec = spec
        self.biased = biased
        self.formats = formats_of(formats)
        self.attention = attention
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.group = spec.heads // spec.kv_heads
        exact = attention is AttentionKernel.EXACT
        self.constants = self._exact(context) if exact else self._fused()
        if spec.qk_norm:
            self.constants["shape_heads"] = np.array(
                [-1, spec.heads + spec.kv_heads, spec.head_dim]
            )
            self.constants["unit_norm"] = np.ones(spec.head_dim, np.float32)
        for fmt in (self.formats.attention, self.formats.mlp):
            self.constants |= linear_constants(fmt)

    def initializers(self) -> list[onnx.TensorProto]:
        """The small constants, stored inside the graph."""
        return [numpy_helper.from_array(np.asarray(v), k) for k, v in self.constants.items()]

    def _exact(self, context: int) -> dict[str, Constant]:
        spec = self.spec
        kv, hd, q_dim = spec.kv_heads, spec.head_dim, spec.heads * spec.head_dim
        shift = probability_bits(context) * math.log(2)
        return {
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

    def _fused(self) -> dict[str, Constant]:
        spec = self.spec
        q_dim = spec.heads * spec.head_dim
        return {
            "split_qk_v": np.array([q_dim + spec.kv_dim, spec.kv_dim]),
            "shape_qk": np.array([-1, q_dim + spec.kv_dim]),
            "shape_qkv": np.array([1, -1, q_dim + 2 * spec.kv_dim]),
            "shape_out": np.array([-1, q_dim]),
        }
