"""Passes of the compiled target: equal bit by bit whatever shares the pass, and true to torch."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from compiled_models import FORMATS, Recipe, least_width, recipe_source
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import GQA, LLAMA3, MHA, QWEN2, QWEN3, UNTIED, VOCAB, WIDE_HEADS, TinyShape

from lowering.decoder import Decoder, KeyValues
from lowering.flash_image import value_grid
from lowering.quantize import linear_reference, quantize_channels
from lowering.template import VALUE_BITS, probability_bits
from profiles.words import AttentionKernel, Format, SubLayerId
from runtime.backends import HIDDEN, PassResult
from runtime.kv_cache import KvCache
from runtime.plan_folder import map_tensors, read_plan
from runtime.target import Target

EXACT = AttentionKernel.EXACT
CONTEXT = 1088
TOKENS = 1056
"""Length of the sequence that is decoded token by token; every context is a prefix of it."""
WIDEST = 32

Array = np.ndarray[Any, Any]

# More than one tile of every matrix kernel, and an odd number of groups
BROAD = TinyShape(layers=1, hidden=288, intermediate=544, heads=9, kv_heads=3, head_dim=32)
SHAPES = {
    "gqa": GQA,
    "mha": MHA,
    "untied": UNTIED,
    "wide_heads": WIDE_HEADS,
    "broad": BROAD,
    "scaled_rotation": msgspec.structs.replace(LLAMA3, layers=1),
    "qkv_bias": msgspec.structs.replace(QWEN2, layers=1),
    "qk_norm": msgspec.structs.replace(QWEN3, layers=1),
}
# Two threads need no more shapes than this to share the work in every way that they do
THREADED = [(name, 1) for name in SHAPES] + [(name, 2) for name in ("gqa", "mha", "broad")]
TWO_LAYERS = {name: msgspec.structs.replace(SHAPES[name], layers=2) for name in ("gqa", "mha")}


class Rows(NamedTuple):
    """What a pass says of one token."""

    hidden: Array
    keys: Array
    """[layers, kv_heads, head_dim]"""
    values: Array

    @classmethod
    def of(cls, result: PassResult, row: int) -> "Rows":
        """Copies, since the next pass of this width writes over the arrays."""
        return cls(
            result.hidden[row].copy(),
            result.keys[:, :, row].copy(),
            result.values[:, :, row].copy(),
        )


class Model:
    """A compiled target with the rows of a sequence that was decoded token by token."""

    def __init__(self, folder: Path, shape: TinyShape, threads: int, tokens: int) -> None:
        self.plan = read_plan(folder)
        self.spec = self.plan.model
        self.tensors = map_tensors(folder, self.plan.weights, self.plan.tensors)
        self.target = Target(folder, self.spec, self.plan.graphs, self.tensors, threads, EXACT)
        self.least = least_width(shape)
        self.ids = np.random.default_rng(5).integers(0, VOCAB, tokens).tolist()
        self.past = KvCache(self.spec, 64, CONTEXT)
        self.rows = [self.plain(token, at, self.past) for at, token in enumerate(self.ids)]

    def plain(self, token: int, at: int, cache: KvCache) -> Rows:
        """One step of plain decoding, committed at slot ``at``."""
        cache.length = at
        result = self.target.run_chain([token], at, cache, width=self.least)
        cache.commit(result.keys, result.values, slice(0, 1))
        return Rows.of(result, 0)

    def cache(self, slots: Sequence[int], capacity: int, random: np.random.Generator) -> KvCache:
        """The sequence's first positions at ``slots`` and garbage everywhere else."""
        cache = KvCache(self.spec, capacity, capacity)
        cache.keys[:] = random.normal(0, 1e4, cache.keys.shape)
        cache.values[:] = random.normal(0, 1e9, cache.values.shape)
        cache.keys[:, :, slots] = self.past.keys[:, :, : len(slots)]
        cache.values[:, :, slots] = self.past.values[:, :, : len(slots)]
        return cache


@pytest.fixture(scope="session")
def model(compiled: Callable[[Recipe], Path]) -> Iterator[Callable[..., Model]]:
    """A model by shape, format, threads and tokens decoded; opened once."""
    models: dict[tuple[TinyShape, Format, int], Model] = {}

    def opened(
        shape: TinyShape | str, fmt: Format, threads: int = 1, tokens: int = TOKENS
    ) -> Model:
        shape = SHAPES[shape] if isinstance(shape, str) else shape
        key = shape, fmt, threads
        if key not in models:
            longer = msgspec.structs.replace(shape, max_context=2048)
            folder = compiled(Recipe(shape=longer, format=fmt, context=CONTEXT, attention=EXACT))
            models[key] = Model(folder, longer, threads, tokens)
        return models[key]

    yield opened
    for each in models.values():
        each.target.close()


