"""Writes what a model becomes in a plan folder: weights, graphs, tokenizer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onnx import ModelProto

from lowering.finite_source import FiniteSource
from lowering.flash_image import write_weights
from lowering.onnx_graphs import head_graph, layers_graph
from lowering.source import ModelSource
from profiles.words import AttentionKernel, Format
from runtime.plan import TOKENIZER_FILE, Artefact, Formats, Graph, GraphKind, TensorRef
from runtime.plan_folder import PlanWriter

HEAD_TENSORS = ("final_norm", "head")
EMBEDDING_TENSORS = ("embed",)
GRID_TENSORS = (".value_grid", ".value_ungrid")
"""Of exact attention alone."""


class Emission(NamedTuple):
    """The files of a compiled model, as the plan lists them."""

    graphs: tuple[Graph, ...]
    weights: Artefact
    tensors: tuple[TensorRef, ...]
    tokenizer: Artefact


def emit(
    source: ModelSource,
    fmt: Format | Formats,
    context: int,
    writer: PlanWriter,
    attention: AttentionKernel = AttentionKernel.FUSED,
) -> Emission:
    """Quantise ``source`` and write weights, graphs and tokenizer.

    ``fmt`` is the format of all parts or of each.
    ``context`` is the largest number of positions that the plan serves. A weight that is not finite
    is an ``InputError``.
    """
    with writer.weights() as sink:
        tensors = tuple(write_weights(FiniteSource(source), fmt, context, sink))
    weights = sink.artefact()
    head, layers = head_tensors(tensors), layer_tensors(tensors, attention)
    models = {
        GraphKind.LAYERS: (layers_graph(source.spec, fmt, context, attention, layers), layers),
        GraphKind.HEAD: (head_graph(source.spec, fmt, head), head),
    }
    graphs = write_graphs(models, writer)
    tokenizer = writer.write(TOKENIZER_FILE, source.tokenizer_json().encode())
    return Emission(graphs, weights, tensors, tokenizer)


def write_graphs(
    models: Mapping[GraphKind, tuple[ModelProto, Sequence[TensorRef]]],
    writer: PlanWriter,
    folder: str = "",
) -> tuple[Graph, ...]:
    """Write graphs, each with the tensors that it takes, into ``folder`` ("" or ``name/``)."""
    return tuple(
        Graph(
            kind,
            writer.write(f"{folder}{kind}.onnx", serialized(model)),
            tuple(tensor.name for tensor in used),
        )
        for kind, (model, used) in models.items()
    )


def head_tensors(tensors: Iterable[TensorRef]) -> list[TensorRef]:
    """Those of ``tensors`` that the head's graph takes."""
    return [tensor for tensor in tensors if tensor.name.split(".")[0] in HEAD_TENSORS]


def layer_tensors(tensors: Iterable[TensorRef], attention: AttentionKernel) -> list[TensorRef]:
    """Those of ``tensors`` that the layers' graph takes with this kernel."""
    fused = attention is AttentionKernel.FUSED
    return [
        tensor
        for tensor in tensors
        if tensor.name.split(".")[0] not in HEAD_TENSORS + EMBEDDING_TENSORS
        and not (fused and tensor.name.endswith(GRID_TENSORS))
    ]


def serialized(model: ModelProto) -> bytes:
    """The same bytes for the same graph."""
    return model.SerializeToString(deterministic=True)
