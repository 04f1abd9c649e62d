"""The words that every part of Fulcrum shares: formats, processors, operators, provenance, ids."""

from enum import StrEnum
from typing import NewType

LayerId = NewType("LayerId", int)
"""A decoder layer, 0 .. L-1."""

SubLayerId = NewType("SubLayerId", int)
"""A residual block, 0 .. 2L-1: attention of layer i is 2i, its MLP 2i+1 (KnapSpec, section 3)."""

NodeId = NewType("NodeId", int)
"""A node of a token tree, 0 being the root."""


class SubLayerKind(StrEnum):
    """What a residual block computes."""

    ATTENTION = "attention"
    MLP = "mlp"


class Format(StrEnum):
    """Number format of a sub-layer: bits of its weights (w) and of its activations (a)."""

    F32 = "f32"
    W8A16 = "w8a16"
    W8A8 = "w8a8"
    W4 = "w4"
    """4-bit weights in blocks, each with a scale; what a file stores in more bits has 8."""
    W8 = "w8"
    """8-bit weights in blocks: how parts of a ``w4`` model are stored. Not a format of a model."""


TARGET_FORMATS = (Format.W8A16, Format.W8A8, Format.W4, Format.F32)
"""Formats that a model, or a part of it, can be compiled to."""


class AttentionKernel(StrEnum):
    """How attention sums; passes agree bit by bit only within one kernel."""

    FUSED = "fused"
    """One operator with keys and values in place: equal for chains, in passes of two rows or more.
    A single row is summed by a kernel of its own."""
    EXACT = "exact"
    """Sums of integers: equal for trees, gaps and any width."""


class ProcessorKind(StrEnum):
    """Where an operator can run."""

    CPU = "cpu"
    NPU = "npu"


class Operator(StrEnum):
    """What a device profile prices.

    ``LINEAR`` is a matrix product with constant weights and includes quantising its input and
    scaling its output; ``ATTENTION`` is everything between the QKV and the output product;
    ``GLUE`` is what remains of a sub-layer (norm, rotary embedding, residual, activation).
    ``EXACT_ATTENTION`` is ``ATTENTION`` in the kernel that serves trees, ``STREAMED_LINEAR`` a
    ``LINEAR`` whose weights have just been read from flash.
    """

    LINEAR = "linear"
    ATTENTION = "attention"
    GLUE = "glue"
    EXACT_ATTENTION = "exact_attention"
    STREAMED_LINEAR = "streamed_linear"


class Provenance(StrEnum):
    """Where a number comes from; the first four are sources, the last two are ways to derive."""

    MEASURED = "measured"
    PAPER = "paper"
    DERIVED = "derived"
    ASSUMED = "assumed"
    INTERPOLATED = "interpolated"
    ROOFLINE = "roofline"


def sub_layer_id(layer: LayerId, kind: SubLayerKind) -> SubLayerId:
    """The sub-layer of ``layer`` that computes ``kind``."""
    return SubLayerId(2 * layer + (kind is SubLayerKind.MLP))


def layer_of(sub_layer: SubLayerId) -> LayerId:
    """The layer that ``sub_layer`` belongs to."""
    return LayerId(sub_layer // 2)


def kind_of(sub_layer: SubLayerId) -> SubLayerKind:
    """Whether ``sub_layer`` is an attention or an MLP."""
    return SubLayerKind.MLP if sub_layer % 2 else SubLayerKind.ATTENTION
