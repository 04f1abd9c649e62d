"""The execution plan: the schema of ``plan.json`` (``plan_folder`` reads and writes it).

A plan is a folder: ``plan.json`` (this schema), ``weights.bin`` (one copy of all weights, 4096-byte
aligned, in execution order), ``layers.onnx`` and ``head.onnx`` beside it (ONNX Runtime refuses
external data outside a graph's own folder) and ``tokenizer.json``; with a draft model a folder
``draft`` of the same kind. ``docs/plan-format.md`` describes it for people.
"""

from enum import StrEnum
from math import prod

from profiles.words import AttentionKernel, Format, SubLayerId, SubLayerKind
from runtime.model_spec import ModelSpec
from runtime.plan_cycles import Cycle, Growth, NumericsClass, TreeTemplate
from runtime.plan_tables import CostTables, Placement
from runtime.plan_types import Count, Document, Microseconds, Sha256, Share, Width

FORMAT_MAJOR = 1
FORMAT = f"{FORMAT_MAJOR}.2"
PLAN_FILE = "plan.json"
SEAL_FILE = "plan.sha256"
WEIGHTS_FILE = "weights.bin"
TOKENIZER_FILE = "tokenizer.json"
DRAFT_FOLDER = "draft"
"""Holds the weights and graphs of the draft model."""
ALIGNMENT_BYTES = 4096


class Artefact(Document, frozen=True):
    """A file of the plan."""

    path: str
    """Relative to the plan's folder, with forward slashes."""
    bytes: Count
    sha256: Sha256


class TensorType(StrEnum):
    """Element type of a stored tensor."""

    F32 = "f32"
    U8 = "u8"


_ELEMENT_BYTES = {TensorType.F32: 4, TensorType.U8: 1}


class TensorRef(Document, frozen=True):
    """A tensor inside ``weights.bin``."""

    name: str
    type: TensorType
    shape: tuple[Count, ...]
    offset_bytes: Count
    """From the start of the file, a multiple of 4096."""

    @property
    def size_bytes(self) -> int:
        """Without padding; exact, since Python integers do not overflow."""
        return prod(self.shape) * _ELEMENT_BYTES[self.type]


class Formats(Document, frozen=True):
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
    ATTENTION = "attention"
    """Any one attention sub-layer, its weights being inputs: what a streamed one runs in."""
    MLP = "mlp"
    """Any one MLP, likewise."""


class Graph(Document, frozen=True):
    """An ONNX graph and the tensors of ``weights.bin`` that it takes as constants."""

    kind: GraphKind
    artefact: Artefact
    tensors: tuple[str, ...]


class SkipMask(Document, frozen=True):
    """A set of sub-layers that a pass leaves out; mask 0 is the full target."""

    id: Count
    skipped: tuple[SubLayerId, ...]


class Forecast(Document, frozen=True):
    """What the planner expects of a bucket's cycle on the device: a prediction."""

    tokens_per_cycle: float
    drafted_per_cycle: float
    cycle_us: Microseconds
    ar_us: Microseconds
    """One step of plain autoregressive decoding of this model in this format, placed wherever the
    device does that fastest: what speculation has to beat."""
    acceptance: tuple[Share, ...]
    """Of the draft at depth 1, 2, ..., given that all before it were accepted."""


class Bucket(Document, frozen=True):
    """A range of context lengths with one decision."""

    context_from: Count
    context_to: Count
    """Exclusive."""
    cycle: Cycle
    forecast: Forecast


class KvLayout(Document, frozen=True):
    """Keys and values are f32; with exact attention the values are integers on a grid per channel
    (``docs/numerics.md``)."""

    growth_tokens: Count
    """The cache's capacity is a multiple of this; 0: the whole context at once, of which the system
    gives the pages that are written to (fused attention, whose time does not depend on it)."""
    bytes_per_token: Count


class Residency(Document, frozen=True):
    """Which sub-layers of the target stay in memory, and how the others are read."""

    streamed: tuple[SubLayerId, ...]
    """Read from flash in every pass that needs them, ascending; the others stay in memory."""
    slots: Count
    """Of the ring, for each kind of sub-layer: so many are held or being read."""
    read_bytes: Count
    """Of one read request, a multiple of 4096."""


class DraftModel(Document, frozen=True):
    """A smaller model with the same tokens that drafts; its state is never committed."""

    model: ModelSpec
    formats: Formats
    attention: AttentionKernel
    graphs: tuple[Graph, ...]
    weights: Artefact
    tensors: tuple[TensorRef, ...]
    kv: KvLayout


class Prefill(Document, frozen=True):
    """How a prompt is read."""

    chunk: Width


class SamplingRule(Document, frozen=True):
    """Token at a position = argmax(logits / temperature + Gumbel noise of (seed, position))."""

    generator: str
    """Counter-based generator of the noise."""


class Quality(Document, frozen=True):
    """What the target format costs against f32, on text of the report split."""

    positions: Count
    top1_agreement: Share
    perplexity: float
    f32_perplexity: float


class CalibrationSummary(Document, frozen=True):
    """Where the acceptance numbers come from."""

    digest: str
    """Of the calibration that this plan was made with."""
    prompts: Count
    search_positions: Count
    rescore_positions: Count
    report_positions: Count


class Candidate(Document, frozen=True):
    """One alternative of a decision and its objective."""

    name: str
    value: float


class Decision(Document, frozen=True):
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


class DeviceIdentity(Document, frozen=True):
    """The profile that the plan was priced with."""

    name: str
    soc: str
    """The chip; the runtime compares it with the one it runs on."""
    digest: Sha256
    memory_budget_bytes: Count
    threads: Width
    """Intra-op threads of the CPU."""


class MemoryNeed(Document, frozen=True):
    """Predicted peak of what the runtime holds, by part."""

    weights_bytes: Count
    """Of the target's resident sub-layers and its head."""
    kv_bytes: Count
    """Of target and draft model, at the plan's largest context."""
    interpreter_bytes: Count
    draft_bytes: Count = 0
    """Weights of the draft model."""
    ring_bytes: Count = 0

    @property
    def total_bytes(self) -> int:
        """What has to fit into the budget."""
        parts = self.weights_bytes, self.kv_bytes, self.interpreter_bytes
        return sum(parts) + self.draft_bytes + self.ring_bytes


class ExecutionPlan(Document, frozen=True):
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
    draft: DraftModel | None = None
    trees: tuple[TreeTemplate, ...] = ()
    growths: tuple[Growth, ...] = ()
    residency: Residency | None = None
    """None: all of the target stays in memory."""

    @property
    def part_formats(self) -> Formats:
        """Number format of each part."""
        return self.formats or formats_of(self.target_format)
