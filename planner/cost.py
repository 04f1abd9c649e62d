"""What an operator costs on a processor, in microseconds, and how well that is known.

One question, three answers in order: a point of the profile; interpolation between points of the
same operator and format; a roofline, max(bytes / bandwidth, operations / peak) + launch. Where
points exist but do not enclose the question, the nearest is scaled by the ratio of rooflines.
Times hold for the cold device; a thermal state multiplies them (``DeviceProfile.thermal``).
"""

import math
import weakref
from typing import NamedTuple

from planner.roofline import roofline
from profiles.curves import Grid, Sample, curve, grid, padded, read_curve, read_grid
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
    ReadPattern,
    Shape,
)
from profiles.words import Format, Operator, Provenance, SubLayerKind
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


_Run = tuple[int, int]
"""Padded width and context of a point."""


class _Tables:
    """What ``cost`` looks up of one profile: points by setting, and answers already given."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.processors = {processor.id: processor for processor in profile.processors}
        self.answers: dict[tuple[object, ...], Cost] = {}
        self.sums: dict[tuple[object, ...], Cost] = {}
        self.families: dict[tuple[object, ...], _Family] = {}
        self.points: dict[tuple[object, ...], dict[Shape, dict[_Run, Point]]] = {}
        # published at width 1 and run as 32, a point stands at 32; a wider one is nearer to it
        for point in sorted(profile.points, key=lambda point: point.width):
            setting = (point.processor, point.operator, point.format)
            width = padded(point.width, self.processors[point.processor].width_step)
            by_shape = self.points.setdefault(setting, {})
            by_shape.setdefault(point.shape, {})[width, point.context] = point


class _Family(NamedTuple):
    """The points that speak for one shape, as a grid of size (attention: context) by width."""

    table: Grid
    shapes: tuple[Shape, ...]
    """Whose points they are, the most similar first."""


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
    width is an ``UnsupportedError`` that says which.
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


def running_format(processor: Processor, operator: Operator, fmt: Format) -> Format:
    """The format that ``operator`` of a ``fmt`` sub-layer runs in on ``processor``.

    Linear products run in ``fmt``. Attention and glue have no weights: they run in ``fmt`` where
    the processor has it, else in a finer one. None is an ``UnsupportedError`` with the reason.
    """
    supported = processor.supports.get(operator, ())
    candidates = (fmt,) if operator is Operator.LINEAR else _RUNS_IN[fmt]
    for candidate in candidates:
        if candidate in supported:
            return candidate
    raise UnsupportedError(
        f"{processor.id} does not run {operator} of a {fmt} sub-layer",
        found=f"{operator} in {', '.join(supported) or 'no format'}",
        expected=" or ".join(candidates),
        hint="place it on another processor",
    )


def sub_layer_parts(spec: ModelSpec, kind: SubLayerKind) -> tuple[tuple[Operator, Shape], ...]:
    """The operators of one sub-layer, in order; gate and up are one product."""
    attended = spec.heads * spec.head_dim
    glue = (Operator.GLUE, GlueShape(spec.hidden))
    if kind is SubLayerKind.ATTENTION:
        return (
            glue,
            (Operator.LINEAR, LinearShape(spec.hidden, attended + 2 * spec.kv_dim)),
            (Operator.ATTENTION, AttentionShape(spec.heads, spec.kv_heads, spec.head_dim)),
            (Operator.LINEAR, LinearShape(attended, spec.hidden)),
        )
    return (
        glue,
        (Operator.LINEAR, LinearShape(spec.hidden, 2 * spec.intermediate)),
        (Operator.LINEAR, LinearShape(spec.intermediate, spec.hidden)),
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
) -> Cost:
    """Time of one sub-layer of ``spec`` on one processor, without handing data over.

    ``context`` matters to attention only. The provenance is that of the least known operator.
    """
    if kind is SubLayerKind.MLP:
        context = 0
    return _sum(profile, processor, sub_layer_parts(spec, kind), fmt, width, context)


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
) -> float:
    """Microseconds of ``sub_layer_cost``."""
    return sub_layer_cost(profile, processor, spec, kind, fmt, width, context).us


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
    tables: _Tables, place: Processor, operator: Operator, shape: Shape, fmt: Format, run: _Run
) -> Cost:
    points = tables.points.get((place.id, operator, fmt), {})
    exact = points.get(shape, {}).get(run)
    bound = roofline(place, shape, fmt, *run)
    if exact is not None:
        time = exact.time_us
        return Cost(time.value, time.source, f"point at width {exact.width}: {time.cite}")
    if not points:
        return Cost(bound.us, Provenance.ROOFLINE, f"roofline, bound by {bound.bound}")
    key = (place.id, operator, fmt, shape)
    family = tables.families.get(key)
    if family is None:
        family = tables.families[key] = _family(shape, points)
    sample = _read(family, place, shape, fmt, run)
    if sample.inside:
        names = ", ".join(_label(other) for other in family.shapes[:2])
        return Cost(sample.value, Provenance.INTERPOLATED, f"between points, nearest {names}")
    basis = f"nearest point of {_label(family.shapes[0])}, scaled by roofline"
    # rates above the bandwidth come from a cache; they do not hold beyond what was measured
    return Cost(max(sample.value, bound.moving_us), Provenance.ROOFLINE, basis)


def _family(shape: Shape, points: dict[Shape, dict[_Run, Point]]) -> _Family:
    """Attention: contexts of the most similar shape. Others: one shape for each size."""
    similar = sorted(points, key=lambda other: (_distance(other, shape), _skew(other, shape)))
    rows: dict[float, dict[int, float]] = {}
    if isinstance(shape, AttentionShape):
        similar = similar[:1]
        for (width, context), point in points[similar[0]].items():
            rows.setdefault(context, {})[width] = point.time_us.value
    else:
        for other in similar:
            times = {width: point.time_us.value for (width, _), point in points[other].items()}
            # of equally large matrices the one of more similar proportions came first and speaks
            rows.setdefault(_size(other), times)
    return _Family(grid({at: curve(row.items()) for at, row in rows.items()}), tuple(similar))


def _read(family: _Family, place: Processor, shape: Shape, fmt: Format, run: _Run) -> Sample:
    width, context = run
    if not isinstance(shape, AttentionShape):

        def by_size(size: float, at_width: float) -> float:
            return roofline(place, _sized(shape, round(size)), fmt, round(at_width)).us

        return read_grid(family.table, _size(shape), width, by_size)

    near = family.shapes[0]

    def by_context(at_context: float, at_width: float) -> float:
        return roofline(place, near, fmt, round(at_width), round(at_context)).us

    sample = read_grid(family.table, context, width, by_context)
    if near == shape:
        return sample
    scale = roofline(place, shape, fmt, width, context).us / by_context(context, width)
    return Sample(sample.value * scale, inside=False)


def _sized(shape: LinearShape | GlueShape, size: int) -> Shape:
    """A shape of the same operator with ``size`` weights or hidden features."""
    return LinearShape(1, size) if isinstance(shape, LinearShape) else GlueShape(size)


def _distance(shape: Shape, other: Shape) -> float:
    return abs(math.log(_size(shape) / _size(other)))


def _size(shape: Shape) -> float:
    match shape:
        case LinearShape(k=k, n=n):
            return k * n
        case AttentionShape(heads=heads, head_dim=head_dim):
            return heads * head_dim
        case GlueShape(hidden=hidden):
            return hidden


def _skew(shape: Shape, other: Shape) -> float:
    if isinstance(shape, LinearShape) and isinstance(other, LinearShape):
        return abs(math.log(shape.k / shape.n) - math.log(other.k / other.n))
    return 0.0


def _label(shape: Shape) -> str:
    return " x ".join(str(getattr(shape, field)) for field in shape.__struct_fields__)


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
