"""Checks of what streams from flash: the residency, and the tables that price it."""

from collections.abc import Iterator

from profiles.words import AttentionKernel, SubLayerKind, kind_of
from runtime.faults import Fault, ascending, length, not_empty, outside
from runtime.plan import ALIGNMENT_BYTES, ExecutionPlan, Residency
from runtime.weight_ranges import STREAMED_FORMATS, SubLayerBytes, aligned, sub_layer_bytes

_MAX_READ_BYTES = 1 << 26


def residency_faults(plan: ExecutionPlan) -> Iterator[Fault]:
    """Which sub-layers stream, and that their bytes can be read and computed with."""
    residency, path = plan.residency, "$.residency"
    if residency is None:
        return
    sub_layers = plan.model.sub_layers
    yield from not_empty(f"{path}.streamed", residency.streamed)
    for place, sub_layer in enumerate(residency.streamed):
        yield from outside(f"{path}.streamed[{place}]", sub_layer, 0, sub_layers - 1)
    yield from ascending(f"{path}.streamed", residency.streamed)
    yield from outside(f"{path}.slots", residency.slots, 1, sub_layers)
    read = residency.read_bytes
    yield from outside(f"{path}.read_bytes", read, ALIGNMENT_BYTES, _MAX_READ_BYTES)
    if read % ALIGNMENT_BYTES:
        expected = f"a multiple of {ALIGNMENT_BYTES}"
        yield Fault(f"{path}.read_bytes", "unaligned reads", read, expected)
    for kind in SubLayerKind:
        fmt = plan.part_formats.of(kind)
        if fmt not in STREAMED_FORMATS and kind in map(kind_of, residency.streamed):
            expected = " or ".join(STREAMED_FORMATS)
            yield Fault(f"{path}.streamed", f"the {kind} format cannot be streamed", fmt, expected)
    for index, entry in enumerate(plan.numerics):
        if entry.attention is not AttentionKernel.EXACT:
            where, expected = f"$.numerics[{index}].attention", AttentionKernel.EXACT
            yield Fault(where, "streaming needs another kernel", entry.attention, expected)
    yield from _ranges(plan, residency)


def _ranges(plan: ExecutionPlan, residency: Residency) -> Iterator[Fault]:
    """Each streamed sub-layer is one range, and those of a kind are laid out alike."""
    known = sub_layer_bytes(plan.tensors)
    first: dict[SubLayerKind, SubLayerBytes] = {}
    for place, sub_layer in enumerate(residency.streamed):
        where = f"$.residency.streamed[{place}]"
        found = known.get(sub_layer)
        if found is None:
            yield Fault(where, "a sub-layer without tensors", sub_layer, "tensors in $.tensors")
            continue
        at = 0
        for part in found.parts:
            if part.at_bytes != at:
                expected = f"{part.tensor.name!r} {at} bytes behind the first"
                yield Fault(where, "other bytes between its tensors", part.at_bytes, expected)
            at = part.at_bytes + aligned(part.tensor.size_bytes)
        if found.end_bytes > plan.weights.bytes:
            expected = f"<= {plan.weights.bytes}, the length of {plan.weights.path}"
            yield Fault(where, "its last block is cut off", found.end_bytes, expected)
        other = first.setdefault(kind_of(sub_layer), found)
        if other.layout != found.layout:
            expected = f"as the other streamed {kind_of(sub_layer)} has them"
            yield Fault(where, "tensors of other names, shapes or order", sub_layer, expected)


def stream_faults(plan: ExecutionPlan) -> Iterator[Fault]:
    """One table for each bucket where sub-layers stream, else none."""
    streams, path = plan.tables.streams, "$.tables.streams"
    what = "one for each bucket if there is a $.residency, else none"
    yield from length(path, streams, len(plan.buckets) if plan.residency else 0, what)
    for index, table in enumerate(streams):
        for axis in ("widths", "ahead_us"):
            values = getattr(table, axis)
            yield from not_empty(f"{path}[{index}].{axis}", values)
            yield from ascending(f"{path}[{index}].{axis}", values)
        for least in table.ahead_us[:1]:
            yield from outside(f"{path}[{index}].ahead_us[0]", least, 0, 0)
        where = f"{path}[{index}].us"
        yield from length(where, table.us, len(table.widths), "one row for each width")
        for row, entries in enumerate(table.us):
            what = "one entry for each of ahead_us"
            yield from length(f"{where}[{row}]", entries, len(table.ahead_us), what)