def assert_same_bits(found: Rows, expected: Rows, where: object) -> None:
    for name, one, other in zip(Rows._fields, found, expected, strict=True):
        same = np.array_equal(one.view(np.uint32), other.view(np.uint32))
        assert same, f"{name} of {where} differ by {np.abs(one - other).max()}"


class Tree:
    """A random token tree behind a context with gaps, its rows shuffled among paddings."""

    def __init__(self, context: int, gaps: int, nodes: int, paddings: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.context, self.capacity = context, context + gaps
        self.slots = random.permutation(self.capacity)[:context]
        if seed % 2:
            self.slots.sort()
        self.ids = random.integers(0, VOCAB, nodes).tolist()
        self.parent = [-1] + [int(random.integers(-1, node)) for node in range(1, nodes)]
        self.width = nodes + paddings
        self.row_of = random.permutation(self.width)[:nodes].tolist()
        self.random = random

    def path(self, node: int) -> list[int]:
        """Nodes from a root to ``node``."""
        return [*(self.path(self.parent[node]) if self.parent[node] >= 0 else []), node]

    def run(self, model: Model) -> list[Rows]:
        """What one pass over the whole tree says of each node."""
        ids = self.random.integers(0, VOCAB, self.width)
        positions = self.random.integers(0, CONTEXT, self.width)
        mask = np.full((self.width, self.capacity + self.width), HIDDEN, np.float32)
        np.fill_diagonal(mask[:, self.capacity :], 0)
        for node, row in enumerate(self.row_of):
            path = self.path(node)
            ids[row], positions[row] = self.ids[node], self.context + len(path) - 1
            mask[row, self.slots] = 0
            mask[row, [self.capacity + self.row_of[above] for above in path]] = 0
        cache = model.cache(self.slots.tolist(), self.capacity, self.random)
        hidden = model.target.embed(ids.tolist())
        result = model.target.run(hidden, positions, mask, cache, model.target.all_on)
        return [Rows.of(result, row) for row in self.row_of]

    def decode(self, model: Model) -> list[Rows]:
        """The same by plain decoding along each node's own path."""
        slots = list(range(self.context))
        cache = model.cache(slots, self.context + len(self.ids) + 2, self.random)
        found: list[Rows] = []
        for node in range(len(self.ids)):
            at = self.context
            for above in self.path(node)[:-1]:
                cache.write(at, found[above].keys[:, :, None], found[above].values[:, :, None], [0])
                at += 1
            found.append(model.plain(self.ids[node], at, cache))
        return found


def check_tree(model: Model, tree: Tree) -> None:
    for node, (found, expected) in enumerate(zip(tree.run(model), tree.decode(model), strict=True)):
        assert_same_bits(found, expected, f"node {node} at {tree.path(node)}")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_chain_of_any_width_equals_plain_decoding(model, name: str, fmt: Format) -> None:
    it: Model = model(name, fmt)
    for context in (0, 37, 1024):
        for width in range(it.least, WIDEST + 1):
            cache = KvCache(it.spec, 64, CONTEXT)
            cache.reserve(context + width)
            cache.keys[:, :, :context] = it.past.keys[:, :, :context]
            cache.values[:, :, :context] = it.past.values[:, :, :context]
            result = it.target.run_chain(it.ids[context : context + width], context, cache)
            for row in range(width):
                where = f"row {row} of {width} behind {context}"
                assert_same_bits(Rows.of(result, row), it.rows[context + row], where)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_padding_rows_and_capacity_change_nothing(model, name: str, fmt: Format) -> None:
    it: Model = model(name, fmt)
    for context, chained in ((0, 1), (0, 5), (90, 1), (90, 7), (1000, 2)):
        ids = it.ids[context : context + chained]
        for width, capacity in ((32, CONTEXT), (chained + 1, context + 40), (16, 1051)):
            slots = range(context)
            cache = it.cache(slots, max(capacity, context + width), np.random.default_rng(width))
            result = it.target.run_chain(ids, context, cache, width=width)
            for row in range(chained):
                where = f"row {row} of {chained} in {width} behind {context} of {capacity}"
                assert_same_bits(Rows.of(result, row), it.rows[context + row], where)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("name", "threads"), THREADED)
