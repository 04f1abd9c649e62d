"""Operators that are timed compute what the plan's graphs compute."""

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from lowering.operator_graphs import (
    OperatorGraph,
    attention_graph,
    exact_attention_graph,
    glue_graph,
    linear_graph,
    node_chain,
    probe_spec,
    streamed_linear_graph,
)
from lowering.quantize import linear_reference
from planner.host_probe import probe_target
from planner.operator_session import OperatorSession, WeightPool
from profiles.points import AttentionShape, GlueShape, LinearShape
from profiles.words import Format
from runtime.backends import open_session
from runtime.kv_cache import KvCache

Floats = NDArray[np.float32]


def evaluate(graph: OperatorGraph, feeds: dict[str, Any]) -> dict[str, Any]:
    session = open_session(graph.model, {}, 1)
    names = [place.name for place in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def constants(graph: OperatorGraph) -> dict[str, Any]:
    model = onnx.load_from_string(graph.model)
    return {proto.name: numpy_helper.to_array(proto).copy() for proto in model.graph.initializer}


def noise(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rotated(rows: Floats, angles: Floats) -> Floats:
    """``rows`` [w, heads, hd] turned by ``angles`` [w, hd / 2], first half against second."""
    first, second = np.split(rows, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize("fmt", [Format.W8A16, Format.W8A8])
def test_each_8_bit_product_is_the_reference_of_its_own_weights(fmt: Format) -> None:
    graph = linear_graph(LinearShape(48, 40), fmt, repeats=3)
    x = {f"x.{i}": noise(5, 48, seed=i) for i in range(3)}
    got, stored = evaluate(graph, x), constants(graph)
    for i in range(3):
        weight, scale = stored[f"w.{i}"], stored[f"w.{i}.scale"]
        expected = linear_reference(torch.from_numpy(x[f"x.{i}"]), weight, scale, fmt).numpy()
        np.testing.assert_allclose(got[f"y.{i}"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fmt", [Format.W8A16, Format.W8A8])
def test_weights_from_outside_give_bit_for_bit_what_constant_ones_give(fmt: Format) -> None:
    shape = LinearShape(48, 40)
    graph = linear_graph(shape, fmt, repeats=2)
    x = {f"x.{i}": noise(5, 48, seed=i) for i in range(2)}
    weights = {name: w for name, w in constants(graph).items() if name.startswith("w.")}
    streamed = evaluate(streamed_linear_graph(shape, fmt, repeats=2), x | weights)
    for name, expected in evaluate(graph, x).items():
        np.testing.assert_array_equal(streamed[name], expected)


def test_each_f32_product_is_the_plain_one() -> None:
    graph = linear_graph(LinearShape(48, 40), Format.F32, repeats=2)
    x = {f"x.{i}": noise(5, 48, seed=i) for i in range(2)}
    got, stored = evaluate(graph, x), constants(graph)
    for i in range(2):
        np.testing.assert_allclose(got[f"y.{i}"], x[f"x.{i}"] @ stored[f"w.{i}"], atol=1e-5)


@pytest.mark.parametrize(("fmt", "bits"), [(Format.W4, 4), (Format.W8, 8)])
def test_each_product_of_blocks_is_that_of_its_dequantised_weights(fmt: Format, bits: int) -> None:
    graph = linear_graph(LinearShape(64, 40), fmt, repeats=2)
    x = {f"x.{i}": noise(5, 64, seed=i) for i in range(2)}
    got, stored = evaluate(graph, x), constants(graph)
    for i in range(2):
        steps = stored[f"w.{i}"]
        if bits == 4:
            steps = np.stack([steps & 15, steps >> 4], axis=-1).reshape(40, 2, 32)
        weight = (steps.astype(np.float32) - (1 << (bits - 1))) * stored[f"w.{i}.scale"][0]
        if bits == 4:
            weight += stored[f"w.{i}.offset"].T[..., None]
        expected = x[f"x.{i}"] @ weight.reshape(40, 64).T
        # the kernel rounds each block of x to bytes
        np.testing.assert_allclose(got[f"y.{i}"], expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("fmt", [Format.W8A16, Format.W8A8, Format.W4, Format.F32])
def test_repeats_have_weights_of_their_own(fmt: Format) -> None:
    stored = constants(linear_graph(LinearShape(32, 32), fmt, repeats=4))
    weights = [stored[f"w.{i}"] for i in range(4)]
    assert len({weight.tobytes() for weight in weights}) == 4
    assert fmt in (Format.F32, Format.W4) or min(weight.min() for weight in weights) >= 1


def test_attention_is_softmax_over_past_and_own_rows() -> None:
    shape, width, past = AttentionShape(4, 2, 16), 3, 6
    graph = attention_graph(shape, context=32, repeats=2)
    feeds: dict[str, Any] = {
        "positions": np.arange(past, past + width)[None],
        "slots": np.array(past + width, np.int32),
        "last_slot": np.array([past + width - 1], np.int32),
    }
    for i in range(2):
        feeds[f"qkv.{i}"] = noise(width, 128, seed=i)
        feeds[f"key.{i}"] = noise(1, 2, 12, 16, seed=10 + i)
        feeds[f"value.{i}"] = noise(1, 2, 12, 16, seed=20 + i)
    got = evaluate(graph, feeds)
    for i in range(2):
        out, keys, values = attention(feeds, i, past)
        np.testing.assert_allclose(got[f"out.{i}"], out, atol=1e-4)
        np.testing.assert_allclose(got[f"new_key.{i}"][0, :, : past + width], keys, atol=1e-5)
        np.testing.assert_array_equal(got[f"new_value.{i}"][0, :, : past + width], values)


def test_exact_attention_is_softmax_over_past_and_own_rows() -> None:
    shape, width, past = AttentionShape(4, 2, 16), 3, 6
    graph = exact_attention_graph(shape, context=32, repeats=2)
    own = np.where(np.tri(width, dtype=np.bool_), 0, -1e30).astype(np.float32)
    feeds: dict[str, Any] = {
        "hidden": noise(width, 64),
        "positions": np.arange(past, past + width)[None],
        "mask": np.concatenate([np.zeros((width, past), np.float32), own], axis=1),
    }
    for i in range(2):
        feeds[f"qkv.{i}"] = noise(width, 128, seed=i)
        feeds[f"key.{i}"] = noise(2, past, 16, seed=10 + i)
        # on the grid, as the pass before left them
        feeds[f"value.{i}"] = np.round(4096 * noise(2, past, 16, seed=20 + i))
    got = evaluate(graph, feeds)
    for i in range(2):
        past_rows = {"key": feeds[f"key.{i}"], "value": feeds[f"value.{i}"] / 4096}
        plain = feeds | {f"{name}.{i}": rows[None] for name, rows in past_rows.items()}
        out, keys, values = attention(plain, i, past)
        np.testing.assert_allclose(got[f"out.{i}"], out, atol=1e-3)
        np.testing.assert_allclose(got[f"new_key.{i}"], keys[:, past:], atol=1e-5)
        np.testing.assert_allclose(got[f"new_value.{i}"] / 4096, values[:, past:], atol=1e-3)


def attention(feeds: dict[str, Any], layer: int, past: int) -> tuple[Floats, Floats, Floats]:
    """Output, keys and values, the new ones last, of 4 heads in 2 groups of 16 elements."""
    positions = feeds["positions"][0]
    width = len(positions)
    angles = positions[:, None] * 10_000.0 ** (-2 * np.arange(8) / 16)
    q, k, v = np.split(feeds[f"qkv.{layer}"].reshape(width, 8, 16), [4, 6], axis=1)
    q, k = (rotated(rows, angles.astype(np.float32)) for rows in (q, k))
    new = {"key": k.transpose(1, 0, 2), "value": v.transpose(1, 0, 2)}
    keys, values = (
        np.concatenate([feeds[f"{kind}.{layer}"][0, :, :past], rows], axis=1)
        for kind, rows in new.items()
    )
    hidden = ~np.tri(width, past + width, past, dtype=np.bool_)
    heads: list[Floats] = []
    for head in range(4):
        scores = np.where(hidden, -np.inf, q[:, head] @ keys[head // 2].T / 4)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        heads.append(weights / weights.sum(axis=-1, keepdims=True) @ values[head // 2])
    return np.concatenate(heads, axis=-1), keys, values


@pytest.mark.parametrize("on", [True, False])
def test_glue_is_norm_residual_and_activation_behind_switches(on: bool) -> None:
    graph = glue_graph(GlueShape(48), pairs=2)
    assert graph.repeats == 4
    both = {f"both.{i}": noise(3, 256, seed=i) for i in range(2)}
    switches = {f"on.{i}": np.array(on) for i in range(4)}
    got = evaluate(graph, {"hidden": noise(3, 48), **both, **switches})
    expected = noise(3, 48)
    for _ in range(4 if on else 0):
        norm = np.sqrt((expected**2).mean(axis=-1, keepdims=True) + 1e-5)
        expected = expected + expected / norm
    np.testing.assert_allclose(got["hidden_out"], expected, rtol=1e-5)
    for i in range(2 if on else 0):
        gate, up = np.split(both[f"both.{i}"], 2, axis=-1)
        np.testing.assert_allclose(got[f"gated.{i}"], gate / (1 + np.exp(-gate)) * up, atol=1e-5)


def test_no_repeat_is_merged_with_another(tmp_path: Any) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    graph = linear_graph(LinearShape(32, 32), Format.W8A16, repeats=5)
    ort.InferenceSession(graph.model, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    counts = [sum(node.op_type == op for node in nodes) for op in ("Abs", "MatMulIntegerToFloat")]
    assert counts == [5, 5]


def test_graphs_repeat_byte_for_byte() -> None:
    first, second = (attention_graph(AttentionShape(4, 2, 16), 32, 2) for _ in "ab")
    assert first == second


def test_session_runs_every_operator_at_any_width_and_context() -> None:
    graphs = [
        linear_graph(LinearShape(32, 48), Format.W8A16, 2),
        attention_graph(AttentionShape(4, 2, 16), 64, 2),
        glue_graph(GlueShape(32), 1),
        node_chain(3),
        exact_attention_graph(AttentionShape(4, 2, 16), 64, 2),
        streamed_linear_graph(LinearShape(32, 48), Format.W8A16, 2),
    ]
    for graph in graphs:
        session = OperatorSession(graph, threads=1, pool=WeightPool(2**14))
        for width, context in ((1, 8), (4, 8), (1, 16), (1, 8)):
            session.run(width, context)
        session.close()


def test_probe_model_runs_as_a_plans_target_does() -> None:
    spec = probe_spec(layers=2, hidden=64, attention=AttentionShape(4, 2, 16), max_context=64)
    with probe_target(spec, threads=1) as target:
        cache = KvCache(spec, 16, 16)
        result = target.run_chain([1, 2, 3], 0, cache)
        logits = target.logits(result.hidden)
        skipped = target.run_chain([1, 2, 3], 0, cache, ~target.all_on)
        np.testing.assert_array_equal(skipped.hidden, target.embed([1, 2, 3]))
    assert logits.shape == (3, spec.vocab)
    assert np.isfinite(logits).all()


def test_windows_of_a_pool_do_not_overlap_until_all_of_it_was_handed_out() -> None:
    pool = WeightPool(3 * 4096)
    first, second, third = (pool.take((64, 48)) for _ in range(3))
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(second, third)
    assert np.shares_memory(first, pool.take((10, 10)))
