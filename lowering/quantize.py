"""Weights and activations in the plan's number formats, and their torch reference.

``w8``: weights are bytes around 128 with one scale per output channel. ``a8``: a row of activations
is divided by its largest magnitude and rounded to 127 steps a side. ``a16``: what that rounding
left over is rounded again, 256 times finer, to a second byte row; both rows go through one integer
product and are summed after. Every product is exact in 32-bit integers and every scale belongs to
one row or one channel, so a row's result does not depend on the rows that share its pass.
"""

from typing import TYPE_CHECKING

import numpy as np

from profiles.words import Format

if TYPE_CHECKING:
    import torch

ZERO_POINT = 128
STEPS = 127
SMALLEST_ROW = np.float32(1e-30)
"""Keeps an all-zero row from dividing by zero."""

Array = np.ndarray


def quantize_channels(weight: Array) -> tuple[Array, Array]:
    """8-bit weights per output channel.

    ``weight`` [out, in] float32 -> (bytes [in, out] uint8 around 128, scale [out] float32) with
    ``weight.T ~ (bytes - 128) * scale``. Bytes lie in 1 .. 255.
    """
    largest = np.abs(weight).max(axis=1)
    scale = (np.maximum(largest, SMALLEST_ROW) / STEPS).astype(np.float32)
    steps = np.rint(weight / scale[:, None]).clip(-STEPS, STEPS)
    return np.ascontiguousarray((steps + ZERO_POINT).astype(np.uint8).T), scale


def dequantize_channels(stored: Array, scale: Array) -> Array:
    """Inverse of ``quantize_channels``: [in, out] bytes and [out] scale -> [out, in] float32."""
    steps = stored.astype(np.float32) - np.float32(ZERO_POINT)
    return np.ascontiguousarray((steps * scale).T)


def linear_reference(x: "torch.Tensor", stored: Array, scale: Array, fmt: Format) -> "torch.Tensor":
    """The integer product of ``w8a16`` and ``w8a8`` in torch, step by step as the graphs do it.

    ``x`` [w, in] float32, ``stored`` [in, out] uint8, ``scale`` [out] -> [w, out] float32.
    """
    import torch

    weight = torch.from_numpy(np.ascontiguousarray(stored)).to(torch.float64) - ZERO_POINT
    channel = torch.from_numpy(np.ascontiguousarray(scale)) * float(np.float32(1 / STEPS))
    largest = x.abs().amax(dim=-1, keepdim=True).clamp_min(float(SMALLEST_ROW))
    unit = x / largest
    high = (unit * STEPS).round().clamp(-ZERO_POINT, STEPS)
    # Byte products summed in float64 are exact: fewer than 2**53 / 2**14 terms.
    y = (high.double() @ weight).float() * channel
    if fmt is Format.W8A16:
        rest = unit - high * float(np.float32(1 / STEPS))
        low = (rest * (STEPS * 256)).round().clamp(-ZERO_POINT, STEPS)
        y = y + (low.double() @ weight).float() * channel / 256
    return y * largest
