"""The sample plan with a draft model, token trees, and sub-layers that stream from flash."""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
from sample_plans import CONTEXT, HIDDEN, VOCAB, sample_plan, write_sample_files

from profiles.words import AttentionKernel, Format, SubLayerId
from runtime.plan import (
    ALIGNMENT_BYTES,
    Artefact,
    Bucket,
    DraftModel,
    ExecutionPlan,
    Graph,
    GraphKind,
    KvLayout,
    Residency,
    TensorRef,
    TensorType,
    formats_of,
)
from runtime.plan_cycles import Cycle, DraftShape, DraftSource, Growth, HeadOrder, TreeTemplate
from runtime.plan_tables import StreamTable
from runtime.plan_writer import PlanWriter

TREE = TreeTemplate(parents=(0, 0, 1, 1, 3), ranks=(0, 1, 0, 1, 0))
GROWTH = Growth(24, 6, 4, 8, bands=(0.0, 0.3, 0.8), hits=((0.2, 0.5, 0.9), (0.1, 0.2, 0.3)))
STREAMED = tuple(map(SubLayerId, (1, 2, 4, 7)))
_FILES = {
    "attention.onnx": b"placeholder for the graph of an attention\n",
    "mlp.onnx": b"placeholder for the graph of an MLP\n",
    "draft/layers.onnx": b"placeholder for the graph of the draft's layers\n",
    "draft/head.onnx": b"placeholder for the graph of the draft's head\n",
}
_TABLE = np.arange(VOCAB * HIDDEN, dtype=np.uint8).reshape(VOCAB, HIDDEN)


def lever_plan() -> ExecutionPlan:
    """A valid plan; ``write_lever_folder`` writes the files that it lists."""
    plan = sample_plan()
    cycles = (
        Cycle(DraftSource.MODEL, 24, shape=DraftShape.ONLINE, head=HeadOrder.PATH),
        Cycle(DraftSource.MODEL, 5, shape=DraftShape.STATIC),
        Cycle(DraftSource.MODEL, 3),
    )
    buckets = tuple(
        Bucket(bucket.context_from, bucket.context_to, cycle, bucket.forecast)
        for bucket, cycle in zip(plan.buckets, cycles, strict=True)
    )
    stream = StreamTable((1, 8, 32), (0.0, 5000.0), ((9000.0, 7000.0),) * 3)
    return msgspec.structs.replace(
        plan,
        buckets=buckets,
        graphs=(
            *plan.graphs,
            Graph(GraphKind.ATTENTION, _artefact("attention.onnx"), ()),
            Graph(GraphKind.MLP, _artefact("mlp.onnx"), ()),
        ),
        tables=msgspec.structs.replace(plan.tables, streams=(stream,) * 3),
        draft=_draft(),
        trees=(TREE,),
        growths=(GROWTH,),
        residency=Residency(STREAMED, slots=2, read_bytes=1 << 20),
    )


def write_lever_folder(path: Path) -> ExecutionPlan:
    """Write ``lever_plan`` and its files."""
    plan = lever_plan()
    with PlanWriter(path) as writer:
        write_sample_files(writer)
        for relative, data in _FILES.items():
            writer.write(relative, data)
        with writer.weights("draft/weights.bin") as weights:
            weights.add("embed", _TABLE)
        assert plan.draft is not None
        assert weights.artefact() == plan.draft.weights
        writer.commit(plan)
    return plan


def _draft() -> DraftModel:
    data = _TABLE.tobytes() + bytes(-_TABLE.nbytes % ALIGNMENT_BYTES)
    graphs = (
        Graph(GraphKind.LAYERS, _artefact("draft/layers.onnx"), ()),
        Graph(GraphKind.HEAD, _artefact("draft/head.onnx"), ("embed",)),
    )
    return DraftModel(
        model=msgspec.structs.replace(sample_plan().model, name="sample-1l", layers=1),
        formats=formats_of(Format.W8A16),
        attention=AttentionKernel.FUSED,
        graphs=graphs,
        weights=Artefact("draft/weights.bin", len(data), hashlib.sha256(data).hexdigest()),
        tensors=(TensorRef("embed", TensorType.U8, (VOCAB, HIDDEN), 0),),
        kv=KvLayout(growth_tokens=0, bytes_per_token=CONTEXT),
    )


def _artefact(relative: str) -> Artefact:
    data = _FILES[relative]
    return Artefact(relative, len(data), hashlib.sha256(data).hexdigest())
