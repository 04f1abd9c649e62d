"""What an operator costs on a processor, in microseconds, and how well that is known.

One question, three answers in order: a point of the profile; interpolation between points of the
same operator and format; a roofline, max(bytes / bandwidth, operations / peak) + launch. Where
points exist but do not enclose the question, the nearest is scaled by the ratio of rooflines.
Times hold for the cold device; a thermal state multiplies them (``DeviceProfile.thermal``).
"""

import math
import weakref
from typing import NamedTuple

from planner.point_families import Family, Run, family_of, label, read_family
from planner.roofline import roofline
from profiles.curves import curve, padded, read_curve
from profiles.errors import InputError, UnsupportedError
from profiles.points import CONTEXTUAL
from profiles.profile import (
    SHAPE_OF,
    AttentionShape,
    DeviceProfile,
    GlueShape,
    LinearShape,
    Point,
    Processor,
    Quantity,
    ReadPattern,
    Shape,
)
from profiles.words import AttentionKernel, Format, Operator, Provenance, SubLayerKind
from runtime.model_spec import ModelSpec

TRUST = (
    Provenance.MEASURED,
    Provenance.PAPER,
    Provenance.INTERPOLATED,
    Provenance.DERIVED,
    Provenance.ROOFLINE,
    Provenance.ASSUMED,
)
"""Provenances, best first; a sum is as good as its worst part."""

_RUNS_IN = {
    Format.F32: (Format.F32,),
    Format.W8A16: (Format.W8A16, Format.F32),
    Format.W8A8: (Format.W8A8, Format.F32, Format.W8A16),
    Format.W4: (Format.W4, Format.F32, Format.W8A16),
    Format.W8: (Format.W8, Format.F32, Format.W8A16),
}
"""Formats in which weightless operators of a sub-layer may run: never coarser than its own."""

_STANDS_IN = {
    Operator.EXACT_ATTENTION: Operator.ATTENTION,
    Operator.STREAMED_LINEAR: Operator.LINEAR,
}
"""What prices an operator that a profile does not know."""

_WITH_WEIGHTS = (Operator.LINEAR, Operator.STREAMED_LINEAR)


class Cost(NamedTuple):
    """Time of one operator, or of several in a row."""

    us: float
    provenance: Provenance
    basis: str
    """A short explanation for people."""


class ReadRate(NamedTuple):
    """Rate at which storage delivers blocks of one size."""

    bytes_per_s: float
    provenance: Provenance
    basis: str


