"""Writes a draft model into a plan: the folder ``draft``, with weights and graphs of its own."""

import msgspec

from lowering.emission import head_tensors, layer_tensors, write_graphs
from lowering.finite_source import FiniteSource
from lowering.flash_image import write_weights
from lowering.onnx_graphs import head_graph, layers_graph
from lowering.source import ModelSource
from profiles.words import AttentionKernel, Format
from runtime.plan import DRAFT_FOLDER, WEIGHTS_FILE, DraftModel, Formats, GraphKind, KvLayout
from runtime.plan import formats_of as whole
from runtime.plan_writer import PlanWriter, WeightsWriter

EXACT_GROWTH_TOKENS = 64
"""Exact attention looks at all of a cache's capacity."""


def emit_draft(
    source: ModelSource,
    formats: Format | Formats,
    context: int,
    writer: PlanWriter,
    attention: AttentionKernel = AttentionKernel.FUSED,
) -> DraftModel:
    """Quantise ``source`` and write ``draft/weights.bin`` and the graphs beside it.

    ``context`` is the plan's. The fused kernel takes a bias that hides a token tree's siblings from
    one another; what a draft computes is never committed, so its numerics are free. A weight that
    is not finite is an ``InputError``.
    """
    spec, folder = source.spec, f"{DRAFT_FOLDER}/"
    with WeightsWriter(writer.path(folder + WEIGHTS_FILE)) as sink:
        tensors = tuple(write_weights(FiniteSource(source), formats, context, sink))
    weights = msgspec.structs.replace(sink.artefact(), path=folder + WEIGHTS_FILE)
    fused = attention is AttentionKernel.FUSED
    head, layers = head_tensors(tensors), layer_tensors(tensors, attention)
    model = layers_graph(spec, formats, context, attention, layers, biased=fused)
    models = {
        GraphKind.LAYERS: (model, layers),
        GraphKind.HEAD: (head_graph(spec, formats, head), head),
    }
    return DraftModel(
        model=spec,
        formats=whole(formats),
        attention=attention,
        graphs=write_graphs(models, writer, folder),
        weights=weights,
        tensors=tensors,
        kv=KvLayout(0 if fused else EXACT_GROWTH_TOKENS, 8 * spec.layers * spec.kv_dim),
    )
