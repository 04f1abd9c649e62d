"""The execution plan: the schema of ``plan.json`` (``plan_folder`` reads and writes it).

A plan is a folder: ``plan.json`` (this schema), ``weights.bin`` (one copy of all weights, 4096-byte
aligned, in execution order), ``layers.onnx`` and ``head.onnx`` beside it (ONNX Runtime refuses
external data outside a graph's own folder) and ``tokenizer.json``. ``docs/plan-format.md``
describes it for people.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from profiles.words import AttentionKernel, Format, ProcessorKind, SubLayerId, SubLayerKind
from runtime.model_spec import ModelSpec

FORMAT_MAJOR = 1
FORMAT = f"{FORMAT_MAJOR}.1"
PLAN_FILE = "plan.json"
SEAL_FILE = "plan.sha256"
WEIGHTS_FILE = "weights.bin"
TOKENIZER_FILE = "tokenizer.json"
ALIGNMENT_BYTES = 4096

Count = Annotated[int, Meta(ge=0, le=1 << 48)]
WIDEST_PASS = 1024
"""Rows; also the slots of the cache past the plan's context, for rows that are only padding."""
Width = Annotated[int, Meta(ge=1, le=WIDEST_PASS)]
Microseconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _Document(msgspec.Struct, frozen=True):
    """Base of every struct in ``plan.json``; fields of newer minor versions are ignored."""


class Artefact(_Document, frozen=True):
    """A file of the plan."""

    path: str
    """Relative to the plan's folder, with forward slashes."""
    bytes: Count
    sha256: Sha256


class TensorType(StrEnum):
    """Element type of a stored tensor."""

    F32 = "f32"
    U8 = "u8"


class TensorRef(_Document, frozen=True):
    """A tensor inside ``weights.bin``."""

    name: str
    type: TensorType
    shape: tuple[Count, ...]
    offset_bytes: Count
    """From the start of the file, a multiple of 4096."""


class Formats(_Document, frozen=True):
    """Number format of each part of a model; the embedding is stored in the head's."""

    attention: Format
    mlp: Format
    head: Format

    def of(self, kind: SubLayerKind | None) -> Format:
        """Of a kind of sub-layer, or of the head (None)."""
        if kind is None:
            return self.head
        return self.mlp if kind is SubLayerKind.MLP else self.attention

    def __str__(self) -> str:
        parts = self.attention, self.mlp, self.head
        if len(set(parts)) == 1:
            return self.head.value
        names = ("attention", "mlp", "head")
        return ",".join(f"{name}={fmt}" for name, fmt in zip(names, parts, strict=True))


def formats_of(asked: Format | Formats) -> Formats:
    """One format for all parts, or the parts as they are."""
    return asked if isinstance(asked, Formats) else Formats(asked, asked, asked)


class GraphKind(StrEnum):
    """What an ONNX graph of the plan computes."""

    LAYERS = "layers"
    """Hidden rows through all sub-layers, each behind a switch."""
    HEAD = "head"
    """Final norm and LM head: hidden rows to logits."""


class Graph(_Document, frozen=True):
    """An ONNX graph and the tensors of ``weights.bin`` that it takes as constants."""

    kind: GraphKind
    artefact: Artefact
    tensors: tuple[str, ...]


class NumericsClass(_Document, frozen=True):
    """How a range of target sub-layers computes in every pass whose state is committed.

    Two passes agree bit by bit exactly if they run in the same class.
    """

    first: SubLayerId
    end: SubLayerId
    """One past the last sub-layer."""
    processor: str
    processor_kind: ProcessorKind
    format: Format
    min_width: Width
    """Narrowest pass; narrower ones are padded to it."""
    width_step: Width
    """Pass widths are padded to a multiple of this on the device."""
    attention: AttentionKernel = AttentionKernel.EXACT


class SkipMask(_Document, frozen=True):
    """A set of sub-layers that a pass leaves out; mask 0 is the full target."""

    id: Count
    skipped: tuple[SubLayerId, ...]


