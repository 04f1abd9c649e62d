"""Which processor runs which sub-layer of a pass: a shortest path over (stage, processor) states.

A decoder is a chain: sub-layers in order, then the LM head; it starts and ends on the CPU, where
the embedding is looked up and the token is chosen. A path through one state per stage prices every
operator, hand-over and synchronisation exactly; convexity needs no test, since a run of stages on
one processor is one segment. Where a processor's memory limit binds, the state also counts the
weight bytes placed there.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec
import networkx as nx

from lowering.linear_nodes import block_matrices
from planner.cost import head_us, sub_layer_us
from planner.roofline import WEIGHT_BYTES
from profiles.errors import InfeasibleError, UnsupportedError
from profiles.profile import DeviceProfile
from profiles.words import (
    AttentionKernel,
    Format,
    Operator,
    ProcessorKind,
    SubLayerId,
    SubLayerKind,
    kind_of,
)
from runtime.model_spec import ModelSpec
from runtime.plan import Formats, TensorRef, formats_of
from runtime.plan_tables import Span

F32_BYTES = 4
MEMORY_STEPS = 256
"""Resolution at which bytes are counted where a memory limit binds."""
PLACEMENT_WIDTHS = (1, 4, 8, 32)
"""Widths whose fastest placements are candidates for the target's."""
PLACEMENT_CONTEXT = 256


class Work(NamedTuple):
    """What a pass has to do."""

    sub_layers: tuple[SubLayerId, ...]
    """Those that run, ascending."""
    width: int
    head_rows: int
    context: int


class Assignment(msgspec.Struct, frozen=True):
    """A processor for each of the 2L sub-layers and for the head."""

    sub_layers: tuple[str, ...]
    head: str


class PlacedPass(msgspec.Struct, frozen=True):
    """A pass under an assignment, priced."""

    spans: tuple[Span, ...]
    head_processor: str
    head_us: float
    """The head with the hand-over to it and back to the CPU."""
    handover_bytes: int
    us: float
    busy_us: dict[str, float]
    """Time by processor."""


class Stored(NamedTuple):
    """Shares of a ``w4`` model's weights that its file stores in more than 4 bits."""

    attention: float
    mlp: float
    head: float

    def share(self, stage: SubLayerId | None) -> float:
        """Of a sub-layer of any layer, or of the head (None)."""
        if stage is None:
            return self.head
        return self.mlp if kind_of(stage) is SubLayerKind.MLP else self.attention


def stored_wide(spec: ModelSpec, tensors: Sequence[TensorRef]) -> Stored:
    """The shares in what was emitted; none in other formats."""
    wide, total = [0, 0, 0], [0, 0, 0]
    for matrix in block_matrices(spec, tensors):
        part = matrix.name.rpartition(".")[2]
        place = 2 if part == "head" else int(part in ("gate_up", "gate", "up", "down"))
        total[place] += matrix.k * matrix.n
        wide[place] += matrix.k * matrix.n * (matrix.bits == 8)
    return Stored(*(w / t if t else 0.0 for w, t in zip(wide, total, strict=True)))


