"""Fused attention: in passes of two rows or more a chain's rows do not depend on the pass."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled_models import Recipe, recipe_source
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import SHAPES, VOCAB, ArraySource

from lowering.blocks import from_floats
from lowering.decoder import Decoder
from profiles.words import AttentionKernel, Format
from runtime.cycle import commit_width
from runtime.kv_cache import KvCache
from runtime.plan import Formats
from runtime.plan_folder import map_tensors, read_plan
from runtime.target import Target

Array = np.ndarray[Any, Any]

MIXED = Formats(attention=Format.W8A16, mlp=Format.W4, head=Format.W8A8)
FORMATS = (Format.W8A16, Format.W4, Format.F32, Format.W8A8, MIXED)
CONTEXT = 192
TOKENS = 150
IDS = np.random.default_rng(3).integers(0, VOCAB, TOKENS).tolist()


class Chain:
    """A compiled target with fused attention, and the rows of a text in passes of two."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        plan = read_plan(folder)
        tensors = map_tensors(folder, plan.weights, plan.tensors)
        self.spec, self.classes = plan.model, plan.numerics
        self.target = Target(
            *(folder, plan.model, plan.graphs, tensors, threads), AttentionKernel.FUSED
        )
        self.hidden, self.cache = self.decode([2] * (TOKENS // 2))

    def decode(
        self, rows: Sequence[int], capacity: int = CONTEXT + 64, padding: int = 0
    ) -> tuple[Array, KvCache]:
        """The text in passes of ``rows`` tokens; those of one row are padded to two.

        The cache begins full of garbage; each pass is ``padding`` rows wider than it has tokens.
        """
        cache = KvCache(self.spec, capacity, capacity)
        random = np.random.default_rng(0)
        cache.keys[:] = random.normal(0, 1e4, cache.keys.shape)
        cache.values[:] = random.normal(0, 1e4, cache.values.shape)
        hidden = np.zeros((TOKENS, self.spec.hidden), np.float32)
        for count in rows:
            at = cache.length
            ids = IDS[at : at + count]
            width = commit_width(self.classes, len(ids) + padding)
            result = self.target.run_chain(ids, at, cache, width=width)
            hidden[at : at + len(ids)] = result.hidden[: len(ids)]
            cache.commit(result.keys, result.values, slice(0, len(ids)))
        assert cache.length == TOKENS
        return hidden, cache

    def assert_same(self, hidden: Array, cache: KvCache) -> None:
        np.testing.assert_array_equal(hidden, self.hidden)
        for found, expected in ((cache.keys, self.cache.keys), (cache.values, self.cache.values)):
            np.testing.assert_array_equal(found[:, :, :TOKENS], expected[:, :, :TOKENS])


@pytest.fixture(scope="module")
def chain(compiled: Callable[[Recipe], Path]) -> Iterator[Callable[..., Chain]]:
    opened: dict[object, Chain] = {}

    def of(shape: str, fmt: Format | Formats, threads: int = 1) -> Chain:
        key = shape, fmt, threads
        if key not in opened:
            folder = compiled(Recipe(shape=SHAPES[shape], format=fmt, context=CONTEXT))
            opened[key] = Chain(folder, threads)
        return opened[key]

    yield of
    for each in opened.values():
        each.target.close()


def split(rows: Sequence[int]) -> list[int]:
    """``rows`` over and over until the text ends."""
    out: list[int] = []
    while sum(out) < TOKENS:
        out.append(min(rows[len(out) % len(rows)], TOKENS - sum(out)))
    return out


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [(1,), (3,), (16, 1, 33), (64,)])
def test_rows_are_the_same_bits_in_passes_of_any_width(
    chain: Callable[..., Chain], shape: str, fmt: Format | Formats, rows: tuple[int, ...]
) -> None:
    text = chain(shape, fmt)
    text.assert_same(*text.decode(split(rows)))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_splits_padding_and_capacity_change_nothing(
    chain: Callable[..., Chain], data: st.DataObject
) -> None:
    text = chain(
        data.draw(st.sampled_from(["gqa", "mha", "qwen2"])), data.draw(st.sampled_from(FORMATS))
    )
    rows = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    capacity, padding = data.draw(st.integers(TOKENS + 50, 400)), data.draw(st.integers(0, 9))
    text.assert_same(*text.decode(split(rows), capacity, padding))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_threads_change_nothing(chain: Callable[..., Chain], fmt: Format | Formats) -> None:
    one, two = chain("gqa", fmt), chain("gqa", fmt, 2)
    one.assert_same(two.hidden, two.cache)


def test_a_pass_under_a_skip_mask_leaves_committed_rows_alone(
    chain: Callable[..., Chain],
) -> None:
    text = chain("gqa", Format.W8A16)
    active = text.target.active([0, 3])
    before = text.cache.keys[:, :, :TOKENS].copy()
    text.target.run_chain([5], TOKENS, text.cache, active)
    np.testing.assert_array_equal(text.cache.keys[:, :, :TOKENS], before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("fmt", "tolerance"), [(Format.F32, 2e-4), (Format.W4, 0.15)])
def test_logits_are_those_of_the_reference_on_the_deployed_weights(
    chain: Callable[..., Chain], shape: str, fmt: Format | Formats, tolerance: float
) -> None:
    text = chain(shape, fmt)
    source = recipe_source(Recipe(shape=SHAPES[shape], format=fmt, context=CONTEXT))
    if fmt is Format.W4:
        source = ArraySource(source.spec, {n: deployed(n, w) for n, w in source.weights.items()})
    expected = Decoder(source).forward(torch.tensor(IDS)).numpy()
    found = text.target.logits(text.hidden)
    # w4 rounds each block of activations to bytes
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < tolerance


def deployed(name: str, weight: Array) -> Array:
    if weight.ndim == 1:
        return weight
    return from_floats(weight, 8 if name in ("embed", "head") else 4).dequantize()