class _Tables:
    """What ``cost`` looks up of one profile: points by setting, and answers already given."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.processors = {processor.id: processor for processor in profile.processors}
        self.answers: dict[tuple[object, ...], Cost] = {}
        self.sums: dict[tuple[object, ...], Cost] = {}
        self.families: dict[tuple[object, ...], Family] = {}
        self.points: dict[tuple[object, ...], dict[Shape, dict[Run, Point]]] = {}
        # published at width 1 and run as 32, a point stands at 32; a wider one is nearer to it
        for point in sorted(profile.points, key=lambda point: point.width):
            setting = (point.processor, point.operator, point.format)
            width = padded(point.width, self.processors[point.processor].width_step)
            by_shape = self.points.setdefault(setting, {})
            by_shape.setdefault(point.shape, {})[width, point.context] = point


_TABLES: dict[int, tuple[weakref.ref[DeviceProfile], _Tables]] = {}


def cost(
    profile: DeviceProfile,
    processor: str,
    operator: Operator,
    shape: Shape,
    fmt: Format,
    width: int,
    context: int = 0,
) -> Cost:
    """Time of ``operator`` at ``width`` tokens in a sub-layer of format ``fmt``.

    ``context`` counts the positions that a row of attention sees and is 0 otherwise. Weightless
    operators run in ``running_format``. A processor that lacks the operator, the format or the
    width is an ``UnsupportedError`` that says which. Exact attention and streamed products that
    the profile has no points of are priced as ``ATTENTION`` and ``LINEAR``, which is assumed.
    """
    tables = _tables(profile)
    key = (processor, operator, shape, fmt, width, context)
    answer = tables.answers.get(key)
    if answer is None:
        place = tables.processors.get(processor) or profile.processor(processor)
        _check(place, operator, shape, width, context)
        run_as = running_format(place, operator, fmt)
        run = (padded(width, place.width_step), context)
        answer = tables.answers[key] = _answer(tables, place, operator, shape, run_as, run)
    return answer


def stream_call_us(profile: DeviceProfile, processor: str) -> Quantity:
    """What a streamed sub-layer takes beyond its operators: a call of its own.

    Where nobody measured it, what handing over to the processor takes.
    """
    place = profile.processor(processor)
    return place.stream_call_us or place.sync_us


def running_format(processor: Processor, operator: Operator, fmt: Format) -> Format:
    """The format that ``operator`` of a ``fmt`` sub-layer runs in on ``processor``.

    Linear products run in ``fmt``. Attention and glue have no weights: they run in ``fmt`` where
    the processor has it, else in a finer one. None is an ``UnsupportedError`` with the reason.
    """
    known = operator if operator in processor.supports else _STANDS_IN.get(operator, operator)
    supported = processor.supports.get(known, ())
    candidates = (fmt,) if operator in _WITH_WEIGHTS else _RUNS_IN[fmt]
    for candidate in candidates:
        if candidate in supported:
            return candidate
    raise UnsupportedError(
        f"{processor.id} does not run {operator} of a {fmt} sub-layer",
        found=f"{operator} in {', '.join(supported) or 'no format'}",
        expected=" or ".join(candidates),
        hint="place it on another processor",
    )


def sub_layer_parts(
    spec: ModelSpec,
    kind: SubLayerKind,
    *,
    attention: AttentionKernel = AttentionKernel.FUSED,
    streamed: bool = False,
) -> tuple[tuple[Operator, Shape], ...]:
    """The operators of one sub-layer, in order; gate and up are one product.

    A ``streamed`` one has its weights from flash.
    """
    attended = spec.heads * spec.head_dim
    glue = (Operator.GLUE, GlueShape(spec.hidden))
    linear = Operator.STREAMED_LINEAR if streamed else Operator.LINEAR
    exact = attention is AttentionKernel.EXACT
    attend = Operator.EXACT_ATTENTION if exact else Operator.ATTENTION
    if kind is SubLayerKind.ATTENTION:
        return (
            glue,
            (linear, LinearShape(spec.hidden, attended + 2 * spec.kv_dim)),
            (attend, AttentionShape(spec.heads, spec.kv_heads, spec.head_dim)),
            (linear, LinearShape(attended, spec.hidden)),
        )
    return (
        glue,
        (linear, LinearShape(spec.hidden, 2 * spec.intermediate)),
        (linear, LinearShape(spec.intermediate, spec.hidden)),
    )


def head_parts(spec: ModelSpec) -> tuple[tuple[Operator, Shape], ...]:
    """The operators of the final norm and the LM head."""
    return (
        (Operator.GLUE, GlueShape(spec.hidden)),
        (Operator.LINEAR, LinearShape(spec.hidden, spec.vocab)),
    )


def sub_layer_cost(
    profile: DeviceProfile,
    processor: str,
    spec: ModelSpec,
    kind: SubLayerKind,
    fmt: Format,
    width: int,
    context: int,
    *,
    attention: AttentionKernel = AttentionKernel.FUSED,
    streamed: bool = False,
) -> Cost:
    """Time of one sub-layer of ``spec`` on one processor, without handing data over.

    ``context`` matters to attention only. The provenance is that of the least known operator. A
    ``streamed`` one has its weights in memory already: reading them is not counted, its call is.
    """
    if kind is SubLayerKind.MLP:
        context = 0
    parts = sub_layer_parts(spec, kind, attention=attention, streamed=streamed)
    total = _sum(profile, processor, parts, fmt, width, context)
    if not streamed:
        return total
    call = stream_call_us(profile, processor)
    source = weakest({total.provenance, call.source})
    return Cost(total.us + call.value, source, f"{total.basis}; a call: {call.cite}")


def head_cost(
    profile: DeviceProfile, processor: str, spec: ModelSpec, fmt: Format, width: int
) -> Cost:
    """Time of final norm and LM head for ``width`` rows on one processor."""
    return _sum(profile, processor, head_parts(spec), fmt, width, 0)


def sub_layer_us(
    profile: DeviceProfile,
    processor: str,
    spec: ModelSpec,
    kind: SubLayerKind,
    fmt: Format,
    width: int,
    context: int,
    *,
    attention: AttentionKernel = AttentionKernel.FUSED,
    streamed: bool = False,
) -> float:
    """Microseconds of ``sub_layer_cost``."""
    run = width, context
    return sub_layer_cost(
        *(profile, processor, spec, kind, fmt, *run), attention=attention, streamed=streamed
    ).us


def head_us(
    profile: DeviceProfile, processor: str, spec: ModelSpec, fmt: Format, width: int
) -> float:
    """Microseconds of ``head_cost``."""
    return head_cost(profile, processor, spec, fmt, width).us


def read_rate(
    profile: DeviceProfile, block_bytes: int, pattern: ReadPattern = ReadPattern.SEQUENTIAL
) -> ReadRate:
    """Rate of reading blocks of ``block_bytes`` past the page cache, if measured so.

    Beyond the smallest and largest block measured the nearest rate stands, as ``ROOFLINE``. A
    profile without this pattern is an ``UnsupportedError``.
    """
    reads = [read for read in profile.storage.reads if read.pattern is pattern]
    reads = [read for read in reads if read.direct] or reads
    if not reads:
        raise UnsupportedError(f"profile {profile.name} has no {pattern} reads")
    for read in reads:
        if read.block_bytes == block_bytes:
            rate = read.bytes_per_s
            return ReadRate(rate.value, rate.source, rate.cite)
    line = curve((read.block_bytes, read.bytes_per_s.value) for read in reads)
    sample = read_curve(line, block_bytes, lambda _: 1.0)
    if sample.inside:
        return ReadRate(sample.value, Provenance.INTERPOLATED, f"between {pattern} block sizes")
    return ReadRate(sample.value, Provenance.ROOFLINE, f"nearest {pattern} block size")


def weakest(provenances: set[Provenance]) -> Provenance:
    """The least trusted of ``provenances``."""
    return max(provenances, key=TRUST.index)


def _tables(profile: DeviceProfile) -> _Tables:
    key = id(profile)
    entry = _TABLES.get(key)
    if entry is not None and entry[0]() is profile:
        return entry[1]
    tables = _Tables(profile)
    # by identity: hashing a profile's points at each of 100,000 calls would cost more than they do
    _TABLES[key] = (weakref.ref(profile, lambda _: _TABLES.pop(key, None)), tables)
    return tables


def _check(place: Processor, operator: Operator, shape: Shape, width: int, context: int) -> None:
    if not isinstance(shape, SHAPE_OF[operator]):
        expected = SHAPE_OF[operator].__name__
        raise InputError(f"shape of {operator}", found=type(shape).__name__, expected=expected)
    if not 1 <= width <= place.max_width:
        expected = f"1 to {place.max_width} tokens on {place.id}"
        raise UnsupportedError("width of a pass", found=width, expected=expected)
    if (operator in CONTEXTUAL) != (context > 0):
        expected = "above 0 for attention, 0 otherwise"
        raise InputError(f"context of {operator}", found=context, expected=expected)


def _answer(
    tables: _Tables, place: Processor, operator: Operator, shape: Shape, fmt: Format, run: Run
) -> Cost:
    stand_in = _STANDS_IN.get(operator)
    if stand_in is not None and (place.id, operator, fmt) not in tables.points:
        found = _answer(tables, place, stand_in, shape, fmt, run)
        source = weakest({found.provenance, Provenance.ASSUMED})
        return Cost(found.us, source, f"priced as {stand_in}: {found.basis}")
    points = tables.points.get((place.id, operator, fmt), {})
    exact = points.get(shape, {}).get(run)
    if exact is not None:
        time = exact.time_us
        return Cost(time.value, time.source, f"point at width {exact.width}: {time.cite}")
    bound = roofline(place, shape, fmt, *run)
    if not points:
        return Cost(bound.us, Provenance.ROOFLINE, f"roofline, bound by {bound.bound}")
    key = (place.id, operator, fmt, shape)
    family = tables.families.get(key)
    if family is None:
        family = tables.families[key] = family_of(shape, points)
    sample = read_family(family, place, shape, fmt, run)
    if sample.inside:
        names = ", ".join(label(other) for other in family.shapes[:2])
        return Cost(sample.value, Provenance.INTERPOLATED, f"between points, nearest {names}")
    basis = f"nearest point of {label(family.shapes[0])}, scaled by roofline"
    # rates above the bandwidth come from a cache; they do not hold beyond what was measured
    return Cost(max(sample.value, bound.moving_us), Provenance.ROOFLINE, basis)


def _sum(
    profile: DeviceProfile,
    processor: str,
    parts: tuple[tuple[Operator, Shape], ...],
    fmt: Format,
    width: int,
    context: int,
) -> Cost:
    sums = _tables(profile).sums
    key = (processor, parts, fmt, width, context)
    total = sums.get(key)
    if total is None:
        costs = [
            cost(
                profile,
                processor,
                op,
                shape,
                fmt,
                width,
                context if op in CONTEXTUAL else 0,
            )
            for op, shape in parts
        ]
        worst = max(costs, key=lambda part: TRUST.index(part.provenance))
        us = math.fsum(part.us for part in costs)
        total = Cost(us, worst.provenance, f"{len(costs)} operators, least known: {worst.basis}")
        sums[key] = total
    return total