class Machine:
    """Prices of one model in one format on one device; unsupported operators cost no number.

    ``attention`` is the kernel of every pass. The context of exact attention counts the cache's
    slots, of which it reads all.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        spec: ModelSpec,
        formats: Format | Formats,
        stored: Stored | None = None,
        *,
        attention: AttentionKernel = AttentionKernel.FUSED,
        streamed: Collection[SubLayerId] = (),
    ) -> None:
        self.profile = profile
        self.spec = spec
        self.formats = formats_of(formats)
        self.stored = stored or Stored(0.0, 0.0, 0.0)
        self.attention = attention
        self.streamed = frozenset(streamed)
        """Sub-layers whose weights are read in every pass; priced without the reading."""
        self.cpu = next(p.id for p in profile.processors if p.kind is ProcessorKind.CPU)
        self.reasons: dict[str, str] = {}
        """Why a processor was not considered, by processor."""

    def format_of(self, stage: SubLayerId | None) -> Format:
        """Of a sub-layer, or of the head (None)."""
        return self.formats.of(None if stage is None else kind_of(stage))

    def stage_us(self, processor: str, stage: SubLayerId | None, work: Work) -> float | None:
        """Time of a sub-layer, or of the head (None); None where the processor cannot."""
        try:
            fmt = self.format_of(stage)
            us = self._stage_us(processor, stage, work, fmt)
            share = self.stored.share(stage)
            if fmt is not Format.W4 or not share:
                return us
            return (1 - share) * us + share * self._stage_us(processor, stage, work, Format.W8)
        except UnsupportedError as error:
            self.reasons.setdefault(processor, str(error))
            return None

    def _stage_us(self, processor: str, stage: SubLayerId | None, work: Work, fmt: Format) -> float:
        linear = self.profile.processor(processor).supports.get(Operator.LINEAR, ())
        if fmt is Format.W8 and fmt not in linear:
            fmt = Format.W8A8  # of as many bytes
        if stage is None:
            return head_us(self.profile, processor, self.spec, fmt, work.head_rows)
        return sub_layer_us(
            *(self.profile, processor, self.spec, kind_of(stage), fmt),
            *(work.width, work.context),
            attention=self.attention,
            streamed=stage in self.streamed,
        )

    def handover_us(self, source: str, target: str, size_bytes: int) -> float:
        """Handing ``size_bytes`` on; 0 when nothing changes hands."""
        if source == target:
            return 0.0
        ends = [self.profile.processor(name) for name in (source, target)]
        rate = min(end.bandwidth_bytes_per_s.value for end in ends)
        # A processor's sync covers the way there and back; the CPU waits on both.
        sync = ends[1].sync_us.value if target != self.cpu else 0.0
        return sync + 1e6 * size_bytes / rate

    def weight_bytes(self, stage: SubLayerId | None) -> int:
        """Weights of a stage in the format."""
        spec = self.spec
        if stage is None:
            count = spec.hidden * spec.vocab
        elif kind_of(stage) is SubLayerKind.MLP:
            count = 3 * spec.hidden * spec.intermediate
        else:
            count = 2 * spec.hidden * (spec.heads * spec.head_dim + spec.kv_dim)
        wide, narrow_bytes = self.stored.share(stage), WEIGHT_BYTES[self.format_of(stage)]
        return round(count * ((1 - wide) * narrow_bytes + wide * WEIGHT_BYTES[Format.W8]))

    def held_bytes(self, stage: SubLayerId | None) -> int:
        """Weights of a stage that stay with its processor between passes."""
        return 0 if stage in self.streamed else self.weight_bytes(stage)

    def hidden_bytes(self, work: Work) -> int:
        """Hidden rows of a pass."""
        return work.width * self.spec.hidden * F32_BYTES

    def logit_bytes(self, work: Work) -> int:
        """Logits of a pass."""
        return work.head_rows * self.spec.vocab * F32_BYTES


def price(machine: Machine, assignment: Assignment, work: Work) -> PlacedPass | None:
    """``work`` under ``assignment``; None where a processor cannot run its part."""
    spans: list[Span] = []
    here, rows, crossed = machine.cpu, machine.hidden_bytes(work), 0
    busy: dict[str, float] = {}
    for stage in work.sub_layers:
        there = assignment.sub_layers[stage]
        us = machine.stage_us(there, stage, work)
        if us is None:
            return None
        busy[there] = busy.get(there, 0.0) + us
        move = machine.handover_us(here, there, rows)
        crossed += rows if there != here else 0
        if spans and there == here:
            last = spans[-1]
            us += last.compute_us
            spans[-1] = Span(last.first, SubLayerId(stage + 1), there, us, last.transfer_us)
        else:
            spans.append(Span(stage, SubLayerId(stage + 1), there, us, move))
        here = there
    head = machine.stage_us(assignment.head, None, work)
    if head is None:
        return None
    busy[assignment.head] = busy.get(assignment.head, 0.0) + head
    head += machine.handover_us(here, assignment.head, rows)
    head += machine.handover_us(assignment.head, machine.cpu, machine.logit_bytes(work))
    crossed += rows if assignment.head != here else 0
    total = head + sum(span.compute_us + span.transfer_us for span in spans)
    covering = _covering(spans, machine.spec.sub_layers)
    return PlacedPass(covering, assignment.head, head, crossed, total, busy)


def _covering(spans: Sequence[Span], sub_layers: int) -> tuple[Span, ...]:
    """``spans`` widened over the sub-layers that the pass leaves out."""
    firsts = [SubLayerId(0), *(span.first for span in spans[1:])]
    ends = [*firsts[1:], SubLayerId(sub_layers)]
    return tuple(
        msgspec.structs.replace(span, first=first, end=end)
        for span, first, end in zip(spans, firsts, ends, strict=False)
    )


def place(machine: Machine, work: Work) -> Assignment:
    """The assignment of least time; sub-layers that do not run go with their predecessor.

    ``InfeasibleError`` when some stage runs nowhere or does not fit.
    """
    path = _shortest(machine, work, memory=False)
    if path is None or not fits(machine, path, work):
        path = _shortest(machine, work, memory=True)
    if path is None:
        raise InfeasibleError(
            "no processor can hold and run the model",
            where=machine.profile.name,
            found="; ".join(machine.reasons.values()) or "weights beyond the memory limits",
            hint="choose another --target-format",
        )
    *layers, head = path
    by_stage = dict(zip(work.sub_layers, layers, strict=True))
    assigned: list[str] = []
    for sub_layer in range(machine.spec.sub_layers):
        before = assigned[-1] if assigned else (layers[0] if layers else machine.cpu)
        assigned.append(by_stage.get(SubLayerId(sub_layer), before))
    return Assignment(tuple(assigned), head)


def target_assignments(machine: Machine) -> list[tuple[str, Assignment]]:
    """Candidates for where the target runs, by name: fastest per width, and each processor."""
    stages = tuple(SubLayerId(i) for i in range(machine.spec.sub_layers))
    found: dict[Assignment, str] = {}
    for width in PLACEMENT_WIDTHS:
        best = place(machine, Work(stages, width, width, PLACEMENT_CONTEXT))
        found.setdefault(best, f"fastest at width {width}: {describe(best)}")
    for processor in machine.profile.processors:
        uniform = Assignment((processor.id,) * len(stages), processor.id)
        work = Work(stages, 1, 1, PLACEMENT_CONTEXT)
        runs = all(machine.stage_us(processor.id, s, work) is not None for s in (*stages[:2], None))
        if runs and fits(machine, (*uniform.sub_layers, uniform.head), work):
            found.setdefault(uniform, f"all on {processor.id}")
    return [(name, assignment) for assignment, name in found.items()]


def describe(assignment: Assignment) -> str:
    """Processors with the number of sub-layers on each."""
    counts: dict[str, int] = {}
    for name in assignment.sub_layers:
        counts[name] = counts.get(name, 0) + 1
    layers = " + ".join(f"{count} on {name}" for name, count in counts.items())
    return f"{layers}, head on {assignment.head}"


def _limit_bytes(machine: Machine, processor: str) -> float:
    limit = machine.profile.processor(processor).memory_limit_bytes
    return limit.value if limit is not None else float("inf")


def fits(machine: Machine, path: Sequence[str], work: Work) -> bool:
    """Whether the weights of each stage, the head's last, are within its processor's limit."""
    used: dict[str, int] = {}
    for processor, stage in zip(path, (*work.sub_layers, None), strict=True):
        used[processor] = used.get(processor, 0) + machine.held_bytes(stage)
    return all(size <= _limit_bytes(machine, name) for name, size in used.items())


def _shortest(machine: Machine, work: Work, memory: bool) -> list[str] | None:
    """Processors by stage, the head's last; ties go to the processor named first."""
    graph = state_graph(machine, work, memory)
    if "end" not in graph:
        return None
    path = nx.shortest_path(graph, "start", "end", weight="us")
    return [state[1] for state in path[1:-1]]