class DraftSource(StrEnum):
    """Who proposes tokens in a cycle."""

    OFF = "off"
    """Nobody: the cycle is one step of plain autoregressive decoding."""
    SKIP = "skip"
    """The target under a skip mask (KnapSpec)."""
    NGRAM = "ngram"
    """The continuation of the latest earlier occurrence of the context's last tokens."""


class Cycle(_Document, frozen=True):
    """Draft, verify, commit."""

    draft: DraftSource
    length: Count
    """Drafted tokens (a chain); 0 when OFF."""
    mask: Count = 0
    """Skip mask of the drafting passes, for SKIP."""
    ngram_min: Count = 0
    ngram_max: Count = 0
    """Shortest and longest context suffix that is looked up, for NGRAM."""
    lone: bool = False
    """For OFF: the one row runs alone, in faster kernels whose sums are in another order. Rows that
    were computed so never meet a draft: a plan decodes alone in every bucket or in none."""


OFF = Cycle(draft=DraftSource.OFF, length=0)
"""Plain decoding as a cycle, in passes whose rows agree with those of any draft's verify pass."""
ALONE = Cycle(draft=DraftSource.OFF, length=0, lone=True)
"""Plain decoding at its fastest, for plans that never draft."""


class Forecast(_Document, frozen=True):
    """What the planner expects of a bucket's cycle on the device: a prediction."""

    tokens_per_cycle: float
    drafted_per_cycle: float
    cycle_us: Microseconds
    ar_us: Microseconds
    """One step of plain autoregressive decoding of this model in this format, placed wherever the
    device does that fastest: what speculation has to beat."""
    acceptance: tuple[Share, ...]
    """Of the draft at depth 1, 2, ..., given that all before it were accepted."""


class Bucket(_Document, frozen=True):
    """A range of context lengths with one decision."""

    context_from: Count
    context_to: Count
    """Exclusive."""
    cycle: Cycle
    forecast: Forecast


class Span(_Document, frozen=True):
    """A run of sub-layers on one processor within a pass, as the planner placed it."""

    first: SubLayerId
    end: SubLayerId
    processor: str
    compute_us: Microseconds
    transfer_us: Microseconds
    """Handing the hidden rows to this processor."""


class PassKind(StrEnum):
    """What a pass is for."""

    AR = "ar"
    DRAFT = "draft"
    VERIFY = "verify"
    PREFILL = "prefill"


class Placement(_Document, frozen=True):
    """Where the sub-layers of one pass of one bucket run, and what that is predicted to take."""

    bucket: Count
    kind: PassKind
    width: Width
    context: Count
    spans: tuple[Span, ...]
    head_processor: str
    head_rows: Count
    head_us: Microseconds
    handover_bytes: Count
    """Bytes of hidden rows that cross from span to span."""


class PassTable(_Document, frozen=True):
    """Predicted device time of a pass under one mask and one placement."""

    kind: PassKind
    mask: Count
    widths: tuple[Width, ...]
    contexts: tuple[Count, ...]
    us: tuple[tuple[Microseconds, ...], ...]
    """By width, then by context."""


class CostTables(_Document, frozen=True):
    """All that the runtime looks up; it never simulates."""

    passes: tuple[PassTable, ...]
    head_widths: tuple[Width, ...]
    head_us: tuple[Microseconds, ...]
    cycle_us: Microseconds
    """Constant of a pass: the call, sampling, bookkeeping. A chain of n pays it n + 1 times."""
    ngram_us: Microseconds
    """One n-gram lookup."""


class KvLayout(_Document, frozen=True):
    """Keys and values are f32; with exact attention the values are integers on a grid per channel
    (``docs/numerics.md``)."""

    growth_tokens: Count
    """The cache's capacity is a multiple of this; 0: the whole context at once, of which the system
    gives the pages that are written to (fused attention, whose time does not depend on it)."""
    bytes_per_token: Count


