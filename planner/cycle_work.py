"""A bucket's cycle as the simulator takes it: from the plan's own prices, or priced on a device."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from planner.inspect.figures import draft_passes
from planner.lanes import CycleWork, Flash, Role, Stage, Task
from planner.pass_tables import PassTimes
from planner.placement import PlacedPass, Work
from planner.simulate import ring_bytes
from profiles.errors import IncompatibleError
from profiles.words import ProcessorKind, SubLayerId
from runtime.plan import Bucket, ExecutionPlan
from runtime.plan_cycles import Cycle, DraftShape, DraftSource, HeadOrder
from runtime.plan_tables import PassKind, Placement, Span
from runtime.pricing import PriceList
from runtime.weight_ranges import aligned, sub_layer_bytes


class Shape(NamedTuple):
    """What passes a cycle has on average."""

    levels: tuple[int, ...]
    """Rows of each drafting pass."""
    rows: int
    """Of the pass of the target."""
    head_passes: float
    """Of one row each, along the path; 0: one over all rows."""


def cycle_shape(plan: ExecutionPlan, index: int) -> Shape:
    """The passes of bucket ``index``: drafts whose length varies have their mean length."""
    bucket = plan.buckets[index]
    cycle, drafted = bucket.cycle, bucket.forecast.drafted_per_cycle
    varies = cycle.draft is DraftSource.NGRAM or cycle.shape is DraftShape.ONLINE
    rows = 1 + (round(drafted) if varies and drafted else cycle.length)
    along = cycle.head is HeadOrder.PATH
    tokens = max(1.0, bucket.forecast.tokens_per_cycle)
    return Shape(_levels(plan, cycle, rows), rows, tokens if along else 0.0)


def _levels(plan: ExecutionPlan, cycle: Cycle, rows: int) -> tuple[int, ...]:
    if cycle.draft in (DraftSource.OFF, DraftSource.NGRAM):
        return ()
    passes = draft_passes(plan, cycle)
    if cycle.shape is DraftShape.CHAIN:
        return (1,) * passes
    if cycle.shape is DraftShape.ONLINE:
        passes = max(1, min(passes, rows - 1))
        return (min(plan.growths[cycle.tree].batch, -(-(rows - 1) // passes)),) * passes
    depths = [0]
    template = plan.trees[cycle.tree]
    for parent in template.parents:
        depths.append(depths[parent] + 1)
    internal = {*template.parents}
    return tuple(sum(depths[node] == level for node in internal) for level in range(passes))


def bucket_context(bucket: Bucket) -> int:
    """The context that a bucket is priced at."""
    return max(1, (bucket.context_from + bucket.context_to) // 2)


def streamed_bytes(plan: ExecutionPlan) -> dict[SubLayerId, int]:
    """Bytes of each sub-layer in the flash image, in whole blocks, whether or not it streams."""
    return {at: aligned(found.bytes) for at, found in sub_layer_bytes(plan.tensors).items()}


def planned_flash(plan: ExecutionPlan, slows_compute: float = 0.0) -> Flash | None:
    """The flash that the plan's stream tables were made with; None where nothing streams.

    Their longest time ahead is what fills the ring.
    """
    if plan.residency is None or not plan.tables.streams:
        return None
    full_us = plan.tables.streams[0].ahead_us[-1]
    sizes = streamed_bytes(plan)
    away = [Stage(s, "", 0.0, 0.0, sizes.get(s, 0)) for s in plan.residency.streamed]
    filled = ring_bytes(away, plan.residency.slots)
    return Flash(1e6 * filled / full_us, slows_compute) if full_us and filled else None


def planned_work(plan: ExecutionPlan, index: int) -> CycleWork:
    """The cycle of bucket ``index`` as the plan prices it.

    The time of a span is spread over its sub-layers by their weights.

    Raises:
        IncompatibleError: The plan does not say where the bucket's passes run.
    """
    cycle, shape = plan.buckets[index].cycle, cycle_shape(plan, index)
    kind = PassKind.AR if cycle.draft is DraftSource.OFF else PassKind.VERIFY
    passing = _placement(plan, index, kind)
    if passing is None:
        raise IncompatibleError(
            "the plan does not say where its passes run",
            where=f"$.buckets[{index}]",
            hint="name a device to price them on with --device",
        )
    prices, cpu = PriceList(plan.tables), _cpu(plan)
    before = [*_lookup(cycle, cpu, plan.tables.ngram_us)]
    for level, rows in enumerate(shape.levels, start=1):
        before += _planned_draft(plan, index, prices, rows, cpu, f"pass {level}")
    if shape.head_passes:
        head_us = shape.head_passes * prices.head_us(1)
    else:
        head_us = prices.head_us(shape.rows) if plan.tables.head_us else passing.head_us
    stages = tuple(_stages(plan, passing, _scale(plan, passing, prices, kind, shape.rows)))
    return CycleWork(tuple(before), stages, _after(passing.head_processor, cpu, head_us, prices))


def device_work(plan: ExecutionPlan, index: int, times: PassTimes) -> CycleWork:
    """The same, priced with ``times``."""
    bucket, shape = plan.buckets[index], cycle_shape(plan, index)
    context = bucket_context(bucket)
    head, cycle = times.target.head, bucket.cycle
    before = [*_lookup(cycle, times.machine.cpu, plan.tables.ngram_us)]
    skipped = next((m.skipped for m in plan.masks if m.id == cycle.mask), ())
    for level, rows in enumerate(shape.levels, start=1):
        if cycle.draft is DraftSource.MODEL:
            placed = times.proposing(rows, context)
        else:
            placed = times.drafting(skipped, context)
        before += _placed_tasks(placed, f"pass {level}")
        before.append(Task(times.machine.cpu, times.cycle_us, Role.CONSTANT))
    if shape.head_passes:
        head_us = shape.head_passes * times.head_us(1, context)
    else:
        head_us = times.head_us(shape.rows, context)
    constant = Task(times.machine.cpu, times.cycle_us, Role.CONSTANT)
    after = (Task(head, head_us, Role.HEAD), constant)
    stages = _lone(times, context) if cycle.lone else times.stages(shape.rows, context)
    return CycleWork(tuple(before), stages, after)


def _lone(times: PassTimes, context: int) -> tuple[Stage, ...]:
    """One row alone, on the CPU."""
    work = Work(times.all, 1, 1, context)
    costs = [times.machine.stage_us(times.machine.cpu, s, work) or 0.0 for s in times.all]
    return tuple(Stage(s, times.machine.cpu, us) for s, us in zip(times.all, costs, strict=True))


def _lookup(cycle: Cycle, processor: str, ngram_us: float) -> Iterator[Task]:
    if cycle.draft is DraftSource.NGRAM:
        yield Task(processor, ngram_us, Role.DRAFT, "lookup")


def _after(head: str, cpu: str, head_us: float, prices: PriceList) -> tuple[Task, ...]:
    return Task(head, head_us, Role.HEAD), Task(cpu, prices.cycle_us, Role.CONSTANT)


def _cpu(plan: ExecutionPlan) -> str:
    """The plan's CPU by name, if it uses one: it looks up, samples and keeps the books."""
    kinds = {entry.processor: entry.processor_kind for entry in plan.numerics}
    return next((name for name, kind in kinds.items() if kind is ProcessorKind.CPU), "cpu")


