"""Weights in blocks: a GGUF's quants are taken over without a change."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lowering.blocks import from_floats, from_packed, stacked
from lowering.source import PackedTensor

BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 8, "Q5_1": 8, "Q8_0": 8, "Q4_K": 4, "Q5_K": 8, "Q6_K": 8}
HALVES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}
"""Where a block's float16 numbers begin; at 0 and 2 in the other types."""


def random_blocks(name: str, seed: int, out: int = 3, blocks: int = 2) -> PackedTensor:
    size, size_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    random = np.random.default_rng(seed)
    rows = random.integers(0, 256, (out, blocks, size_bytes), np.uint8)
    for place in HALVES.get(name, (0, 2)):
        halves = random.normal(0, 0.1, (out, blocks, 1)).astype(np.float16)
        rows[..., place : place + 2] = halves.view(np.uint8)
    return PackedTensor(name, rows.reshape(out, -1), size * blocks)


@pytest.mark.parametrize("name", BITS)
@given(seed=st.integers(0, 2**32))
def test_blocks_hold_exactly_the_numbers_of_the_file(name: str, seed: int) -> None:
    packed = random_blocks(name, seed)
    blocks = from_packed(packed)
    assert blocks is not None
    assert blocks.bits == BITS[name]
    expected = dequantize(packed.rows, GGMLQuantizationType[name])
    found = blocks.dequantize()
    # An offset is the minimum plus half the range: one rounding each way
    rounding = 4e-7 * np.abs(expected).max() if blocks.offset is not None else 0.0
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K"])
def test_packed_steps_unpack_to_the_steps(name: str) -> None:
    blocks = from_packed(random_blocks(name, 1))
    assert blocks is not None
    packed = blocks.packed_steps()
    if blocks.bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1)
    np.testing.assert_array_equal(packed.reshape(blocks.steps.shape), blocks.steps)


def test_types_without_a_reader_are_left_to_floats() -> None:
    assert from_packed(PackedTensor("Q3_K", np.zeros((1, 110), np.uint8), 256)) is None


def test_matrices_of_one_kind_are_stacked() -> None:
    parts = [from_packed(random_blocks("Q4_1", seed)) for seed in (1, 2)]
    both = [part for part in parts if part is not None]
    expected = np.concatenate([part.dequantize() for part in both])
    np.testing.assert_array_equal(stacked(both).dequantize(), expected)


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (8, 254)])
def test_floats_are_rounded_within_half_a_step(bits: int, steps: int) -> None:
    weight = np.random.default_rng(0).normal(0, 1, (5, 96)).astype(np.float32)
    weight[2, :32] = 0.25  # a block without a range
    error = np.abs(from_floats(weight, bits).dequantize() - weight).reshape(5, 3, 32)
    blocks: NDArray[np.float32] = weight.reshape(5, 3, 32)
    ends = blocks.max(-1) - blocks.min(-1) if bits == 4 else 2 * np.abs(blocks).max(-1)
    assert (error.max(-1) <= ends / steps / 2 * 1.001 + 1e-7).all()


def test_a_scale_that_is_not_finite_shows() -> None:
    packed = random_blocks("Q4_1", 3)
    packed.rows[1, :2] = np.array([np.inf], np.float16).view(np.uint8)
    blocks = from_packed(packed)
    assert blocks is not None
    assert not blocks.finite
