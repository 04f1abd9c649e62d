"""Attention as ONNX nodes, in two kernels (``profiles.words.AttentionKernel``).

``exact`` sums integers in float64: probabilities are rounded to a grid relative to the row's
largest, values to a grid per channel, and every sum stays under 2**53. It is then exact in any
order, hence equal bit by bit whatever the width, padding, gaps and split of the context. The past
is only read. ``fused`` is one ``GroupQueryAttention``, which writes keys and values into the cache
and sums a chain's slots in their order: equal bit by bit from two rows on (``docs/numerics.md``).
"""

import math

from onnx import TensorProto

from lowering.linear_nodes import norm
from lowering.onnx_nodes import CONTRIB, Nodes
from lowering.template import Template, names_of
from runtime.model_spec import ModelSpec


def biased(g: Nodes, qkv: str, layer: str, spec: ModelSpec) -> str:
    """``qkv`` with its bias, where the model has one."""
    return g("Add", qkv, f"{layer}.qkv_bias") if spec.qkv_bias else qkv


def head_norms(g: Nodes, qk: str, layer: str, spec: ModelSpec) -> str:
    """``qk`` [w, q_dim + kv_dim] with each head normed -> [w, heads + kv_heads, hd].

    Each head is a row of the norm; the weights differ between queries and keys.
    """
    rows = norm(g, g("Reshape", qk, "shape_heads"), "unit_norm", spec)
    return g("Mul", rows, f"{layer}.qk_norm")


def fused(g: Nodes, qkv: str, layer: int | None, t: Template) -> tuple[str, str, str]:
    """Attention of ``qkv`` [w, q_dim + 2 kv_dim], written to and read from the cache in place.

    Returns rows [w, heads * hd] and the caches [1, kv, t, hd] with the new rows in them.
    """
    spec, name = t.spec, f"layers.{layer}"
    qkv = biased(g, qkv, name, spec)
    if spec.qk_norm:
        qk, v = g.many("Split", 2, qkv, "split_qk_v", axis=-1)
        qk = g("Reshape", head_norms(g, qk, name, spec), "shape_qk")
        qkv = g("Concat", qk, v, axis=-1)
    rows, keys, values = g.many(
        *("GroupQueryAttention", 3, g("Reshape", qkv, "shape_qkv"), "", ""),
        *(f"key.{layer}", f"value.{layer}", "last_slot", "slots"),
        *("rope.cos", "rope.sin", "positions"),
        *(("bias",) if t.biased else ()),
        domain=CONTRIB,
        num_heads=spec.heads,
        kv_num_heads=spec.kv_heads,
        do_rotary=1,
    )
    return g("Reshape", rows, "shape_out"), keys, values


def split_heads(g: Nodes, qkv: str, layer: str, t: Template) -> tuple[str, str, str]:
    """``qkv`` [w, q_dim + 2 kv_dim] into heads, biased, normed, rotated, values on their grid.

    Queries [kv, w * group, hd], keys [kv, w, hd], values [kv, w, hd].
    """
    spec = t.spec
    qk, v = g.many("Split", 2, biased(g, qkv, layer, spec), "split_qk_v", axis=-1)
    if spec.qk_norm:
        qk = head_norms(g, qk, layer, spec)
    qk = g(
        "RotaryEmbedding",
        *(g("Reshape", qk, "shape_rotary"), "positions", "rope.cos", "rope.sin"),
        domain=CONTRIB,
        num_heads=spec.heads + spec.kv_heads,
    )
    q, k = g.many("Split", 2, qk, "split_q_k", axis=-1)
    q = g("Transpose", g("Reshape", q, "shape_q"), perm=[1, 0, 2])
    v = g("Round", g("Mul", v, f"{layer}.value_grid"))
    v = g("Clip", v, "value_low", "value_high")
    k, v = (g("Transpose", g("Reshape", r, "shape_kv"), perm=[1, 0, 2]) for r in (k, v))
    return g("Reshape", q, "shape_q_rows"), k, v


def attend(g: Nodes, q: str, k: str, v: str, layer: int | None, t: Template) -> str:
    """Attention of [kv, w * group, hd] queries over past and new rows -> [w, heads * hd]."""
    names, scale = names_of(layer), 1 / math.sqrt(t.spec.head_dim)
    past, new = (
        g("FusedMatMul", q, keys, domain=CONTRIB, transB=1, alpha=scale) for keys in (names.key, k)
    )
    scores = g("Add", g("Reshape", g("Concat", past, new, axis=-1), "shape_scores"), "mask_rows")
    largest = g("ReduceMax", scores, "last_axis", keepdims=1)
    grid = g("Exp", g("Sub", scores, g("Sub", largest, "grid_shift")))
    p = g("Cast", g("Round", grid), to=TensorProto.DOUBLE)
    total = g("ReduceSum", p, "last_axis", keepdims=1)
    p_past, p_new = g.many("Split", 2, g("Reshape", p, "shape_p"), "split_context", axis=-1)
    v_past, v_new = (g("Cast", rows, to=TensorProto.DOUBLE) for rows in (names.value, v))
    summed = g("Add", g("MatMul", p_past, v_past), g("MatMul", p_new, v_new))
    mean = g("Div", g("Reshape", summed, "shape_summed"), total)
    rows = g("Reshape", g("Cast", mean, to=TensorProto.FLOAT), "shape_out_rows")
    rows = g("Reshape", g("Transpose", rows, perm=[1, 0, 2]), "shape_out")
    return g("Mul", rows, f"{names.layer}.value_ungrid")


def prologue(g: Nodes) -> str:
    """Shapes that depend on width and context, once a pass; returns zero rows [kv, w, hd]."""
    width = g("Shape", "hidden", start=0, end=1)
    slots = g("Shape", "mask", start=1, end=2)
    g.named("shape_scores", "Concat", "one_kv", width, "one_group", slots, axis=0)
    g.named("shape_p", "Concat", "one_kv", "any", slots, axis=0)
    g.named("shape_summed", "Concat", "one_kv", width, "one_group", "one_head_dim", axis=0)
    g.named("split_context", "Concat", g("Sub", slots, width), width, axis=0)
    g.named("mask_rows", "Unsqueeze", "mask", "mask_axes")
    shape = g("Concat", "one_kv", width, "one_head_dim", axis=0)
    return g("ConstantOfShape", shape)
