"""Stretched rotary embeddings as what each pair's frequency is divided by."""

import math

import msgspec

from runtime.model_spec import RopeSpec


class Llama3Scaling(msgspec.Struct, frozen=True):
    """How Llama 3.1 stretches its rotation to longer contexts."""

    factor: float
    """What the slowest pairs are slowed by."""
    low_freq_factor: float
    """Pairs that turn at most this often in the original context are slowed by ``factor``."""
    high_freq_factor: float
    """Pairs that turn at least this often in the original context stay as they are."""
    original_context: int
    """Positions that the model was first trained for."""


def linear_factors(head_dim: int, factor: float) -> tuple[float, ...]:
    """Every pair slowed by ``factor``: positions are interpolated."""
    return (factor,) * (head_dim // 2)


def llama3_factors(theta: float, head_dim: int, scaling: Llama3Scaling) -> tuple[float, ...]:
    """Slow pairs slowed, fast ones kept, those between slowed in part."""
    factors: list[float] = []
    for frequency in RopeSpec(theta).frequencies(head_dim):
        turns = scaling.original_context * frequency / (2 * math.pi)
        if turns < scaling.low_freq_factor:
            factors.append(scaling.factor)
        elif turns > scaling.high_freq_factor:
            factors.append(1.0)
        else:
            span = scaling.high_freq_factor - scaling.low_freq_factor
            kept = (turns - scaling.low_freq_factor) / span
            factors.append(1 / ((1 - kept) / scaling.factor + kept))
    return tuple(factors)
