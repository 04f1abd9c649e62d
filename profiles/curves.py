"""Interpolation between measured points: straight lines between logarithms.

Times of operators are near powers of size, width and context over a stretch, which are straight
lines on logarithmic axes; between two points the line never leaves the values of the two, so a
curve through rising points rises and one through positive points is positive.

Outside the measured range nothing is interpolated: the nearest value is scaled by a reference
that the caller gives (a roofline, or plain proportion), and the sample says so.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Reference = Callable[[float], float]
"""How values go with a coordinate outside the range; only ratios of it are used."""


class Sample(NamedTuple):
    """A value read off a curve or grid."""

    value: float
    inside: bool
    """Between measured points (or on one), on every axis."""


class Curve(NamedTuple):
    """Positive values over one positive axis; coordinates rise strictly."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    log_xs: NDArray[np.float64]
    log_ys: NDArray[np.float64]


class Grid(NamedTuple):
    """A curve over the second axis at each coordinate of the first; the curves may differ in it."""

    rows: tuple[tuple[float, Curve], ...]


def curve(points: Iterable[tuple[float, float]]) -> Curve:
    """The curve through ``(x, y)`` pairs in any order.

    No pair, an x given twice, or a number that is not positive and finite is a ``ValueError``.
    """
    pairs = sorted(points)
    xs = tuple(float(x) for x, _ in pairs)
    ys = tuple(float(y) for _, y in pairs)
    if not pairs:
        raise ValueError("a curve needs at least one point")
    if not all(0 < number < math.inf for number in (*xs, *ys)):
        raise ValueError("coordinates and values must be positive and finite")
    if any(left == right for left, right in pairwise(xs)):
        raise ValueError("a coordinate is given twice")
    return Curve(xs, ys, np.log(xs), np.log(ys))


def grid(rows: Mapping[float, Curve]) -> Grid:
    """The grid with ``rows`` by their coordinate on the first axis, at least one and positive."""
    if not rows or not all(0 < first < math.inf for first in rows):
        raise ValueError("a grid needs rows at positive and finite coordinates")
    return Grid(tuple(sorted(rows.items(), key=lambda row: row[0])))


def proportional(x: float) -> float:
    """The reference under which twice the coordinate costs twice as much."""
    return x


def read_curve(line: Curve, x: float, reference: Reference = proportional) -> Sample:
    """The value at ``x > 0``; outside the range the nearest one, scaled by ``reference``."""
    place = bisect_left(line.xs, x)
    if place < len(line.xs) and line.xs[place] == x:
        return Sample(line.ys[place], inside=True)
    if 0 < place < len(line.xs):
        log_y = float(np.interp(math.log(x), line.log_xs, line.log_ys))
        low, high = sorted(line.ys[place - 1 : place + 1])
        # rounding of exp(log(y)) must not step over a neighbour: rising points stay rising
        return Sample(min(max(math.exp(log_y), low), high), inside=True)
    nearest = 0 if place == 0 else -1
    scale = reference(x) / reference(line.xs[nearest])
    return Sample(line.ys[nearest] * scale, inside=False)


def read_grid(
    table: Grid, first: float, second: float, reference: Callable[[float, float], float]
) -> Sample:
    """The value at ``(first, second)``: along the second axis on neighbouring rows, then across.

    ``reference(first, second)`` scales whatever lies outside, on either axis.
    """
    coordinates = [coordinate for coordinate, _ in table.rows]
    place = bisect_left(coordinates, first)
    on_row = place < len(coordinates) and coordinates[place] == first
    used = table.rows[place : place + 1] if on_row else table.rows[max(0, place - 1) : place + 1]
    samples = {
        coordinate: read_curve(row, second, lambda y, x=coordinate: reference(x, y))
        for coordinate, row in used
    }
    across = curve((coordinate, sample.value) for coordinate, sample in samples.items())
    result = read_curve(across, first, lambda x: reference(x, second))
    inside = result.inside and all(sample.inside for sample in samples.values())
    return Sample(result.value, inside)


def padded(width: int, step: int) -> int:
    """The width that a processor runs for ``width`` tokens: the next multiple of ``step``."""
    return -(-width // step) * step
