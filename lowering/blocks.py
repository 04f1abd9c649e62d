"""Weights in small blocks, each with a scale of its own: a GGUF's quants taken over as they are.

A weight is ``scale * (step - middle) + offset``. Steps have 4 or 8 bits; 5- and 6-bit quants lie in
8-bit steps, so nothing is requantised. ``offset`` is there for the types that store a minimum.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from lowering.source import PackedTensor

Array = np.ndarray[Any, Any]

FLOAT_BLOCK = 32
"""Block of a tensor that its file stores in plain floats."""


class Blocks(msgspec.Struct, frozen=True):
    """A matrix [out, in] whose rows are cut into blocks along the input."""

    bits: int
    """4 or 8."""
    size: int
    """Weights of a block."""
    steps: Array
    """[out, in] uint8."""
    scale: Array
    """[out, in / size] float32."""
    offset: Array | None
    """[out, in / size] float32, added to every weight of the block; None for symmetric blocks."""

    @property
    def kind(self) -> tuple[int, int, bool]:
        """What two matrices must share to be stacked."""
        return self.bits, self.size, self.offset is not None

    @property
    def middle(self) -> int:
        """The step that stands for zero."""
        return 1 << (self.bits - 1)

    @property
    def finite(self) -> bool:
        """No scale and no offset is infinite or NaN."""
        with np.errstate(over="ignore", invalid="ignore"):
            total = self.scale.sum() + (0 if self.offset is None else self.offset.sum())
        return bool(np.isfinite(total))

    def packed_steps(self) -> Array:
        """[out, in / size, size * bits / 8] uint8, the lower half-byte first."""
        out, features = self.steps.shape
        steps = self.steps
        if self.bits == 4:
            steps = steps[:, 0::2] | (steps[:, 1::2] << 4)
        return steps.reshape(out, features // self.size, -1)

    def dequantize(self) -> Array:
        """[out, in] float32."""
        out, features = self.steps.shape
        steps = self.steps.reshape(out, -1, self.size).astype(np.float32) - self.middle
        weights = steps * self.scale[..., None]
        if self.offset is not None:
            weights += self.offset[..., None]
        return weights.reshape(out, features)


def stacked(parts: Sequence[Blocks]) -> Blocks:
    """Matrices of one kind on top of each other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return Blocks(
        first.bits,
        first.size,
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate([part.offset for part in parts if part.offset is not None])
        if first.offset is not None
        else None,
    )


def from_floats(weight: Array, bits: int) -> Blocks:
    """``weight`` [out, in] rounded to ``bits``: 4 between each block's ends, 8 around zero."""
    blocks = weight.reshape(len(weight), -1, FLOAT_BLOCK)
    if bits == 8:
        scale = np.abs(blocks).max(-1) / 127
        return Blocks(8, FLOAT_BLOCK, _rounded(blocks, scale, 128, 255), scale, None)
    low = blocks.min(-1)
    scale = (blocks.max(-1) - low) / 15
    steps = _rounded(blocks - low[..., None], scale, 0, 15)
    return Blocks(4, FLOAT_BLOCK, steps, scale, low + 8 * scale)


def _rounded(blocks: Array, scale: Array, middle: int, most: int) -> Array:
    """Steps [out, in] uint8 of ``blocks`` [out, n, size]."""
    safe = np.where(scale > 0, scale, np.float32(1))[..., None]
    steps = np.rint(blocks / safe) + middle
    return steps.clip(0, most).astype(np.uint8).reshape(blocks.shape[0], -1)


def from_packed(packed: PackedTensor) -> Blocks | None:
    """The quants of a GGUF tensor, not requantised; None for a type that is not listed here."""
    if packed.type_name not in _READERS:
        return None
    width, reader = _READERS[packed.type_name]
    out = packed.rows.shape[0]
    return reader(packed.rows.reshape(out, -1, width))