class Prefill(_Document, frozen=True):
    """How a prompt is read."""

    chunk: Width


class SamplingRule(_Document, frozen=True):
    """Token at a position = argmax(logits / temperature + Gumbel noise of (seed, position))."""

    generator: str
    """Counter-based generator of the noise."""


class Quality(_Document, frozen=True):
    """What the target format costs against f32, on text of the report split."""

    positions: Count
    top1_agreement: Share
    perplexity: float
    f32_perplexity: float


class CalibrationSummary(_Document, frozen=True):
    """Where the acceptance numbers come from."""

    digest: str
    """Of the calibration that this plan was made with."""
    prompts: Count
    search_positions: Count
    rescore_positions: Count
    report_positions: Count


class Candidate(_Document, frozen=True):
    """One alternative of a decision and its objective."""

    name: str
    value: float


class Decision(_Document, frozen=True):
    """What a planner pass chose and why."""

    name: str
    """The pass, with its bucket: ``cycle[0]``."""
    chosen: str
    objective: str
    """What was maximised or minimised, with its unit."""
    value: float
    solver: str
    gap: float | None
    """Relative optimality gap; None where no bound is known."""
    candidates: tuple[Candidate, ...]
    """Best first, the chosen one included."""
    flips_when: str
    """The nearest change of an input that would change the choice."""
    note: str = ""


class DeviceIdentity(_Document, frozen=True):
    """The profile that the plan was priced with."""

    name: str
    soc: str
    """The chip; the runtime compares it with the one it runs on."""
    digest: Sha256
    memory_budget_bytes: Count
    threads: Width
    """Intra-op threads of the CPU."""


class MemoryNeed(_Document, frozen=True):
    """Predicted peak of what the runtime holds, by part."""

    weights_bytes: Count
    kv_bytes: Count
    """At the plan's largest context."""
    interpreter_bytes: Count


class ExecutionPlan(_Document, frozen=True):
    """Everything decided ahead of time."""

    format: str
    model: ModelSpec
    device: DeviceIdentity
    target_format: Format
    """Of the attention; of all parts where ``formats`` is absent."""
    numerics: tuple[NumericsClass, ...]
    context: Count
    """Largest number of positions (prompt and output) that the plan serves."""
    prefill: Prefill
    masks: tuple[SkipMask, ...]
    buckets: tuple[Bucket, ...]
    hysteresis_tokens: Count
    placements: tuple[Placement, ...]
    tables: CostTables
    graphs: tuple[Graph, ...]
    weights: Artefact
    tensors: tuple[TensorRef, ...]
    tokenizer: Artefact
    kv: KvLayout
    sampling: SamplingRule
    quality: Quality
    calibration: CalibrationSummary
    memory: MemoryNeed
    energy_j_per_token: float | None
    """Predicted for the first bucket, where the profile has the power of every processor used."""
    decisions: tuple[Decision, ...]
    assumptions: tuple[str, ...]
    """What the predictions rest on, for people."""
    formats: Formats | None = None

    @property
    def part_formats(self) -> Formats:
        """Number format of each part."""
        return self.formats or formats_of(self.target_format)


def misused_lone(cycle: Cycle, classes: Sequence[NumericsClass]) -> str | None:
    """Why ``cycle`` may not be lone in a plan of these numerics; None if it may, or is not."""
    if cycle.lone and cycle.draft is not DraftSource.OFF:
        return "a draft is verified in a pass of several rows"
    if cycle.lone and not runs_alone(classes):
        return "the plan has no pass of a single row"
    return None


def runs_alone(classes: Sequence[NumericsClass]) -> bool:
    """Whether one row can be decoded unpadded (``Cycle.lone``): the CPU runs all sub-layers."""
    return all(
        entry.processor_kind is ProcessorKind.CPU
        and entry.width_step == 1
        and entry.attention is AttentionKernel.FUSED
        for entry in classes
    )
