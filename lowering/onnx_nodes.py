"""ONNX graphs as text is written: nodes one after the other, then the model around them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from runtime.plan import WEIGHTS_FILE, TensorRef, TensorType

Constant = np.ndarray[Any, Any]

OPSET = 21
IR_VERSION = 10
CONTRIB = "com.microsoft"
ELEMENT = {TensorType.F32: TensorProto.FLOAT, TensorType.U8: TensorProto.UINT8}


class Nodes:
    """Collects the nodes of one (sub)graph; names are ``scope/Op_index``, so bytes repeat."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.nodes: list[onnx.NodeProto] = []

    def __call__(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        return self.many(op, 1, *inputs, domain=domain, **attributes)[0]

    def many(
        self, op: str, outputs: int, *inputs: str, domain: str = "", **attributes: Any
    ) -> list[str]:
        name = f"{self.scope}/{op}_{len(self.nodes)}"
        names = [name] if outputs == 1 else [f"{name}.{i}" for i in range(outputs)]
        self.nodes.append(
            helper.make_node(op, list(inputs), names, name=name, domain=domain, **attributes)
        )
        return names

    def named(self, output: str, op: str, *inputs: str, **attributes: Any) -> None:
        """A node whose output name is given, to be seen from subgraphs or outside."""
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))

    def rename(self, value: str, name: str) -> None:
        """Call an output of the latest nodes ``name``, to be seen from outside without a copy."""
        for node in reversed(self.nodes):
            if value in node.output:
                node.output[list(node.output).index(value)] = name
                return


def tensor_info(name: str, shape: Sequence[str | int], kind: int = TensorProto.FLOAT) -> Any:
    """The declaration of an input or output; dimensions are numbers or names."""
    return helper.make_tensor_value_info(name, kind, shape)


def switch(
    g: Nodes, sub_layer: int, inner: Nodes, computed: dict[str, str], otherwise: Sequence[str]
) -> None:
    """``If(on.N)``: ``computed`` (output name -> value in ``inner``), else ``otherwise``."""
    then = helper.make_graph(
        inner.nodes, f"{inner.scope}.on", [], [_untyped(n) for n in computed.values()]
    )
    through = Nodes(f"{inner.scope}.off")
    passed = [through("Identity", name) for name in otherwise]
    other = helper.make_graph(
        through.nodes, f"{inner.scope}.off", [], [_untyped(n) for n in passed]
    )
    g.nodes.append(
        helper.make_node(
            *("If", [f"on.{sub_layer}"], list(computed)),
            name=f"{inner.scope}.if",
            then_branch=then,
            else_branch=other,
        )
    )


def _untyped(name: str) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def onnx_model(
    name: str,
    g: Nodes,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    constants: Sequence[onnx.TensorProto],
    tensors: Sequence[TensorRef],
) -> onnx.ModelProto:
    """The graph of ``g``; ``constants`` lie inside it, ``tensors`` in the plan's weights file."""
    external = [external_tensor(tensor) for tensor in tensors]
    graph = helper.make_graph(g.nodes, name, inputs, outputs, [*constants, *external])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="fulcrum")
    model.ir_version = IR_VERSION
    return model


def external_tensor(tensor: TensorRef) -> onnx.TensorProto:
    """An initializer that points into the plan's ``weights.bin``."""
    proto = TensorProto(name=tensor.name, data_type=ELEMENT[tensor.type], dims=tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    size = math.prod(tensor.shape) * (4 if tensor.type is TensorType.F32 else 1)
    facts = {"location": WEIGHTS_FILE, "offset": tensor.offset_bytes, "length": size}
    for key, value in facts.items():
        proto.external_data.add(key=key, value=str(value))
    return proto