def test_tree_rows_equal_plain_decoding_along_their_path(
    model, name: str, fmt: Format, threads: int
) -> None:
    it: Model = model(name, fmt, threads)
    for seed, (context, gaps, nodes, paddings) in enumerate(
        [(0, 3, 4, 0), (1, 0, 2, 6), (33, 30, 31, 1), (400, 1, 12, 20), (1024, 8, 9, 3)]
    ):
        check_tree(it, Tree(context, gaps, nodes, paddings, seed))


@settings(max_examples=120, deadline=None)
@given(
    setting=st.sampled_from(THREADED),
    fmt=st.sampled_from(FORMATS),
    context=st.integers(0, 80) | st.integers(0, 1024),
    gaps=st.integers(0, 60),
    nodes=st.integers(1, WIDEST),
    paddings=st.integers(0, WIDEST),
    seed=st.integers(0, 2**20),
)
def test_any_tree_equals_plain_decoding_along_its_paths(
    model, setting, fmt, context, gaps, nodes, paddings, seed
) -> None:
    name, threads = setting
    it: Model = model(name, fmt, threads)
    paddings = max(min(paddings, WIDEST - nodes), it.least - nodes)
    check_tree(it, Tree(context, gaps, nodes, paddings, seed))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", [name for name, threads in THREADED if threads == 2])
def test_two_threads_compute_the_rows_of_one(model, name: str, fmt: Format) -> None:
    one, two = model(name, fmt, 1), model(name, fmt, 2)
    for at in range(TOKENS):
        assert_same_bits(two.rows[at], one.rows[at], at)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("name", "threads"), THREADED)
def test_logits_of_a_row_do_not_depend_on_its_neighbours(
    model, name: str, fmt: Format, threads: int
) -> None:
    it: Model = model(name, fmt, threads)
    hidden = np.stack([rows.hidden for rows in it.rows[:WIDEST]])
    alone = np.concatenate([it.target.logits(row[None]) for row in hidden])
    for rows in range(1, WIDEST + 1):
        together = it.target.logits(hidden[:rows])
        assert np.array_equal(together.view(np.uint32), alone[:rows].view(np.uint32)), rows


def test_an_earlier_result_is_overwritten_by_the_next_pass_of_its_width_only(model) -> None:
    it: Model = model("gqa", Format.W8A16)
    cache = KvCache(it.spec, 64, CONTEXT)
    first = it.target.run_chain(it.ids[:4], 0, cache)
    before = first.hidden.copy()
    it.target.run_chain(it.ids[9:12], 0, cache)
    assert np.array_equal(first.hidden, before)
    again = it.target.run_chain(it.ids[9:13], 0, cache)
    assert again.hidden is first.hidden
    assert not np.array_equal(first.hidden, before)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_values_are_whole_steps_that_the_grid_has_room_for(model, name: str, fmt: Format) -> None:
    it: Model = model(name, fmt)
    values = it.past.values[:, :, : it.past.length]
    assert np.array_equal(values, np.rint(values))
    largest = np.abs(values).max()
    assert 2 ** (VALUE_BITS - 7) < largest < 2**VALUE_BITS, "coarse, or clipped"


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_bias_of_the_values_has_room_on_their_grid(weight: float) -> None:
    weights = np.full((3, 16), weight, np.float32)
    bias = np.array([0.0, -900.0, 3e4], np.float32)
    grid = value_grid(weights, np.ones(16, np.float32), bias)
    # A row of the norm has at most this sum with a row of ones
    largest = grid * (16 * weight + np.abs(bias))
    assert (largest[1:] > 2 ** (VALUE_BITS - 2)).all()
    assert (largest < 2**VALUE_BITS).all()


@pytest.mark.parametrize("slots", [1, 2, 31, 1024, 1025, 4096, 8192, 2**17])
def test_sums_over_the_grids_are_exact_in_float64(slots: int) -> None:
    largest_sum = slots * 2 ** (probability_bits(slots) + VALUE_BITS)
    assert largest_sum <= 2**53
    assert probability_bits(slots) >= 14


def reference(recipe: Recipe) -> Decoder:
    """The torch decoder with the matrix products of the recipe's format."""
    source = recipe_source(recipe)
    stored: dict[str, tuple[Array, Array]] = {}

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        if name not in stored:
            stored[name] = quantize_channels(source.tensor(name))
        return linear_reference(x, *stored[name], recipe.format)

    return Decoder(source, None if recipe.format is Format.F32 else linear)