def _placement(plan: ExecutionPlan, index: int, kind: PassKind) -> Placement | None:
    return next((p for p in plan.placements if p.bucket == index and p.kind is kind), None)


def _planned_draft(
    plan: ExecutionPlan, index: int, prices: PriceList, rows: int, cpu: str, label: str
) -> Iterator[Task]:
    """A drafting pass; placed in the plan for one row, of more rows the tables know the sum."""
    cycle = plan.buckets[index].cycle
    kind = PassKind.PROPOSE if cycle.draft is DraftSource.MODEL else PassKind.DRAFT
    placed = _placement(plan, index, kind)
    processor = placed.head_processor if placed is not None else cpu
    if placed is not None and placed.width == rows:
        yield from _span_tasks(placed.spans, label)
        yield Task(processor, placed.head_us, Role.DRAFT, label)
    else:
        us = prices.pass_us(kind, cycle.mask, rows, bucket_context(plan.buckets[index]))
        yield Task(processor, us, Role.DRAFT, label)
    yield Task(cpu, prices.cycle_us, Role.CONSTANT)


def _placed_tasks(placed: PlacedPass, label: str) -> Iterator[Task]:
    yield from _span_tasks(placed.spans, label)
    yield Task(placed.head_processor, placed.head_us, Role.DRAFT, label)


def _span_tasks(spans: Sequence[Span], label: str) -> Iterator[Task]:
    for span in spans:
        yield Task(span.processor, span.transfer_us + span.compute_us, Role.DRAFT, label)


def _scale(
    plan: ExecutionPlan, placed: Placement, prices: PriceList, kind: PassKind, rows: int
) -> float:
    """How much shorter the mean pass is than the placed one; known where nothing streams."""
    known = {(table.kind, table.mask) for table in plan.tables.passes}
    if plan.tables.streams or (kind, 0) not in known or placed.width == rows:
        return 1.0
    full = prices.pass_us(kind, 0, placed.width, placed.context)
    return prices.pass_us(kind, 0, rows, placed.context) / full if full else 1.0


def _stages(plan: ExecutionPlan, placed: Placement, scale: float) -> Iterator[Stage]:
    sizes = streamed_bytes(plan)
    away = frozenset(plan.residency.streamed if plan.residency else ())
    for span in placed.spans:
        inside = [SubLayerId(s) for s in range(span.first, span.end)]
        shares = _shares(inside, sizes)
        for sub_layer in inside:
            us = scale * span.compute_us * shares[sub_layer]
            move = span.transfer_us if sub_layer == span.first else 0.0
            size = sizes.get(sub_layer, 0) if sub_layer in away else 0
            yield Stage(sub_layer, span.processor, us, move, size)


def _shares(
    sub_layers: Sequence[SubLayerId], sizes: Mapping[SubLayerId, int]
) -> dict[SubLayerId, float]:
    total = sum(sizes.get(s, 0) for s in sub_layers)
    if not total:
        return {s: 1 / len(sub_layers) for s in sub_layers}
    return {s: sizes.get(s, 0) / total for s in sub_layers}
