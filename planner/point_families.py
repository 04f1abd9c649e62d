"""Points that speak for a shape that has none: which they are, and what is read off them."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from planner.roofline import roofline
from profiles.curves import Grid, Sample, curve, grid, read_grid
from profiles.points import AttentionShape, GlueShape, LinearShape, Point, Shape
from profiles.profile import Processor
from profiles.words import Format

Run = tuple[int, int]
"""Padded width and context of a point."""


class Family(NamedTuple):
    """The points that speak for one shape, as a grid of size (attention: context) by width."""

    table: Grid
    shapes: tuple[Shape, ...]
    """Whose points they are, the most similar first."""


def family_of(shape: Shape, points: Mapping[Shape, Mapping[Run, Point]]) -> Family:
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
    return Family(grid({at: curve(row.items()) for at, row in rows.items()}), tuple(similar))


def read_family(family: Family, place: Processor, shape: Shape, fmt: Format, run: Run) -> Sample:
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


def label(shape: Shape) -> str:
    return " x ".join(str(getattr(shape, field)) for field in shape.__struct_fields__)