def slots_first(rows: Array) -> torch.Tensor:
    """[layers, kv_heads, slots, head_dim] -> [layers, slots, kv_heads, head_dim]."""
    return torch.from_numpy(np.ascontiguousarray(rows.swapaxes(1, 2)))


def steps(tensors: Any, layers: int, kv_heads: int) -> Array:
    """Grid steps per unit of each value channel, [layers, kv_heads, 1, head_dim]."""
    grids = [tensors[f"layers.{layer}.value_grid"] for layer in range(layers)]
    return np.stack(grids).reshape(layers, kv_heads, 1, -1)


def both_ways(
    it: Model, decoder: Decoder, context: int, skipped: Sequence[int]
) -> tuple[list[Array], list[Array]]:
    """Hidden rows, keys and values [.., in units] of a pass by ONNX Runtime and by torch."""
    spec, width = it.spec, 6
    ids = it.ids[context : context + width]
    cache = it.cache(range(context), context + width, np.random.default_rng(0))
    active = it.target.active(map(SubLayerId, skipped))
    result = it.target.run_chain(ids, context, cache, active)
    grid = steps(it.tensors, spec.layers, spec.kv_heads)
    found = [result.hidden.copy(), result.keys.copy(), result.values / grid]
    past = KeyValues(
        slots_first(it.past.keys[:, :, :context]),
        slots_first(it.past.values[:, :, :context] / grid),
    )
    visible = torch.ones(width, context + width, dtype=torch.bool).tril(context)
    hidden, keys, values = decoder.run(
        torch.from_numpy(it.target.embed(ids)),
        torch.arange(context, context + width),
        *(past, visible, active.tolist()),
    )
    return found, [hidden.numpy(), *(rows.numpy().swapaxes(1, 2) for rows in (keys, values))]


# One activation that rounds to the other side moves a row by a step of its format, but rarely
TOLERANCE = {Format.F32: 3e-5, Format.W8A16: 5e-4, Format.W8A8: 3e-2}
MEDIAN_TOLERANCE = {Format.F32: 3e-6, Format.W8A16: 6e-5, Format.W8A8: 1e-3}


def assert_close(found: list[Array], expected: list[Array], fmt: Format) -> None:
    for one, other in zip(found, expected, strict=True):
        error = np.abs(one - other) / max(1.0, np.abs(other).max())
        assert error.max() < TOLERANCE[fmt]
        assert np.median(error) < MEDIAN_TOLERANCE[fmt]


@pytest.mark.parametrize("context", [0, 7, 300])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_pass_equals_the_torch_reference(model, name: str, fmt: Format, context: int) -> None:
    it: Model = model(name, fmt)
    decoder = reference(Recipe(shape=SHAPES[name], format=fmt))
    assert_close(*both_ways(it, decoder, context, ()), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_embedding_and_logits_equal_the_torch_reference(model, fmt: Format) -> None:
    it: Model = model("untied", fmt)
    decoder = reference(Recipe(shape=UNTIED, format=fmt))
    hidden = it.rows[20].hidden[None]
    logits = decoder.logits(torch.from_numpy(hidden)).numpy()
    np.testing.assert_allclose(it.target.logits(hidden), logits, atol=1e-4)
    embedded, exact = it.target.embed(it.ids[:50]), decoder.embed(it.ids[:50]).numpy()
    step = 0 if fmt is Format.F32 else np.abs(exact).max() / 127
    np.testing.assert_allclose(embedded, exact, atol=step)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", TWO_LAYERS)
def test_every_skip_mask_equals_the_torch_reference(model, name: str, fmt: Format) -> None:
    shape = TWO_LAYERS[name]
    it: Model = model(shape, fmt, tokens=40)
    decoder = reference(Recipe(shape=shape, format=fmt))
    everything = range(it.spec.sub_layers)
    for skipped in chain.from_iterable(combinations(everything, n) for n in range(5)):
        found, expected = both_ways(it, decoder, 19, skipped)
        assert_close(found, expected, fmt)
        for layer in range(it.spec.layers):
            if 2 * layer in skipped:
                assert not found[1][layer].any()
                assert not found[2][layer].any()
        if len(skipped) == it.spec.sub_layers:
            assert np.array_equal(found[0], it.target.embed(it.ids[19:25]))