def state_graph(machine: Machine, work: Work, memory: bool) -> "nx.DiGraph[Any]":
    """States (stage index, processor, memory steps used), edges priced in ``us``.

    Only one processor with a memory limit is counted, which is all that phones have.
    """
    graph: nx.DiGraph[Any] = nx.DiGraph()
    graph.add_node("start")
    limited = [p.id for p in machine.profile.processors if p.memory_limit_bytes] if memory else []
    rows = machine.hidden_bytes(work)
    layer: dict[tuple[str, int], Any] = {(machine.cpu, 0): "start"}
    stages: tuple[SubLayerId | None, ...] = (*work.sub_layers, None)
    for index, stage in enumerate(stages):
        following: dict[tuple[str, int], Any] = {}
        for there in (p.id for p in machine.profile.processors):
            us = machine.stage_us(there, stage, work)
            if us is None:
                continue
            for (here, used), state in layer.items():
                after = used
                if there in limited:
                    step = _limit_bytes(machine, there) / MEMORY_STEPS
                    after += -int(-machine.held_bytes(stage) // step)
                if after > MEMORY_STEPS:
                    continue
                node = (index, there, after)
                graph.add_edge(state, node, us=us + machine.handover_us(here, there, rows))
                following[there, after] = node
        layer = following
    for (here, _), state in layer.items():
        back = machine.handover_us(here, machine.cpu, machine.logit_bytes(work))
        graph.add_edge(state, "end", us=back)
    return graph
