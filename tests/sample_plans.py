"""A small plan for tests: four layers, an NPU and a CPU, three buckets with a draft each.

The numbers are made up but consistent. The graphs are placeholders: nothing here can be run.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiles.words import Format, ProcessorKind, SubLayerId
from runtime.model_spec import ModelSpec, RopeSpec, TokenizerSpec
from runtime.plan import (
    ALIGNMENT_BYTES,
    FORMAT,
    PLAN_FILE,
    SEAL_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Artefact,
    Bucket,
    CalibrationSummary,
    Candidate,
    Decision,
    DeviceIdentity,
    ExecutionPlan,
    Forecast,
    Graph,
    GraphKind,
    KvLayout,
    MemoryNeed,
    Prefill,
    Quality,
    SamplingRule,
    SkipMask,
    TensorRef,
    TensorType,
)
from runtime.plan_cycles import Cycle, DraftSource, NumericsClass
from runtime.plan_tables import CostTables, PassKind, PassTable, Placement, Span
from runtime.plan_writer import PlanWriter

LAYERS = 4
HIDDEN = 8
VOCAB = 32
CONTEXT = 2048

LAYERS_GRAPH = "layers.onnx"
HEAD_GRAPH = "head.onnx"
_FILES = {
    LAYERS_GRAPH: b"placeholder for the graph of the layers\n",
    HEAD_GRAPH: b"placeholder for the graph of the head\n",
    TOKENIZER_FILE: b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}\n',
}

_WIDTHS = (1, 2, 4, 8, 32)
_CONTEXTS = (0, 256, 1024, 2048)
_NPU_END = SubLayerId(6)
_END = SubLayerId(2 * LAYERS)


def sample_plan() -> ExecutionPlan:
    """A valid plan; ``write_sample_folder`` writes the files that it lists."""
    tensors, weights = _weights_layout()
    return ExecutionPlan(
        format=FORMAT,
        model=_model(),
        device=DeviceIdentity(
            name="oneplus12",
            soc="SM8650",
            digest=hashlib.sha256(b"device").hexdigest(),
            memory_budget_bytes=6 << 30,
            threads=4,
        ),
        target_format=Format.W8A16,
        numerics=(
            NumericsClass(SubLayerId(0), _NPU_END, "npu", ProcessorKind.NPU, Format.W8A16, 32, 32),
            NumericsClass(_NPU_END, _END, "cpu", ProcessorKind.CPU, Format.W8A16, 2, 1),
        ),
        context=CONTEXT,
        prefill=Prefill(chunk=32),
        masks=(SkipMask(0, ()), SkipMask(1, (SubLayerId(2), SubLayerId(5), SubLayerId(6)))),
        buckets=_buckets(),
        hysteresis_tokens=32,
        placements=tuple(_placements()),
        tables=_tables(),
        graphs=(
            Graph(GraphKind.LAYERS, _artefact(LAYERS_GRAPH), tuple(t.name for t in tensors[1:-1])),
            Graph(GraphKind.HEAD, _artefact(HEAD_GRAPH), ("final_norm", "embed")),
        ),
        weights=weights,
        tensors=tensors,
        tokenizer=_artefact(TOKENIZER_FILE),
        kv=KvLayout(growth_tokens=256, bytes_per_token=LAYERS * 2 * 4 * 4),
        sampling=SamplingRule("philox4x32-10"),
        quality=Quality(4096, top1_agreement=0.981, perplexity=14.37, f32_perplexity=14.21),
        calibration=CalibrationSummary(
            hashlib.sha256(b"calibration").hexdigest(), 36, 6144, 6144, 4096
        ),
        memory=MemoryNeed(weights.bytes, CONTEXT * LAYERS * 2 * 4 * 4, 40 << 20),
        energy_j_per_token=None,
        decisions=_decisions(),
        assumptions=("thermal state cold", "NPU linear layers from published figures"),
    )


def sample_tensors() -> dict[str, NDArray[np.float32] | NDArray[np.uint8]]:
    """The weights behind ``sample_plan``, in execution order; always the same values."""
    random = np.random.default_rng(0)
    tensors: dict[str, NDArray[np.float32] | NDArray[np.uint8]] = {}
    tensors["embed"] = random.integers(0, 256, (VOCAB, HIDDEN), dtype=np.uint8)
    for layer in range(LAYERS):
        for part, rows in (("qkv", 16), ("o", 8), ("gate_up", 32), ("down", 16)):
            values = random.integers(0, 256, (rows, HIDDEN), dtype=np.uint8)
            tensors[f"layers.{layer}.{part}"] = values
    tensors["final_norm"] = random.standard_normal(HIDDEN, dtype=np.float32)
    return tensors


def write_sample_folder(path: Path) -> ExecutionPlan:
    """Write ``sample_plan`` and its files, some 90 KB, to the folder ``path``."""
    plan = sample_plan()
    with PlanWriter(path) as writer:
        write_sample_files(writer)
        writer.commit(plan)
    return plan


def write_sample_files(writer: PlanWriter) -> None:
    """All that ``sample_plan`` lists; ``plan.json`` and its seal are written by ``commit``."""
    for relative, data in _FILES.items():
        writer.write(relative, data)
    with writer.weights() as weights:
        for name, array in sample_tensors().items():
            weights.add(name, array)


def write_document(folder: Path, data: bytes) -> None:
    """Replace ``plan.json`` and seal it, as somebody does who edits it on purpose."""
    (folder / PLAN_FILE).write_bytes(data)
    (folder / SEAL_FILE).write_text(f"{hashlib.sha256(data).hexdigest()}  plan.json\n")


def _artefact(relative: str) -> Artefact:
    data = _FILES[relative]
    return Artefact(relative, len(data), hashlib.sha256(data).hexdigest())


def _weights_layout() -> tuple[tuple[TensorRef, ...], Artefact]:
    """Laid out here once more, without the writer, so that a test may compare the two."""
    refs: list[TensorRef] = []
    data = b""
    for name, array in sample_tensors().items():
        kind = TensorType.F32 if array.dtype == np.float32 else TensorType.U8
        refs.append(TensorRef(name, kind, array.shape, len(data)))
        data += array.tobytes()
        data += bytes(-len(data) % ALIGNMENT_BYTES)
    return tuple(refs), Artefact(WEIGHTS_FILE, len(data), hashlib.sha256(data).hexdigest())


def _model() -> ModelSpec:
    return ModelSpec(
        name="sample-4l",
        architecture="llama",
        layers=LAYERS,
        hidden=HIDDEN,
        intermediate=16,
        heads=2,
        kv_heads=1,
        head_dim=4,
        vocab=VOCAB,
        max_context=CONTEXT,
        norm_eps=1e-5,
        rope=RopeSpec(theta=10000.0),
        tied_head=True,
        tokenizer=TokenizerSpec(
            bos_id=1,
            add_bos=True,
            eos_ids=(2, 7),
            chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
            digest=_artefact(TOKENIZER_FILE).sha256,
        ),
        weights_digest=hashlib.sha256(b"source weights").hexdigest(),
    )


def _buckets() -> tuple[Bucket, ...]:
    ngram = Cycle(DraftSource.NGRAM, length=7, ngram_min=1, ngram_max=3)
    skip = Cycle(DraftSource.SKIP, length=3, mask=1)
    off = Cycle(DraftSource.OFF, length=0)
    return (
        Bucket(0, 256, ngram, Forecast(1.9, 4.2, 2100.0, 1500.0, (0.48, 0.61, 0.66))),
        Bucket(256, 1024, skip, Forecast(2.6, 3.0, 3900.0, 1720.0, (0.82, 0.79, 0.77))),
        Bucket(1024, CONTEXT, off, Forecast(1.0, 0.0, 2150.0, 2150.0, ())),
    )


def _placements() -> Iterator[Placement]:
    for index, bucket in enumerate(_buckets()):
        context = bucket.context_to
        draft = bucket.cycle.draft
        yield _split(index, PassKind.AR, 1, context)
        if draft is not DraftSource.OFF:
            yield _split(index, PassKind.VERIFY, bucket.cycle.length + 1, context)
        if draft is DraftSource.SKIP:
            span = Span(SubLayerId(0), _END, "cpu", 640.0 + context / 8, 0.0)
            yield Placement(index, PassKind.DRAFT, 1, context, (span,), "cpu", 1, 90.0, 0)
        yield _split(index, PassKind.PREFILL, 32, context)


def _split(bucket: int, kind: PassKind, width: int, context: int) -> Placement:
    """Most of the layers on the NPU, the last one and the head on the CPU."""
    spans = (
        Span(SubLayerId(0), _NPU_END, "npu", 900.0 + context / 16, 25.0),
        Span(_NPU_END, _END, "cpu", 160.0 * width**0.5 + context / 32, 20.0),
    )
    head_rows = 1 if kind is PassKind.PREFILL else width
    handover_bytes = 2 * width * HIDDEN * 4
    return Placement(
        bucket, kind, width, context, spans, "cpu", head_rows, 90.0 * head_rows, handover_bytes
    )


def _tables() -> CostTables:
    def us(scale: float) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(scale * (1000.0 + 20.0 * width + context / 4) for context in _CONTEXTS)
            for width in _WIDTHS
        )

    return CostTables(
        passes=(
            PassTable(PassKind.AR, 0, _WIDTHS[:1], _CONTEXTS, us(1.1)[:1]),
            PassTable(PassKind.DRAFT, 1, _WIDTHS[:2], _CONTEXTS, us(0.6)[:2]),
            PassTable(PassKind.VERIFY, 0, _WIDTHS, _CONTEXTS, us(1.1)),
            PassTable(PassKind.PREFILL, 0, _WIDTHS[-1:], _CONTEXTS, us(1.2)[-1:]),
        ),
        head_widths=_WIDTHS,
        head_us=tuple(90.0 * width for width in _WIDTHS),
        cycle_us=300.0,
        ngram_us=15.0,
    )


def _decisions() -> tuple[Decision, ...]:
    def cycle(bucket: int, value: float, *ranked: tuple[str, float]) -> Decision:
        return Decision(
            name=f"cycle[{bucket}]",
            chosen=ranked[0][0],
            objective="maximise tokens per second",
            value=value,
            solver="exhaustive",
            gap=0.0,
            candidates=tuple(Candidate(name, tokens) for name, tokens in ranked),
            flips_when=f"acceptance at depth 1 changes enough for {ranked[1][0]}",
        )

    return (
        Decision(
            name="layers[1]",
            chosen="skip 2, 5, 6",
            objective="maximise tokens per second of the drafting chain",
            value=666.7,
            solver="OR-Tools knapsack",
            gap=0.0,
            candidates=(
                Candidate("skip 2, 5, 6", 666.7),
                Candidate("hidden-state path", 641.0),
                Candidate("first 4 sub-layers", 512.3),
            ),
            flips_when="agreement of the chosen mask falls by 0.03",
            note="sub-layers 0 and 1 are protected",
        ),
        cycle(0, 904.8, ("ngram 7", 904.8), ("skip 3", 701.2), ("off", 666.7)),
        cycle(1, 666.7, ("skip 3", 666.7), ("ngram 7", 598.4), ("off", 581.4)),
        cycle(2, 465.1, ("off", 465.1), ("skip 2", 452.0)),
        Decision(
            name="placement[0]",
            chosen="npu 0-6, cpu 6-8",
            objective="minimise microseconds of a verifying pass",
            value=1459.5,
            solver="shortest path",
            gap=0.0,
            candidates=(Candidate("npu 0-6, cpu 6-8", 1459.5), Candidate("cpu 0-8", 2210.0)),
            flips_when="a transfer takes 775 us",
        ),
    )
