"""What the schema of ``plan.json`` cannot say: numbers that must agree with one another.

Each rule looks at one part of the plan and yields what is wrong with it. Rules run in order, and
a reader stops at the first fault, so that a later rule may rely on what an earlier one checked.
"""

import re
from collections.abc import Iterator

from profiles.words import kind_of
from runtime.cycle_checks import cycle_faults, growth_faults, tree_faults
from runtime.faults import Fault, ascending, covers, length, not_empty, once, outside, tiling
from runtime.model_checks import graph_faults, model_faults, tensor_faults
from runtime.plan import (
    DRAFT_FOLDER,
    PLAN_FILE,
    SEAL_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Artefact,
    ExecutionPlan,
    GraphKind,
)
from runtime.plan_tables import PassKind
from runtime.stream_checks import residency_faults, stream_faults

_ALWAYS = frozenset({GraphKind.LAYERS, GraphKind.HEAD})
_MAX_PATH_CHARACTERS = 255

# A dot may not come first: that leaves out `.`, `..` and hidden files. Backslashes, drive letters
# and control characters are left out by naming what may be in.
_SAFE_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")


def faults(plan: ExecutionPlan) -> Iterator[Fault]:
    """Everything wrong with a plan that fits the schema, most basic first.

    Only the first fault is certain: later ones may follow from it.
    """
    for rule in _RULES:
        yield from rule(plan)


def artefacts(plan: ExecutionPlan) -> Iterator[tuple[str, Artefact]]:
    """Every file of the plan beside ``plan.json``, with the path to it in the document."""
    for index, graph in enumerate(plan.graphs):
        yield f"$.graphs[{index}].artefact", graph.artefact
    yield "$.weights", plan.weights
    yield "$.tokenizer", plan.tokenizer
    if plan.draft:
        for index, graph in enumerate(plan.draft.graphs):
            yield f"$.draft.graphs[{index}].artefact", graph.artefact
        yield "$.draft.weights", plan.draft.weights


def is_safe_path(path: str) -> bool:
    """Whether ``path`` is relative, with forward slashes, and cannot name anything outside."""
    return len(path) <= _MAX_PATH_CHARACTERS and _SAFE_PATH.fullmatch(path) is not None


def _model(plan: ExecutionPlan) -> Iterator[Fault]:
    yield from model_faults(plan.model, "$.model")
    yield from outside("$.context", plan.context, 1, plan.model.max_context)


def _draft(plan: ExecutionPlan) -> Iterator[Fault]:
    draft = plan.draft
    if draft is None:
        return
    yield from model_faults(draft.model, "$.draft.model")
    yield from tensor_faults(draft, "$.draft.tensors")
    yield from graph_faults(draft, _ALWAYS, "$.draft")
    for index, graph in enumerate(draft.graphs):
        path = graph.artefact.path
        # Their weights have to lie beside them
        if path.rpartition("/")[0] != DRAFT_FOLDER:
            where = f"$.draft.graphs[{index}].artefact.path"
            yield Fault(where, "a graph outside the draft's folder", path, f"{DRAFT_FOLDER}/NAME")


def _tensors(plan: ExecutionPlan) -> Iterator[Fault]:
    yield from tensor_faults(plan, "$.tensors")


def _graphs(plan: ExecutionPlan) -> Iterator[Fault]:
    streamed = plan.residency.streamed if plan.residency else ()
    needed = _ALWAYS | {GraphKind(kind_of(sub_layer)) for sub_layer in streamed}
    yield from graph_faults(plan, needed, "$")


def _numerics(plan: ExecutionPlan) -> Iterator[Fault]:
    ranges = [(entry.first, entry.end) for entry in plan.numerics]
    yield from tiling("$.numerics", ranges, ("first", "end"))
    yield from covers("$.numerics", ranges, plan.model.sub_layers)
    for index, entry in enumerate(plan.numerics):
        # There is one graph of all layers
        if entry.attention is not plan.numerics[0].attention:
            where, expected = f"$.numerics[{index}].attention", plan.numerics[0].attention
            yield Fault(where, "attention kernels differ", entry.attention, expected)


