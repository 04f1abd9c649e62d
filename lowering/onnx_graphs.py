"""The ONNX graphs of a plan: all sub-layers of a pass behind switches, and the LM head.

The ``layers`` graph is one pass: hidden rows, switches, positions and a past in, hidden rows out.
Every sub-layer sits behind an ``If``, so one session with one copy of the weights serves every skip
mask and every exit. Sub-layers that stream from flash are not in it (``lowering.streamed_graphs``).
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from lowering.attention_nodes import attend, fused, prologue, split_heads
from lowering.linear_nodes import gated, linear_constants, norm, product
from lowering.onnx_nodes import Nodes, onnx_model, switch, tensor_info
from lowering.template import Template, names_of
from profiles.words import AttentionKernel, Format, SubLayerId, SubLayerKind, kind_of
from runtime.model_spec import ModelSpec
from runtime.plan import Formats, TensorRef


def attention_rows(g: Nodes, x: str, layer: int | None, t: Template) -> tuple[str, str, str]:
    """``x`` [w, d] through an attention sub-layer: hidden rows, new keys, new values."""
    name = names_of(layer).layer
    qkv = product(g, norm(g, x, f"{name}.attn_norm", t.spec), f"{name}.", ("q", "k", "v"), t)
    if t.attention is AttentionKernel.EXACT:
        q, k, v = split_heads(g, qkv, name, t)
        rows = attend(g, q, k, v, layer, t)
    else:
        rows, k, v = fused(g, qkv, layer, t)
    return g("Add", x, product(g, rows, f"{name}.", ("o",), t)), k, v


def mlp_rows(g: Nodes, x: str, layer: int | None, t: Template) -> str:
    """``x`` [w, d] through an MLP."""
    name = names_of(layer).layer
    normed = norm(g, x, f"{name}.mlp_norm", t.spec)
    both = product(g, normed, f"{name}.", ("gate", "up"), t)
    return g("Add", x, product(g, gated(g, both), f"{name}.", ("down",), t))


def layers_graph(
    spec: ModelSpec,
    fmt: Format | Formats,
    context: int,
    attention: AttentionKernel,
    tensors: Sequence[TensorRef],
    streamed: Collection[SubLayerId] = (),
    biased: bool = False,
) -> onnx.ModelProto:
    """All sub-layers as one pass, but for those ``streamed``: they have no input or output here.

    Inputs of both kernels: ``hidden`` [w, d] f32, ``positions`` [1, w] int64, ``on.S`` bool
    scalars. Output of both: ``hidden_out`` [w, d].

    ``exact``: ``mask`` [w, t + w] f32 (0 where a row may look, -1e30 where not; the last w columns
    are the pass's own rows), ``key.L`` and ``value.L`` [kv, t, hd] f32, only read; out come
    ``new_key.L`` and ``new_value.L`` [kv, w, hd], zeros where the attention is off.

    ``fused``: ``slots`` int32, how many there are with the pass's rows, and ``last_slot`` [1]
    int32, one less; ``key.L`` and ``value.L`` [1, kv, t, hd], to be bound as ``new_key.L`` and
    ``new_value.L`` as well: the new rows are written into the last w of ``slots``. With ``biased``
    also ``bias`` [1, 1, w, slots] f32, added to the scores.
    """
    t = Template(spec, fmt, context, attention, tensors, biased)
    g = Nodes("pass")
    exact = attention is AttentionKernel.EXACT
    zeros = prologue(g) if exact else ""
    past, new = ([spec.kv_heads, rows, spec.head_dim] for rows in ("t", "w"))
    if not exact:
        past = new = [1, *past]
    inputs = [
        tensor_info("hidden", ["w", spec.hidden]),
        tensor_info("positions", [1, "w"], TensorProto.INT64),
        *([tensor_info("mask", ["w", "slots"])] if exact else slot_counts()),
        *([tensor_info("bias", [1, 1, "w", "slots"])] if biased else []),
    ]
    outputs = [tensor_info("hidden_out", ["w", spec.hidden])]
    x = "hidden"
    for layer in range(spec.layers):
        resident = [SubLayerId(i) for i in (2 * layer, 2 * layer + 1) if i not in streamed]
        if 2 * layer in resident:
            for kind in ("key", "value"):
                inputs.append(tensor_info(f"{kind}.{layer}", past))
                outputs.append(tensor_info(f"new_{kind}.{layer}", new))
        inputs += [tensor_info(f"on.{sub_layer}", [], TensorProto.BOOL) for sub_layer in resident]
        for sub_layer in resident:
            name = f"{kind_of(sub_layer)}.{layer}"
            inner, after = Nodes(name), f"{name}.hidden"
            if kind_of(sub_layer) is SubLayerKind.MLP:
                switch(g, sub_layer, inner, {after: mlp_rows(inner, x, layer, t)}, (x,))
            else:
                y, k, v = attention_rows(inner, x, layer, t)
                results = {after: y, f"new_key.{layer}": k, f"new_value.{layer}": v}
                kept = (zeros, zeros) if exact else (f"key.{layer}", f"value.{layer}")
                switch(g, sub_layer, inner, results, (x, *kept))
            x = after
    g.named("hidden_out", "Identity", x)
    return onnx_model("layers", g, inputs, outputs, t.initializers(), tensors)


def slot_counts() -> list[Any]:
    """Inputs of fused attention that say which slots of the cache are filled."""
    return [
        tensor_info("last_slot", [1], TensorProto.INT32),
        tensor_info("slots", [], TensorProto.INT32),
    ]


def head_graph(
    spec: ModelSpec, fmt: Format | Formats, tensors: Sequence[TensorRef]
) -> onnx.ModelProto:
    """Final norm and LM head: ``hidden`` [w, d] -> ``logits`` [w, vocab], float32."""
    g, t = Nodes("head"), Template(spec, fmt, 1, AttentionKernel.FUSED, tensors)
    y = product(g, norm(g, "hidden", "final_norm", spec), "", ("head",), t)
    g.named("logits", "Identity", y)
    constants = [
        numpy_helper.from_array(np.asarray(v), k)
        for k, v in linear_constants(t.formats.head).items()
    ]
    inputs = [tensor_info("hidden", ["w", spec.hidden])]
    return onnx_model(
        "head", g, inputs, [tensor_info("logits", ["w", spec.vocab])], constants, tensors
    )
