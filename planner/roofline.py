"""The least time that an operator can take: bytes over bandwidth, or operations over peak.

It prices what no point of the profile encloses, and says how a known time scales to another size.
"""

from typing import NamedTuple

from profiles.profile import AttentionShape, GlueShape, LinearShape, Processor, Shape
from profiles.words import Format

WEIGHT_BYTES = {
    Format.F32: 4.0,
    Format.W8A16: 1.0,
    Format.W8A8: 1.0,
    Format.W4: 0.5625,
    Format.W8: 1.0625,
}
"""Bytes of one weight; w4 and w8 have blocks of 32 weights with a 16-bit scale."""

STATE_BYTES = {Format.F32: 4, Format.W8A16: 2, Format.W8A8: 1, Format.W4: 2, Format.W8: 2}
"""Bytes of one element of hidden state, key or value, by the format that computes it."""

ROWS_PER_TOKEN = {Format.F32: 1, Format.W8A16: 2, Format.W8A8: 1, Format.W4: 1, Format.W8: 1}
"""Rows of a linear product; w8a16 multiplies the high and the low byte of its activations."""

_GLUE_PASSES = 10
"""Reads and writes of a hidden row by norm, rotary embedding, residual and activation."""

_SOFTMAX_OPS = 8
"""Operations of mask, exponential, sum and division per score."""


class Roofline(NamedTuple):
    """Time of one operator in microseconds, by part."""

    moving_us: float
    """Reading weights or keys and values."""
    computing_us: float
    launch_us: float

    @property
    def us(self) -> float:
        """The slower of moving and computing, which overlap, after the launch."""
        return max(self.moving_us, self.computing_us) + self.launch_us

    @property
    def bound(self) -> str:
        """What limits it, in a word."""
        return "memory" if self.moving_us >= self.computing_us else "compute"


def roofline(
    processor: Processor, shape: Shape, fmt: Format, width: int, context: int = 0
) -> Roofline:
    """The roofline of one operator at ``width`` tokens, padding included."""
    moved_bytes = _bytes(shape, fmt, width, context)
    operations = _operations(shape, fmt, width, context)
    return Roofline(
        moving_us=moved_bytes / processor.bandwidth_bytes_per_s.value * 1e6,
        computing_us=operations / processor.peak_ops_per_s[fmt].value * 1e6,
        launch_us=processor.launch_us.value,
    )


def _bytes(shape: Shape, fmt: Format, width: int, context: int) -> float:
    match shape:
        case LinearShape(k=k, n=n):
            return k * n * WEIGHT_BYTES[fmt]
        case AttentionShape(kv_heads=kv_heads, head_dim=head_dim):
            return 2 * kv_heads * head_dim * context * STATE_BYTES[fmt]
        case GlueShape(hidden=hidden):
            return _GLUE_PASSES * hidden * width * STATE_BYTES[fmt]


def _operations(shape: Shape, fmt: Format, width: int, context: int) -> float:
    match shape:
        case LinearShape(k=k, n=n):
            return 2 * k * n * width * ROWS_PER_TOKEN[fmt]
        case AttentionShape(heads=heads, head_dim=head_dim):
            return heads * width * context * (4 * head_dim + _SOFTMAX_OPS)
        case GlueShape(hidden=hidden):
            return _GLUE_PASSES * hidden * width