def _masks(plan: ExecutionPlan) -> Iterator[Fault]:
    for index, mask in enumerate(plan.masks):
        path = f"$.masks[{index}]"
        if mask.id != index:
            yield Fault(f"{path}.id", "a mask's id is its position", mask.id, index)
        for place, sub_layer in enumerate(mask.skipped):
            where = f"{path}.skipped[{place}]"
            yield from outside(where, sub_layer, 0, plan.model.sub_layers - 1)
        yield from ascending(f"{path}.skipped", mask.skipped)
    if not plan.masks or plan.masks[0].skipped:
        found = plan.masks[0].skipped if plan.masks else "no masks"
        yield Fault("$.masks", "mask 0 is the full target", found, "a mask 0 that skips nothing")


def _buckets(plan: ExecutionPlan) -> Iterator[Fault]:
    ranges = [(bucket.context_from, bucket.context_to) for bucket in plan.buckets]
    yield from tiling("$.buckets", ranges, ("context_from", "context_to"))
    if not ranges or ranges[-1][1] < plan.context:
        found = ranges[-1][1] if ranges else "no buckets"
        yield Fault("$.buckets", "longest contexts have no bucket", found, f">= {plan.context}")
    for index, bucket in enumerate(plan.buckets):
        yield from cycle_faults(plan, index)
        forecast = bucket.forecast
        for name in ("tokens_per_cycle", "drafted_per_cycle"):
            value = getattr(forecast, name)
            yield from outside(f"$.buckets[{index}].forecast.{name}", value, 0, 1024)


def _placements(plan: ExecutionPlan) -> Iterator[Fault]:
    for index, placement in enumerate(plan.placements):
        path = f"$.placements[{index}]"
        yield from outside(f"{path}.bucket", placement.bucket, 0, len(plan.buckets) - 1)
        ranges = [(span.first, span.end) for span in placement.spans]
        yield from tiling(f"{path}.spans", ranges, ("first", "end"))
        model = plan.model
        if placement.kind is PassKind.PROPOSE and plan.draft is not None:
            model = plan.draft.model
        yield from covers(f"{path}.spans", ranges, model.sub_layers)


def _tables(plan: ExecutionPlan) -> Iterator[Fault]:
    tables = plan.tables
    for index, table in enumerate(tables.passes):
        path = f"$.tables.passes[{index}]"
        yield from outside(f"{path}.mask", table.mask, 0, len(plan.masks) - 1)
        for axis in ("widths", "contexts"):
            values = getattr(table, axis)
            yield from not_empty(f"{path}.{axis}", values)
            yield from ascending(f"{path}.{axis}", values)
        yield from length(f"{path}.us", table.us, len(table.widths), "one row for each width")
        for row, entries in enumerate(table.us):
            what = "one entry for each context"
            yield from length(f"{path}.us[{row}]", entries, len(table.contexts), what)
    yield from once("$.tables.passes", [f"{t.kind} under mask {t.mask}" for t in tables.passes])
    yield from not_empty("$.tables.head_widths", tables.head_widths)
    yield from ascending("$.tables.head_widths", tables.head_widths)
    what = "one entry for each width"
    yield from length("$.tables.head_us", tables.head_us, len(tables.head_widths), what)


def _artefacts(plan: ExecutionPlan) -> Iterator[Fault]:
    for where, artefact in artefacts(plan):
        if not is_safe_path(artefact.path):
            expected = "a relative path with forward slashes that stays inside the plan"
            yield Fault(f"{where}.path", "unsafe path", artefact.path, expected)
    # The runtime finds these by name, so it is these that must have a digest
    named = [
        ("$.weights.path", plan.weights.path, WEIGHTS_FILE),
        ("$.tokenizer.path", plan.tokenizer.path, TOKENIZER_FILE),
    ]
    if plan.draft:
        expected = f"{DRAFT_FOLDER}/{WEIGHTS_FILE}"
        named.append(("$.draft.weights.path", plan.draft.weights.path, expected))
    for where, path, name in named:
        if path != name:
            yield Fault(where, "file of another name", path, name)
    paths = [artefact.path for _, artefact in artefacts(plan)]
    yield from once("$", [*paths, PLAN_FILE, SEAL_FILE])


_RULES = (
    _model,
    _numerics,
    _masks,
    tree_faults,
    growth_faults,
    _buckets,
    _placements,
    _tables,
    stream_faults,
    _artefacts,
    _tensors,
    residency_faults,
    _graphs,
    _draft,
)
