"""The ONNX graphs of sub-layers that stream from flash: one for each kind, weights as inputs.

A streamed sub-layer computes what it would in the ``layers`` graph, bit by bit: the nodes are the
same, and products of integers do not depend on whether their weights are constants.
"""

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto

from lowering.attention_nodes import prologue
from lowering.onnx_graphs import attention_rows, mlp_rows
from lowering.onnx_nodes import ELEMENT, Nodes, onnx_model, tensor_info
from lowering.template import Template, names_of
from profiles.errors import UnsupportedError
from profiles.words import AttentionKernel, Format, SubLayerKind
from runtime.model_spec import ModelSpec
from runtime.plan import Formats, TensorRef
from runtime.weight_ranges import STREAMED_FORMATS, SubLayerBytes


def streamed_graph(
    spec: ModelSpec,
    fmt: Format | Formats,
    context: int,
    kind: SubLayerKind,
    weights: SubLayerBytes,
    rotation: Sequence[TensorRef],
) -> onnx.ModelProto:
    """Any one sub-layer of ``kind`` with exact attention.

    ``weights`` are those of one such sub-layer, ``rotation`` the tables of the rotary embedding.
    Inputs: ``hidden`` [w, d] f32 and each weight as ``layer.PART``, in an attention further
    ``positions`` [1, w] int64, ``mask`` [w, t + w] f32, ``key`` and ``value`` [kv, t, hd] f32, as
    in the ``layers`` graph. Outputs: ``hidden_out`` [w, d], and ``new_key`` and ``new_value``
    [kv, w, hd].

    Raises:
        UnsupportedError: The sub-layer has a format that cannot be streamed.
    """
    t = Template(spec, fmt, context, AttentionKernel.EXACT)
    check_streamed(t.formats.of(kind), kind)
    g, names = Nodes(kind.value), names_of(None)
    inputs = [tensor_info("hidden", ["w", spec.hidden])]
    outputs = [tensor_info("hidden_out", ["w", spec.hidden])]
    if kind is SubLayerKind.ATTENTION:
        prologue(g)
        y, k, v = attention_rows(g, "hidden", None, t)
        g.named("new_key", "Identity", k)
        g.named("new_value", "Identity", v)
        past, new = ([spec.kv_heads, rows, spec.head_dim] for rows in ("t", "w"))
        inputs += [
            tensor_info("positions", [1, "w"], TensorProto.INT64),
            tensor_info("mask", ["w", "slots"]),
            *(tensor_info(name, past) for name in (names.key, names.value)),
        ]
        outputs += [tensor_info(name, new) for name in ("new_key", "new_value")]
    else:
        y = mlp_rows(g, "hidden", None, t)
    g.named("hidden_out", "Identity", y)
    inputs += [_weight(f"{names.layer}.{part.name}", part.tensor) for part in weights.parts]
    return onnx_model(kind.value, g, inputs, outputs, t.initializers(), rotation)


def check_streamed(fmt: Format, kind: SubLayerKind) -> None:
    """``UnsupportedError`` unless sub-layers of this format can be streamed."""
    if fmt in STREAMED_FORMATS:
        return
    why = (
        "sums of floats differ from those with weights in memory"
        if fmt is Format.F32
        else "blocks of weights are packed anew in every pass, which takes seconds"
    )
    raise UnsupportedError(
        f"an {kind} in {fmt} cannot stream from flash: {why}",
        expected=", ".join(STREAMED_FORMATS),
        hint="choose another --target-format, or a budget that all of it fits into",
    )


def _weight(name: str, tensor: TensorRef) -> Any:
    return tensor_info(name, list(tensor.shape), ELEMENT[tensor.type])
