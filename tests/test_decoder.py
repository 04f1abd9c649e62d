"""The torch reference against transformers, against a slow float64 twin, and against itself."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_models import (
    GQA,
    SHAPES,
    UNTIED,
    VOCAB,
    ArraySource,
    TinyShape,
    hf_name,
    tiny_source,
    transformers_model,
    transformers_shell,
)

from lowering.decoder import Decoder, KeyValues, active_flags, causal
from lowering.source import bundled_path, open_model, tensor_shapes
from profiles.errors import InputError
from profiles.words import SubLayerId

PROMPT = "Write a Python function that returns the n-th Fibonacci number, then explain it."


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def transformers_greedy(model, ids: list[int], count: int) -> list[int]:
    """Greedy continuation with transformers' own cache."""
    from transformers import DynamicCache

    cache, pending, found = DynamicCache(config=model.config), ids, []
    with torch.no_grad():
        while len(found) < count:
            out = model(torch.tensor([pending]), cache=cache)
            pending = [int(out.logits[0, -1].argmax())]
            found += pending
    return found


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_and_greedy_tokens_equal_transformers(shape: TinyShape):
    source = tiny_source(shape, seed=3)
    decoder, model = Decoder(source), transformers_model(source, shape)
    # longer than the original context of the stretched rotation
    ids = tokens(7, 150)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert (decoder.forward(ids) - expected).abs().max() < 1e-4
    greedy = decoder.greedy(ids[:10], 64)
    assert greedy == transformers_greedy(model, ids[:10], 64)
    assert len(set(greedy)) > 8, "a degenerate output would prove little"


