"""What the schema of ``plan.json`` cannot say: numbers that must agree with one another.

Each rule looks at one part of the plan and yields what is wrong with it. Rules run in order, and
a reader stops at the first fault, so that a later rule may rely on what an earlier one checked.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from profiles.words import kind_of
from runtime.model_spec import MAX_HEAD_DIM, MAX_ROPE_FACTOR, MIN_ROPE_FACTOR, ModelSpec
from runtime.plan import (
    ALIGNMENT_BYTES,
    PLAN_FILE,
    SEAL_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Artefact,
    ExecutionPlan,
    GraphKind,
)
from runtime.plan_cycles import DraftSource, misused_lone

EMBEDDING = "embed"
"""Name of the table that turns token ids into hidden rows."""

MAX_CONTEXT = 1 << 24
_MODEL_LIMITS = {
    "layers": 1024,
    "hidden": 1 << 16,
    "intermediate": 1 << 20,
    "heads": 1024,
    "kv_heads": 1024,
    "head_dim": MAX_HEAD_DIM,
    "vocab": 1 << 21,
    "max_context": MAX_CONTEXT,
}
# The pass that verifies is one row wider than the draft, and a pass has at most 1024 rows
_MAX_DRAFT_TOKENS = 1023
_MAX_NGRAM_TOKENS = 64
_MAX_TENSOR_DIMENSIONS = 8
_MAX_PATH_CHARACTERS = 255

# A dot may not come first: that leaves out `.`, `..` and hidden files. Backslashes, drive letters
# and control characters are left out by naming what may be in.
_SAFE_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")


class Fault(NamedTuple):
    """One thing that is wrong with a plan."""

    where: str
    """Path into the document, such as ``$.graphs[1].artefact.path``."""
    what: str
    found: object
    expected: object


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


def is_safe_path(path: str) -> bool:
    """Whether ``path`` is relative, with forward slashes, and cannot name anything outside."""
    return len(path) <= _MAX_PATH_CHARACTERS and _SAFE_PATH.fullmatch(path) is not None


def _model(plan: ExecutionPlan) -> Iterator[Fault]:
    model = plan.model
    for name, limit in _MODEL_LIMITS.items():
        yield from _outside(f"$.model.{name}", getattr(model, name), 1, limit)
    if model.heads % model.kv_heads:
        expected = f"a divisor of heads, {model.heads}"
        yield Fault("$.model.kv_heads", "heads do not share keys evenly", model.kv_heads, expected)
    if model.head_dim % 2:
        what = "rotary embedding pairs the halves of a head"
        yield Fault("$.model.head_dim", what, model.head_dim, "an even number")
    yield from _outside("$.model.norm_eps", model.norm_eps, 1e-30, 1)
    yield from _outside("$.model.rope.theta", model.rope.theta, 1, 1e15)
    if len(model.rope.factors) not in (0, model.head_dim // 2):
        found, expected = len(model.rope.factors), f"none, or {model.head_dim // 2}"
        yield Fault("$.model.rope.factors", "one factor for each pair of a head", found, expected)
    for index, factor in enumerate(model.rope.factors):
        where = f"$.model.rope.factors[{index}]"
        yield from _outside(where, factor, MIN_ROPE_FACTOR, MAX_ROPE_FACTOR)
    yield from _outside("$.context", plan.context, 1, model.max_context)
    yield from _tokens(model)


def _tokens(model: ModelSpec) -> Iterator[Fault]:
    tokenizer = model.tokenizer
    path = "$.model.tokenizer"
    for index, token in enumerate(tokenizer.eos_ids):
        yield from _outside(f"{path}.eos_ids[{index}]", token, 0, model.vocab - 1)
    if tokenizer.bos_id is not None:
        yield from _outside(f"{path}.bos_id", tokenizer.bos_id, 0, model.vocab - 1)
    elif tokenizer.add_bos:
        yield Fault(f"{path}.add_bos", "no token to put first", True, "a bos_id, or add_bos false")


def _numerics(plan: ExecutionPlan) -> Iterator[Fault]:
    ranges = [(entry.first, entry.end) for entry in plan.numerics]
    yield from _tiling("$.numerics", ranges, ("first", "end"))
    yield from _covers("$.numerics", ranges, plan.model.sub_layers)
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
            yield from _outside(where, sub_layer, 0, plan.model.sub_layers - 1)
        yield from _ascending(f"{path}.skipped", mask.skipped)
    if not plan.masks or plan.masks[0].skipped:
        found = plan.masks[0].skipped if plan.masks else "no masks"
        yield Fault("$.masks", "mask 0 is the full target", found, "a mask 0 that skips nothing")


def _buckets(plan: ExecutionPlan) -> Iterator[Fault]:
    ranges = [(bucket.context_from, bucket.context_to) for bucket in plan.buckets]
    yield from _tiling("$.buckets", ranges, ("context_from", "context_to"))
    if not ranges or ranges[-1][1] < plan.context:
        found = ranges[-1][1] if ranges else "no buckets"
        yield Fault("$.buckets", "longest contexts have no bucket", found, f">= {plan.context}")
    for index, bucket in enumerate(plan.buckets):
        yield from _cycle(plan, index)
        forecast = bucket.forecast
        for name in ("tokens_per_cycle", "drafted_per_cycle"):
            value = getattr(forecast, name)
            yield from _outside(f"$.buckets[{index}].forecast.{name}", value, 0, 1024)


def _cycle(plan: ExecutionPlan, index: int) -> Iterator[Fault]:
    cycle = plan.buckets[index].cycle
    path = f"$.buckets[{index}].cycle"
    if why := misused_lone(cycle, plan.numerics):
        yield Fault(f"{path}.lone", why, True, False)
    elif cycle.lone is not plan.buckets[0].cycle.lone:
        what = "rows decoded alone would meet rows of wider passes"
        yield Fault(f"{path}.lone", what, cycle.lone, plan.buckets[0].cycle.lone)
    if cycle.draft is DraftSource.OFF:
        yield from _outside(f"{path}.length", cycle.length, 0, 0)
    else:
        yield from _outside(f"{path}.length", cycle.length, 1, _MAX_DRAFT_TOKENS)
    yield from _outside(f"{path}.mask", cycle.mask, 0, len(plan.masks) - 1)
    if cycle.draft is DraftSource.NGRAM:
        yield from _outside(f"{path}.ngram_max", cycle.ngram_max, 1, _MAX_NGRAM_TOKENS)
        yield from _outside(f"{path}.ngram_min", cycle.ngram_min, 1, cycle.ngram_max)


def _placements(plan: ExecutionPlan) -> Iterator[Fault]:
    for index, placement in enumerate(plan.placements):
        path = f"$.placements[{index}]"
        yield from _outside(f"{path}.bucket", placement.bucket, 0, len(plan.buckets) - 1)
        ranges = [(span.first, span.end) for span in placement.spans]
        yield from _tiling(f"{path}.spans", ranges, ("first", "end"))
        yield from _covers(f"{path}.spans", ranges, plan.model.sub_layers)


def _tables(plan: ExecutionPlan) -> Iterator[Fault]:
    tables = plan.tables
    for index, table in enumerate(tables.passes):
        path = f"$.tables.passes[{index}]"
        yield from _outside(f"{path}.mask", table.mask, 0, len(plan.masks) - 1)
        for axis in ("widths", "contexts"):
            values = getattr(table, axis)
            yield from _not_empty(f"{path}.{axis}", values)
            yield from _ascending(f"{path}.{axis}", values)
        yield from _length(f"{path}.us", table.us, len(table.widths), "one row for each width")
        for row, entries in enumerate(table.us):
            what = "one entry for each context"
            yield from _length(f"{path}.us[{row}]", entries, len(table.contexts), what)
    yield from _once("$.tables.passes", [f"{t.kind} under mask {t.mask}" for t in tables.passes])
    yield from _not_empty("$.tables.head_widths", tables.head_widths)
    yield from _ascending("$.tables.head_widths", tables.head_widths)
    what = "one entry for each width"
    yield from _length("$.tables.head_us", tables.head_us, len(tables.head_widths), what)


def _artefacts(plan: ExecutionPlan) -> Iterator[Fault]:
    for where, artefact in artefacts(plan):
        if not is_safe_path(artefact.path):
            expected = "a relative path with forward slashes that stays inside the plan"
            yield Fault(f"{where}.path", "unsafe path", artefact.path, expected)
    # The runtime finds these two by name, so it is these that must have a digest
    for where, path, name in (
        ("$.weights.path", plan.weights.path, WEIGHTS_FILE),
        ("$.tokenizer.path", plan.tokenizer.path, TOKENIZER_FILE),
    ):
        if path != name:
            yield Fault(where, "file of another name", path, name)
    paths = [artefact.path for _, artefact in artefacts(plan)]
    yield from _once("$", [*paths, PLAN_FILE, SEAL_FILE])


def _tensors(plan: ExecutionPlan) -> Iterator[Fault]:
    for index, tensor in enumerate(plan.tensors):
        path = f"$.tensors[{index}]"
        if len(tensor.shape) > _MAX_TENSOR_DIMENSIONS or 0 in tensor.shape:
            expected = f"up to {_MAX_TENSOR_DIMENSIONS} dimensions, each at least 1"
            yield Fault(f"{path}.shape", "unusable shape", tensor.shape, expected)
        if tensor.offset_bytes % ALIGNMENT_BYTES:
            expected = f"a multiple of {ALIGNMENT_BYTES}"
            yield Fault(f"{path}.offset_bytes", "unaligned tensor", tensor.offset_bytes, expected)
        end = tensor.offset_bytes + tensor.size_bytes
        if end > plan.weights.bytes:
            expected = f"<= {plan.weights.bytes}, the length of {plan.weights.path}"
            yield Fault(path, "tensor ends outside the weights", f"{end} bytes", expected)
    yield from _once("$.tensors", [tensor.name for tensor in plan.tensors])
    for one, other in pairwise(sorted(plan.tensors, key=lambda tensor: tensor.offset_bytes)):
        end = one.offset_bytes + one.size_bytes
        if other.offset_bytes < end:
            found = f"{other.name!r} at {other.offset_bytes}"
            yield Fault("$.tensors", "tensors overlap", found, f">= {end}, the end of {one.name!r}")
    yield from _embedding(plan)


def _embedding(plan: ExecutionPlan) -> Iterator[Fault]:
    """The tensors that the runtime itself looks into: the table, and its scales."""
    expected = (plan.model.vocab, plan.model.hidden)
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    found = shapes.get(EMBEDDING)
    if found != expected:
        where = f"$.tensors, {EMBEDDING!r}"
        yield Fault(where, "no such embedding table", found, f"[vocab, hidden], {expected}")
    for name, shape in shapes.items():
        if name.startswith(f"{EMBEDDING}.") and shape[:1] != expected[:1]:
            where = f"$.tensors, {name!r}"
            yield Fault(where, "no row for each token", shape, f"{expected[0]} rows")


def _graphs(plan: ExecutionPlan) -> Iterator[Fault]:
    known = {tensor.name for tensor in plan.tensors}
    for index, graph in enumerate(plan.graphs):
        for place, name in enumerate(graph.tensors):
            if name not in known:
                where = f"$.graphs[{index}].tensors[{place}]"
                yield Fault(where, "unknown tensor", name, "a name from $.tensors")
    kinds = Counter(graph.kind for graph in plan.graphs)
    needed = {GraphKind.LAYERS, GraphKind.HEAD}
    if plan.residency:
        needed |= {GraphKind(kind_of(sub_layer)) for sub_layer in plan.residency.streamed}
    for kind in GraphKind:
        expected = int(kind in needed)
        if kinds[kind] != expected:
            yield Fault("$.graphs", f"graphs of kind {kind}", kinds[kind], f"exactly {expected}")


_RULES = (
    _model,
    _numerics,
    _masks,
    _buckets,
    _placements,
    _tables,
    _artefacts,
    _tensors,
    _graphs,
)


def _outside(where: str, value: float, low: float, high: float) -> Iterator[Fault]:
    # Written so that NaN, which compares false with everything, is outside
    if not low <= value <= high:
        expected = low if low == high else f"{low} to {high}"
        yield Fault(where, "number out of range", value, expected)


def _not_empty(where: str, values: Sequence[object]) -> Iterator[Fault]:
    if not values:
        yield Fault(where, "empty list", "no entries", "at least 1")


def _length(where: str, values: Sequence[object], length: int, what: str) -> Iterator[Fault]:
    if len(values) != length:
        yield Fault(where, "list of the wrong length", len(values), f"{length}, {what}")


def _ascending(where: str, values: Sequence[int]) -> Iterator[Fault]:
    for place, (one, other) in enumerate(pairwise(values), start=1):
        if other <= one:
            yield Fault(f"{where}[{place}]", "numbers must ascend", other, f"> {one}")


def _tiling(
    where: str, ranges: Sequence[tuple[int, int]], names: tuple[str, str]
) -> Iterator[Fault]:
    """Ranges follow one another from 0 without gap or overlap, and none is empty."""
    position = 0
    for index, (first, end) in enumerate(ranges):
        if first != position:
            yield Fault(f"{where}[{index}].{names[0]}", "gap or overlap", first, position)
        if end <= first:
            yield Fault(f"{where}[{index}].{names[1]}", "empty range", end, f"> {first}")
        position = end


def _covers(where: str, ranges: Sequence[tuple[int, int]], end: int) -> Iterator[Fault]:
    found = ranges[-1][1] if ranges else "an empty list"
    if found != end:
        yield Fault(where, "does not cover all sub-layers", found, f"an end at {end}")


def _once(where: str, names: Sequence[str]) -> Iterator[Fault]:
    for name, count in Counter(names).items():
        if count > 1:
            yield Fault(where, "given more than once", name, "different names")
