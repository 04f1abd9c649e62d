"""Whole plans compared: with or without the draft model, in which kernel, what stays in memory.

What the budget does not hold streams from flash, and a draft model takes memory that could hold
more of the target. So every way to use the budget is searched with its own cycles, and the fastest
wins.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from planner.lanes import Flash, Role, Task
from planner.memory import Model, plan_memory, sub_layer_bytes, widest_pass_bytes
from planner.pass_tables import PassTimes, Streaming
from planner.placement import Assignment, Machine, Stored, target_assignments
from planner.residency import Choice, Load, check_streamable, choose_residency, fastest, read_sizes
from profiles.errors import FulcrumError, InfeasibleError, UnsupportedError
from profiles.profile import DeviceProfile
from profiles.words import AttentionKernel, SubLayerId
from runtime.plan import Decision, DraftModel, Formats, MemoryNeed, Residency

EXACT_GROWTH_TOKENS = 256
"""Step of the cache with exact attention, which looks at all of its capacity."""
FIRST_CHAIN, FIRST_TOKENS = 8, 6.0
"""Drafted tokens of the chain that residency is chosen for, and what it is taken to commit."""
WIDEST_ROWS = 64
"""Of a pass, and of prompts."""
HEAD_ROWS = 32


class Models(msgspec.Struct, frozen=True):
    """What is to be planned."""

    profile: DeviceProfile
    target: Model
    formats: Formats
    stored: Stored
    draft: DraftModel | None
    context: int
    budget_bytes: int

    def machine(self, attention: AttentionKernel, streamed: Sequence[SubLayerId] = ()) -> Machine:
        """Prices of the target."""
        return Machine(
            *(self.profile, self.target.spec, self.formats, self.stored),
            attention=attention,
            streamed=streamed,
        )

    @property
    def flash(self) -> Flash:
        """Where weights stream from."""
        slowdown = self.profile.storage.reading_slowdown
        rate = fastest(read_sizes(self.profile)).bytes_per_s
        return Flash(rate, slowdown.value - 1 if slowdown else 0.0)


class Variant(msgspec.Struct, frozen=True):
    """One way to use the budget."""

    name: str
    assignment: str
    """Where the target runs, in words."""
    times: PassTimes
    need: MemoryNeed
    residency: Residency | None = None
    decision: Decision | None = None
    """On the residency."""

    @property
    def drafts(self) -> bool:
        """Whether the draft model is in memory."""
        return self.times.draft is not None


class Ways(NamedTuple):
    """How the budget can be used."""

    variants: list[Variant]
    refused: tuple[str, ...]
    """What does not fit, and why."""


def ways(models: Models) -> Ways:
    """All that fit into the budget.

    Raises:
        InfeasibleError, UnsupportedError: None does; says what would.
    """
    found: list[Variant] = []
    refusals: list[tuple[str, FulcrumError]] = []
    for drafts in (False, True) if models.draft else (False,):
        resident = list(_resident(models, drafts))
        try:
            found += resident or _streamed(models, drafts)
        except (InfeasibleError, UnsupportedError) as error:
            refusals.append(("with the draft model" if drafts else "without a draft", error))
    if not found:
        raise refusals[0][1]
    return Ways(found, tuple(f"{name}: {error}" for name, error in refusals))


def need_of(models: Models, attention: AttentionKernel, drafts: bool, away: bool) -> MemoryNeed:
    """Memory of a plan; with ``away`` no sub-layer is counted, nor a ring."""
    spec, exact = models.target.spec, attention is AttentionKernel.EXACT
    slots, rows = models.context, min(WIDEST_ROWS, models.context)
    pass_bytes = widest_pass_bytes(spec, attention, rows, slots, HEAD_ROWS if drafts else 8)
    draft, draft_growth_tokens = None, 0
    if drafts and models.draft is not None:
        draft = Model(models.draft.model, models.draft.tensors)
        draft_growth_tokens = models.draft.kv.growth_tokens
        pass_bytes += widest_pass_bytes(draft.spec, models.draft.attention, rows, slots, 8)
    return plan_memory(
        models.target,
        models.context,
        growth_tokens=EXACT_GROWTH_TOKENS if exact else 0,
        pass_bytes=pass_bytes,
        streamed=[SubLayerId(i) for i in range(spec.sub_layers)] if away else (),
        draft=draft,
        draft_growth_tokens=draft_growth_tokens,
    )


def _resident(models: Models, drafts: bool) -> Iterator[Variant]:
    """Plans whose weights are all in memory: chains in fused attention, trees in exact."""
    exact = (AttentionKernel.EXACT,) if drafts else ()
    for attention in (AttentionKernel.FUSED, *exact):
        need = need_of(models, attention, drafts, away=False)
        if need.total_bytes > models.budget_bytes:
            continue
        machine = models.machine(attention)
        for where, assignment in target_assignments(machine):
            times = PassTimes(machine, assignment, draft=_draft(models, drafts))
            yield Variant(_name(attention, drafts, None), where, times, need)


def _streamed(models: Models, drafts: bool) -> Iterator[Variant]:
    """Plans whose target streams in part, in exact attention."""
    check_streamable(models.formats)
    machine = models.machine(AttentionKernel.EXACT)
    for where, assignment in target_assignments(machine):
        loads = [
            _load(models, assignment, drafts, FIRST_CHAIN, FIRST_TOKENS),
            _load(models, assignment, False, 0, 1.0),
        ]
        choice = choose(models, loads if drafts else loads[1:], drafts)
        yield with_residency(models, assignment, where, drafts, choice)


def choose(models: Models, loads: Sequence[Load], drafts: bool) -> Choice:
    """The residency for these cycles."""
    fixed = need_of(models, AttentionKernel.EXACT, drafts, away=True)
    reads, slows = read_sizes(models.profile), models.flash.slows_compute
    return choose_residency(models.budget_bytes, fixed, loads, reads, slows_compute=slows)


def with_residency(
    models: Models, assignment: Assignment, where: str, drafts: bool, choice: Choice
) -> Variant:
    """The plan of a choice."""
    residency = choice.residency
    streaming = _streaming(models, residency) if residency else None
    machine = models.machine(AttentionKernel.EXACT, residency.streamed if residency else ())
    draft = _draft(models, drafts)
    times = PassTimes(machine, assignment, streaming=streaming, draft=draft)
    name = _name(AttentionKernel.EXACT, drafts, residency)
    return Variant(name, where, times, choice.need, residency, choice.decision)


def _load(models: Models, assignment: Assignment, drafts: bool, chain: int, tokens: float) -> Load:
    """A cycle with a chain, for the residency to serve."""
    every = tuple(SubLayerId(i) for i in range(models.target.spec.sub_layers))
    at, rows = min(256, models.context), chain + 1
    here = PassTimes(
        models.machine(AttentionKernel.EXACT), assignment, draft=_draft(models, drafts)
    )
    away = PassTimes(
        models.machine(AttentionKernel.EXACT, every),
        assignment,
        streaming=_streaming(models, Residency(every, 1, 4096)),
    )
    cpu, constant = here.machine.cpu, here.cycle_us
    before: tuple[Task, ...] = ()
    if drafts:
        before = (Task(cpu, here.proposing(1, at).us + constant, Role.DRAFT),) * chain
    head = Task(assignment.head, here.head_us(rows, at), Role.HEAD)
    after = head, Task(cpu, constant, Role.CONSTANT)
    stages = here.stages(rows, at), away.stages(rows, at)
    return Load(f"chain of {chain}" if drafts else "off", tokens, before, *stages, after)


def _streaming(models: Models, residency: Residency) -> Streaming:
    sizes = sub_layer_bytes(models.target)
    bytes_of = {i: sizes[i].streamed for i in residency.streamed}
    return Streaming(bytes_of, residency.slots, models.flash)


def _draft(models: Models, drafts: bool) -> Machine | None:
    draft = models.draft
    if draft is None or not drafts:
        return None
    return Machine(models.profile, draft.model, draft.formats, attention=draft.attention)


def _name(attention: AttentionKernel, drafts: bool, residency: Residency | None) -> str:
    memory = "target in memory"
    if residency is not None:
        memory = f"{len(residency.streamed)} sub-layers streamed"
    return ", ".join((memory, "draft model" if drafts else "no draft model", f"{attention}"))