class SlowPass:
    """The contract of a pass in float64, row by row and head by head."""

    def __init__(
        self,
        source: ArraySource,
        positions: list[int],
        past: KeyValues,
        visible: NDArray[np.bool_],
        active: set[int],
    ) -> None:
        self.source, self.spec = source, source.spec
        self.positions, self.visible, self.active = positions, visible, active
        self.past = (past.keys.double().numpy(), past.values.double().numpy())
        spec = source.spec
        self.keys = np.zeros((spec.layers, len(positions), spec.kv_heads, spec.head_dim))
        self.values = np.zeros_like(self.keys)

    def run(self, hidden: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        for layer in range(self.spec.layers):
            if 2 * layer in self.active:
                hidden = self.attention(layer, hidden)
            if 2 * layer + 1 in self.active:
                hidden = np.stack([row + self.mlp(layer, row) for row in hidden])
        return [hidden, self.keys, self.values]

    def weight(self, layer: int, part: str) -> NDArray[np.float64]:
        return self.source.tensor(f"layers.{layer}.{part}").astype(np.float64)

    def norm(self, x, weight):
        return x / np.sqrt(np.mean(x * x) + self.spec.norm_eps) * weight

    def rotated(self, head, position):
        half, out = self.spec.head_dim // 2, np.empty_like(head)
        for i in range(half):
            angle = position * self.spec.rope.theta ** (-2 * i / self.spec.head_dim)
            if self.spec.rope.factors:
                angle /= self.spec.rope.factors[i]
            cos, sin = np.cos(angle), np.sin(angle)
            out[i] = head[i] * cos - head[i + half] * sin
            out[i + half] = head[i + half] * cos + head[i] * sin
        return out

    def projected(self, layer, part, x):
        y = self.weight(layer, part) @ x
        return y + self.weight(layer, f"{part}_bias") if self.spec.qkv_bias else y

    def turned(self, layer, part, head, position):
        if self.spec.qk_norm:
            head = self.norm(head, self.weight(layer, f"{part}_norm"))
        return self.rotated(head, position)

    def attention(self, layer, hidden):
        spec, queries = self.spec, []
        for row, position in enumerate(self.positions):
            x = self.norm(hidden[row], self.weight(layer, "attn_norm"))
            heads = self.projected(layer, "q", x).reshape(spec.heads, spec.head_dim)
            queries.append([self.turned(layer, "q", head, position) for head in heads])
            groups = self.projected(layer, "k", x).reshape(spec.kv_heads, spec.head_dim)
            self.keys[layer, row] = [self.turned(layer, "k", head, position) for head in groups]
            values = self.projected(layer, "v", x)
            self.values[layer, row] = values.reshape(spec.kv_heads, spec.head_dim)
        mixed = [self.mixed(layer, row, query) for row, query in enumerate(queries)]
        return hidden + np.stack(mixed) @ self.weight(layer, "o").T

    def mixed(self, layer, row, query):
        spec, seen = self.spec, np.flatnonzero(self.visible[row])
        keys = np.concatenate([self.past[0][layer], self.keys[layer]])[seen]
        values = np.concatenate([self.past[1][layer], self.values[layer]])[seen]
        out = np.zeros((spec.heads, spec.head_dim))
        for head in range(spec.heads if len(seen) else 0):
            group = head * spec.kv_heads // spec.heads
            weights = np.exp(keys[:, group] @ query[head] / spec.head_dim**0.5)
            out[head] = weights / weights.sum() @ values[:, group]
        return out.ravel()

    def mlp(self, layer, row):
        x = self.norm(row, self.weight(layer, "mlp_norm"))
        gate = self.weight(layer, "gate") @ x
        gated = gate / (1 + np.exp(-gate)) * (self.weight(layer, "up") @ x)
        return self.weight(layer, "down") @ gated


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(list(SHAPES.values())),
    width=st.integers(1, 6),
    slots=st.integers(0, 7),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_a_pass_under_any_masks_equals_the_slow_loop(shape, width, slots, seed, data):
    source = tiny_source(shape)
    spec, random = source.spec, np.random.default_rng(seed)
    active = data.draw(st.sets(st.integers(0, spec.sub_layers - 1)))
    visible = random.random((width, slots + width)) < 0.5
    positions = random.integers(0, 300, width).tolist()
    cache = (spec.layers, slots, spec.kv_heads, spec.head_dim)
    past = KeyValues(
        torch.from_numpy(random.standard_normal(cache).astype(np.float32)),
        torch.from_numpy(random.standard_normal(cache).astype(np.float32)),
    )
    hidden = random.standard_normal((width, spec.hidden))
    expected = SlowPass(source, positions, past, visible, active).run(hidden)
    found = Decoder(source).run(
        torch.from_numpy(hidden.astype(np.float32)),
        torch.tensor(positions),
        past,
        torch.from_numpy(visible),
        frozenset(SubLayerId(i) for i in active),
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-3, atol=1e-4)
    for layer in range(spec.layers):
        if 2 * layer not in active:
            assert not found[1][layer].any()
            assert not found[2][layer].any()


def test_flags_and_ids_of_active_sub_layers_mean_the_same():
    decoder = Decoder(tiny_source())
    hidden, empty = decoder.embed([5, 6]), KeyValues.empty(decoder.spec)
    ids = frozenset(SubLayerId(i) for i in (0, 3, 4))
    flags = [i in ids for i in range(6)]
    by_id = decoder.run(hidden, torch.arange(2), empty, causal(2), ids)
    by_flag = decoder.run(hidden, torch.arange(2), empty, causal(2), flags)
    assert all(torch.equal(a, b) for a, b in zip(by_id, by_flag, strict=True))


def test_no_active_sub_layer_passes_hidden_rows_through():
    decoder = Decoder(tiny_source())
    hidden, empty = decoder.embed([5, 6]), KeyValues.empty(decoder.spec)
    out, keys, values = decoder.run(hidden, torch.arange(2), empty, causal(2), frozenset())
    assert torch.equal(out, hidden)
    assert not keys.any()
    assert not values.any()


def test_an_exit_and_the_rest_from_its_rows_equal_one_full_pass():
    decoder = Decoder(tiny_source())
    hidden, empty, ids = decoder.embed([5, 6, 7]), KeyValues.empty(decoder.spec), range(6)
    full = decoder.run(hidden, torch.arange(3), empty, causal(3), [True] * 6)
    exit_rows = decoder.run(hidden, torch.arange(3), empty, causal(3), [i < 2 for i in ids])
    rest = decoder.run(exit_rows[0], torch.arange(3), empty, causal(3), [i >= 2 for i in ids])
    torch.testing.assert_close(rest[0], full[0])
    torch.testing.assert_close(exit_rows[1] + rest[1], full[1])


class TokenTree:
    """A random token tree below a context, its rows shuffled among paddings."""

    def __init__(self, seed: int, context: int, nodes: int, paddings: int) -> None:
        random = np.random.default_rng(seed)
        self.context = tokens(seed, context)
        self.ids = tokens(seed + 1, nodes)
        self.parent = [-1] + [int(random.integers(0, node)) for node in range(1, nodes)]
        self.row_of = random.permutation(nodes + paddings)[:nodes].tolist()
        self.width = nodes + paddings
        # a gap: slots between context tokens that hold nothing of this sequence
        self.slot_of = sorted(random.permutation(context + 5)[:context].tolist())
        self.slots = context + 5

    def path(self, node: int) -> list[int]:
        """Nodes from the root to ``node``."""
        above = self.path(self.parent[node]) if self.parent[node] >= 0 else []
        return [*above, node]

    def rows(self) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Token, position and mask of each row."""
        ids, positions = [0] * self.width, torch.zeros(self.width, dtype=torch.int64)
        visible = torch.zeros(self.width, self.slots + self.width, dtype=torch.bool)
        for node, row in enumerate(self.row_of):
            path = self.path(node)
            ids[row] = self.ids[node]
            positions[row] = len(self.context) + len(path) - 1
            visible[row, self.slot_of] = True
            visible[row, [self.slots + self.row_of[n] for n in path]] = True
        return ids, positions, visible


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(list(SHAPES.values())),
    seed=st.integers(0, 2**16),
    context=st.integers(1, 9),
    nodes=st.integers(1, 9),
    paddings=st.integers(0, 4),
)
def test_tree_rows_with_gaps_and_paddings_equal_plain_causal_rows(
    shape, seed, context, nodes, paddings
):
    decoder = Decoder(tiny_source(shape))
    spec, tree = decoder.spec, TokenTree(seed, context, nodes, paddings)
    everything = [True] * spec.sub_layers
    _, keys, values = decoder.run(
        decoder.embed(tree.context),
        torch.arange(context),
        KeyValues.empty(spec),
        causal(context),
        everything,
    )
    # what no row sees may be anything
    nothing = torch.full((spec.layers, tree.slots, spec.kv_heads, spec.head_dim), float("nan"))
    past = KeyValues(nothing.clone(), nothing.clone())
    past.keys[:, tree.slot_of], past.values[:, tree.slot_of] = keys, values
    before = past.keys.clone()
    ids, positions, visible = tree.rows()
    hidden, new_keys, _ = decoder.run(decoder.embed(ids), positions, past, visible, everything)
    logits = decoder.logits(hidden)
    assert logits.isfinite().all()
    assert new_keys.isfinite().all()
    torch.testing.assert_close(past.keys, before, rtol=0, atol=0, equal_nan=True)
    for node, row in enumerate(tree.row_of):
        sequence = tree.context + [tree.ids[n] for n in tree.path(node)]
        expected = decoder.forward(sequence)[-1]
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_chunked_prefill_equals_one_pass():
    decoder = Decoder(tiny_source(UNTIED))
    ids, past, rows = tokens(1, 23), KeyValues.empty(decoder.spec), []
    for start in range(0, 23, 6):
        chunk = ids[start : start + 6]
        positions = torch.arange(start, start + len(chunk))
        hidden, keys, values = decoder.run(
            decoder.embed(chunk), positions, past, causal(len(chunk), start), [True] * 4
        )
        past = past.extended(keys, values)
        rows.append(decoder.logits(hidden))
    assert past.slots == 23
    torch.testing.assert_close(torch.cat(rows), decoder.forward(ids), rtol=1e-4, atol=1e-4)


def test_greedy_stops_at_an_eos_and_includes_it():
    decoder = Decoder(tiny_source())
    free = decoder.greedy([4, 5], 20)
    stop = free[7]
    assert decoder.greedy([4, 5], 20, eos_ids=(stop,)) == free[: free.index(stop) + 1]
    assert decoder.greedy([4, 5], 0) == []


def test_a_replaced_linear_sees_every_product_and_spares_the_weights():
    source, asked = tiny_source(UNTIED), set()
    plain = Decoder(source)

    def linear(name, x):
        asked.add(name)
        return plain.plain_linear(name, x)

    decoder = Decoder(source, linear)
    assert torch.equal(decoder.forward([1, 2, 3]), plain.forward([1, 2, 3]))
    parts = ("q", "k", "v", "o", "gate", "up", "down")
    assert asked == {f"layers.{i}.{part}" for i in range(2) for part in parts} | {"head"}
    assert asked.isdisjoint(decoder.weights)


def test_a_tied_head_is_loaded_once():
    decoder = Decoder(tiny_source(GQA))
    decoder.forward([1])
    assert decoder.weights["head"] is decoder.weights["embed"]
    assert "head" not in list(decoder.weights)


def test_arguments_that_do_not_fit_are_refused():
    decoder = Decoder(tiny_source())
    hidden, empty = decoder.embed([5, 6]), KeyValues.empty(decoder.spec)
    with pytest.raises(ValueError, match=r"visible is \(2, 3\), expected \(2, 2\)"):
        decoder.run(hidden, torch.arange(2), empty, causal(2, 1), [True] * 6)
    with pytest.raises(ValueError, match=r"positions is \(3,\), expected \(2,\)"):
        decoder.run(hidden, torch.arange(3), empty, causal(2), [True] * 6)
    with pytest.raises(ValueError, match=r"visible is torch\.int64"):
        decoder.run(hidden, torch.arange(2), empty, causal(2).long(), [True] * 6)
    with pytest.raises(ValueError, match="5 sub-layer flags for 6"):
        active_flags([True] * 5, 6)
    with pytest.raises(IndexError, match="sub-layer 6 of 6"):
        active_flags(frozenset({SubLayerId(6)}), 6)


@pytest.fixture(scope="module")
def smollm2():
    try:
        bundled_path("smollm2-135m")
    except InputError as error:
        pytest.skip(str(error))
    return open_model("smollm2-135m")


@pytest.mark.slow
def test_smollm2_equals_transformers_on_a_real_prompt(smollm2):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json())
    ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    decoder, model = Decoder(smollm2), transformers_model(smollm2)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert (decoder.forward(ids) - expected).abs().max() < 1e-4
    assert decoder.greedy(ids, 64) == transformers_greedy(model, ids, 64)


@pytest.mark.slow
def test_smollm2_tensors_equal_those_of_transformers_own_gguf_loader(smollm2, capsys):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = transformers_shell(smollm2.spec)
    path = bundled_path("smollm2-135m")
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    capsys.readouterr()
    names = tensor_shapes(smollm2.spec)
    assert set(loaded) == {hf_name(name) for name in names}
    for name in names:
        assert np.array_equal(smollm2.tensor(name), loaded[hf_name(name)].numpy()), name
