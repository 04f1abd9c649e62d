"""Writes what a model becomes in a plan folder: weights, graphs, tokenizer."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from onnx import ModelProto

from lowering.finite_source import FiniteSource
from lowering.flash_image import write_weights
from lowering.onnx_graphs import head_graph, layers_graph
from lowering.source import ModelSource
from lowering.streamed_graphs import streamed_graph
from profiles.errors import UnsupportedError
from profiles.words import AttentionKernel, Format, SubLayerId, SubLayerKind, kind_of
from runtime.model_spec import ModelSpec
from runtime.plan import TOKENIZER_FILE, Artefact, Formats, Graph, GraphKind, TensorRef
from runtime.plan_folder import PlanWriter
from runtime.weight_ranges import split_name, sub_layer_bytes

HEAD_TENSORS = ("final_norm", "head")
EMBEDDING_TENSORS = ("embed",)
ROTARY_TENSORS = ("rope.cos", "rope.sin")
GRID_TENSORS = (".value_grid", ".value_ungrid")
"""Of exact attention alone."""


class Emission(NamedTuple):
    """The files of a compiled model, as the plan lists them."""

    graphs: tuple[Graph, ...]
    weights: Artefact
    tensors: tuple[TensorRef, ...]
    tokenizer: Artefact


class FileSink(Protocol):
    """Where graphs go: ``runtime.plan_folder.PlanWriter``."""

    def write(self, relative: str, data: bytes) -> Artefact:
        """Write a file whole and say what it is."""
        ...


class EmittedWeights(NamedTuple):
    """What does not depend on how the model is decoded."""

    weights: Artefact
    tensors: tuple[TensorRef, ...]
    tokenizer: Artefact


def emit(
    source: ModelSource,
    fmt: Format | Formats,
    context: int,
    writer: PlanWriter,
    attention: AttentionKernel = AttentionKernel.FUSED,
    streamed: Collection[SubLayerId] = (),
) -> Emission:
    """Quantise ``source`` and write weights, graphs and tokenizer.

    ``fmt`` is the format of all parts or of each.
    ``context`` is the largest number of positions that the plan serves. A weight that is not finite
    is an ``InputError``.
    """
    weights, tensors, tokenizer = emit_weights(source, fmt, context, writer)
    graphs = emit_graphs(source.spec, fmt, context, attention, tensors, writer, streamed)
    return Emission(graphs, weights, tensors, tokenizer)


def emit_weights(
    source: ModelSource, fmt: Format | Formats, context: int, writer: PlanWriter
) -> EmittedWeights:
    """Quantise ``source`` and write its weights, and its tokenizer; see ``emit``."""
    with writer.weights() as sink:
        tensors = tuple(write_weights(FiniteSource(source), fmt, context, sink))
    tokenizer = writer.write(TOKENIZER_FILE, source.tokenizer_json().encode())
    return EmittedWeights(sink.artefact(), tensors, tokenizer)


def emit_graphs(
    spec: ModelSpec,
    fmt: Format | Formats,
    context: int,
    attention: AttentionKernel,
    tensors: Sequence[TensorRef],
    writer: FileSink,
    streamed: Collection[SubLayerId] = (),
) -> tuple[Graph, ...]:
    """Write the graphs over weights that are written already.

    ``streamed`` sub-layers, which need exact attention, are not in the graph of the layers; there
    is one of each of their kinds instead.

    Raises:
        UnsupportedError: A streamed sub-layer has a format or a kernel that cannot be streamed.
    """
    head = head_tensors(tensors)
    layers = layer_tensors(tensors, attention, streamed)
    models = {
        GraphKind.LAYERS: (layers_graph(spec, fmt, context, attention, layers, streamed), layers),
        GraphKind.HEAD: (head_graph(spec, fmt, head), head),
    }
    if streamed and attention is not AttentionKernel.EXACT:
        raise UnsupportedError("only exact attention can stream from flash", found=attention)
    ranges = sub_layer_bytes(tensors)
    rotation = [tensor for tensor in tensors if tensor.name in ROTARY_TENSORS]
    for kind in SubLayerKind:
        first = next((each for each in sorted(streamed) if kind_of(each) is kind), None)
        if first is not None:
            constants = rotation if kind is SubLayerKind.ATTENTION else []
            model = streamed_graph(spec, fmt, context, kind, ranges[first], constants)
            models[GraphKind(kind)] = model, constants
    return write_graphs(models, writer)


def write_graphs(
    models: Mapping[GraphKind, tuple[ModelProto, Sequence[TensorRef]]],
    writer: FileSink,
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


def layer_tensors(
    tensors: Iterable[TensorRef],
    attention: AttentionKernel,
    streamed: Collection[SubLayerId] = (),
) -> list[TensorRef]:
    """Those of ``tensors`` that the layers' graph takes with this kernel."""
    fused = attention is AttentionKernel.FUSED
    return [
        tensor
        for tensor in tensors
        if tensor.name.split(".")[0] not in HEAD_TENSORS + EMBEDDING_TENSORS
        and not (fused and tensor.name.endswith(GRID_TENSORS))
        and not ((split := split_name(tensor.name)) and split[0] in streamed)
    ]


def serialized(model: ModelProto) -> bytes:
    """The same bytes for the same graph."""
    return model.SerializeToString(deterministic=True)