def _half(data: Array) -> Array:
    """float16 bytes [out, n, 2] as float32 [out, n]."""
    return np.ascontiguousarray(data).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(data: Array) -> Array:
    """Bytes [.., n]: all lower halves, then all upper halves [.., 2n]."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _bits(data: Array) -> Array:
    """Bytes [.., n] as bits [.., 8 n], the least significant first."""
    return np.unpackbits(data, axis=-1, bitorder="little")


def _blocks(bits: int, size: int, steps: Array, scale: Array, offset: Array | None) -> Blocks:
    out = steps.shape[0]
    return Blocks(
        bits,
        size,
        np.ascontiguousarray(steps.reshape(out, -1), np.uint8),
        np.ascontiguousarray(scale.reshape(out, -1), np.float32),
        None if offset is None else np.ascontiguousarray(offset.reshape(out, -1), np.float32),
    )


def _q4_0(b: Array) -> Blocks:
    return _blocks(4, 32, _nibbles(b[..., 2:]), _half(b[..., :2]), None)


def _q4_1(b: Array) -> Blocks:
    scale, low = _half(b[..., :2]), _half(b[..., 2:4])
    return _blocks(4, 32, _nibbles(b[..., 4:]), scale, low + 8 * scale)


def _q5_0(b: Array) -> Blocks:
    steps = _nibbles(b[..., 6:]) + 16 * _bits(b[..., 2:6])
    return _blocks(8, 32, steps + 112, _half(b[..., :2]), None)


def _q5_1(b: Array) -> Blocks:
    scale, low = _half(b[..., :2]), _half(b[..., 2:4])
    steps = _nibbles(b[..., 8:]) + 16 * _bits(b[..., 4:8])
    return _blocks(8, 32, steps + 112, scale, low + 16 * scale)


def _q8_0(b: Array) -> Blocks:
    steps = b[..., 2:] ^ 128
    return _blocks(8, 32, steps, _half(b[..., :2]), None)


def _k_scales(data: Array) -> tuple[Array, Array]:
    """Six-bit scales and minima [out, n, 8] from 12 bytes [out, n, 12] of a K-type."""
    first, second, mixed = data[..., :4], data[..., 4:8], data[..., 8:]
    scale = np.concatenate([first & 63, (mixed & 15) | (first >> 6 << 4)], axis=-1)
    low = np.concatenate([second & 63, (mixed >> 4) | (second >> 6 << 4)], axis=-1)
    return scale.astype(np.float32), low.astype(np.float32)


def _k_ends(b: Array) -> tuple[Array, Array]:
    """Scale and minimum [out, n, 8] of the sub-blocks of a Q4_K or Q5_K block."""
    scale, low = _k_scales(b[..., 4:16])
    return _half(b[..., :2])[..., None] * scale, -_half(b[..., 2:4])[..., None] * low


def _k_nibbles(data: Array) -> Array:
    """128 bytes [out, n, 128]: each 32 of them hold one sub-block below and the next above."""
    pairs = data.reshape(*data.shape[:2], 4, 32)
    return np.stack([pairs & 15, pairs >> 4], axis=3).reshape(*data.shape[:2], 8, 32)


def _q4_k(b: Array) -> Blocks:
    scale, low = _k_ends(b)
    return _blocks(4, 32, _k_nibbles(b[..., 16:]), scale, low + 8 * scale)


def _q5_k(b: Array) -> Blocks:
    scale, low = _k_ends(b)
    high = _bits(b[..., 16:48, None])  # [out, n, 32 positions, 8 sub-blocks]
    steps = _k_nibbles(b[..., 48:]) + 16 * high.swapaxes(-1, -2)
    return _blocks(8, 32, steps + 112, scale, low + 16 * scale)


def _q6_k(b: Array) -> Blocks:
    low = b[..., :128].reshape(*b.shape[:2], 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    high = b[..., 128:192].reshape(*b.shape[:2], 2, 1, 32)
    high = high >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    steps = low.reshape(*b.shape[:2], 2, 4, 32) | (high << 4)
    scales = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(np.float32)
    return _blocks(8, 16, steps + 96, _half(b[..., 208:])[..., None] * scales, None)


_READERS: Mapping[str, tuple[int, Callable[[Array], Blocks]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block and its reader, by GGUF's name of the type (ggml's block layouts)."""
