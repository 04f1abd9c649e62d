"""Where the bytes of each sub-layer lie in ``weights.bin``, which is in execution order."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from profiles.words import Format, LayerId, SubLayerId, SubLayerKind, sub_layer_id
from runtime.plan import ALIGNMENT_BYTES, TensorRef, TensorType

Array = np.ndarray[Any, Any]

DTYPES = {TensorType.F32: np.dtype("<f4"), TensorType.U8: np.dtype("u1")}
STREAMED_FORMATS = (Format.W8A16, Format.W8A8)
"""Of a streamed sub-layer: products of integers give the same bits with weights as inputs. Blocks
of 4 bits take seconds as inputs, since they are packed anew for each pass; sums of floats differ
from those with packed constants."""
_MLP_PARTS = frozenset({"mlp_norm", "gate_up", "gate", "up", "down"})


class PartRef(NamedTuple):
    """A tensor of a sub-layer."""

    name: str
    """Without the layer, such as ``qkv.scale``."""
    at_bytes: int
    """From the sub-layer's first byte."""
    tensor: TensorRef

    def view(self, sub_layer: Array) -> Array:
        """The tensor in the sub-layer's bytes [n] uint8."""
        piece = sub_layer[self.at_bytes : self.at_bytes + self.tensor.size_bytes]
        return piece.view(DTYPES[self.tensor.type]).reshape(self.tensor.shape)


class SubLayerBytes(NamedTuple):
    """The range of the weights file from a sub-layer's first tensor to its last one's end."""

    offset_bytes: int
    bytes: int
    parts: tuple[PartRef, ...]

    @property
    def end_bytes(self) -> int:
        """One past the last byte that is read: ranges are read in whole blocks."""
        return self.offset_bytes + aligned(self.bytes)

    @property
    def layout(self) -> tuple[tuple[object, ...], ...]:
        """What sub-layers must share to run from one place in memory."""
        parts = self.parts
        return tuple((p.name, p.at_bytes, p.tensor.type, p.tensor.shape) for p in parts)


def aligned(count: int) -> int:
    """``count`` bytes in whole blocks."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def split_name(tensor: str) -> tuple[SubLayerId, str] | None:
    """Sub-layer and part of a tensor's name: ``layers.3.qkv.scale`` -> (6, ``qkv.scale``).

    None for tensors of no sub-layer.
    """
    head, _, rest = tensor.partition(".")
    number, _, part = rest.partition(".")
    if head != "layers" or not part or not number.isascii() or not number.isdecimal():
        return None
    mlp = part.partition(".")[0] in _MLP_PARTS
    kind = SubLayerKind.MLP if mlp else SubLayerKind.ATTENTION
    return sub_layer_id(LayerId(int(number[:9])), kind), part


def sub_layer_bytes(tensors: Iterable[TensorRef]) -> dict[SubLayerId, SubLayerBytes]:
    """The range of each sub-layer that has tensors, parts in the order of the file."""
    found: dict[SubLayerId, list[tuple[str, TensorRef]]] = {}
    for tensor in sorted(tensors, key=lambda each: each.offset_bytes):
        if split := split_name(tensor.name):
            found.setdefault(split[0], []).append((split[1], tensor))
    return {sub_layer: _range(parts) for sub_layer, parts in sorted(found.items())}


def _range(parts: list[tuple[str, TensorRef]]) -> SubLayerBytes:
    first, last = parts[0][1], parts[-1][1]
    start = first.offset_bytes
    return SubLayerBytes(
        start,
        last.offset_bytes + last.size_bytes - start,
        tuple(PartRef(name, tensor.offset_bytes - start, tensor) for name, tensor in parts),
    )
