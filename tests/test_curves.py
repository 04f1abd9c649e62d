"""Curves and grids: through their points, between their neighbours, flagged outside."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.curves import curve, grid, padded, proportional, read_curve, read_grid

coordinates = st.floats(1e-3, 1e6)
values = st.floats(1e-3, 1e9)
lines = st.dictionaries(coordinates, values, min_size=1, max_size=8)


@st.composite
def rising_lines(draw: st.DrawFn) -> dict[float, float]:
    xs = sorted(draw(st.sets(coordinates, min_size=2, max_size=8)))
    ys = sorted(draw(st.lists(values, min_size=len(xs), max_size=len(xs))))
    return dict(zip(xs, ys, strict=True))


@given(lines)
def test_a_curve_passes_through_its_points(points: dict[float, float]):
    line = curve(points.items())
    for x, y in points.items():
        assert read_curve(line, x) == (y, True)


@given(lines, coordinates)
def test_a_curve_is_positive_and_stays_between_its_neighbours(points: dict[float, float], x: float):
    value, inside = read_curve(curve(points.items()), x)
    assert value > 0
    assert inside == (min(points) <= x <= max(points))
    if inside:
        below = max(at for at in points if at <= x)
        above = min(at for at in points if at >= x)
        low, high = sorted((points[below], points[above]))
        assert low <= value <= high


@given(rising_lines(), st.lists(coordinates, min_size=2, max_size=10))
def test_a_curve_through_rising_points_rises(points: dict[float, float], xs: list[float]):
    line = curve(points.items())
    read = [read_curve(line, x).value for x in sorted(xs)]
    assert all(left <= right * (1 + 1e-12) for left, right in pairwise(read))


def test_a_power_law_is_read_exactly():
    line = curve((x, 3 * x**1.5) for x in (1, 10, 100))
    assert read_curve(line, 31).value == pytest.approx(3 * 31**1.5)


def test_outside_the_nearest_value_is_scaled_and_flagged():
    line = curve([(2, 10), (4, 30)])
    assert read_curve(line, 8) == (60, False)
    assert read_curve(line, 1) == (5, False)
    assert read_curve(line, 8, lambda _: 1.0) == (30, False)


@pytest.mark.parametrize(
    "points", [[], [(1, 1), (1, 2)], [(0, 1)], [(1, 0)], [(1, math.nan)], [(math.inf, 1)]]
)
def test_a_curve_of_nothing_or_of_bad_numbers_is_refused(points: list[tuple[float, float]]):
    with pytest.raises(ValueError, match=r"point|positive|twice"):
        curve(points)


def test_a_grid_without_rows_is_refused():
    with pytest.raises(ValueError, match="rows"):
        grid({})


def product(first: float, second: float) -> float:
    return first * second


@given(
    st.dictionaries(coordinates, st.tuples(values, values), min_size=1, max_size=5),
    coordinates,
    coordinates,
)
def test_a_grid_passes_through_its_points_and_is_positive(
    rows: dict[float, tuple[float, float]], first: float, second: float
):
    table = grid({at: curve([(2, low), (64, high)]) for at, (low, high) in rows.items()})
    for at, (low, high) in rows.items():
        assert read_grid(table, at, 2, product) == (low, True)
        assert read_grid(table, at, 64, product) == (high, True)
    value, inside = read_grid(table, first, second, product)
    assert value > 0
    assert inside == (min(rows) <= first <= max(rows) and 2 <= second <= 64)


def test_a_grid_interpolates_on_both_axes():
    widths = (1, 8, 64)
    table = grid({size: curve((w, size * w**0.5) for w in widths) for size in (100, 1000)})
    assert read_grid(table, 300, 20, product).value == pytest.approx(300 * 20**0.5)


def test_a_grid_scales_the_axis_that_is_outside():
    table = grid({10: curve([(1, 5), (4, 8)]), 100: curve([(1, 50), (4, 80)])})
    assert read_grid(table, 10, 8, product) == (16, False)
    assert read_grid(table, 200, 1, product) == (100, False)


def test_rows_of_a_grid_may_cover_different_stretches():
    table = grid({10: curve([(32, 5)]), 100: curve([(64, 100)])})
    value, inside = read_grid(table, 10, 32, product)
    assert (value, inside) == (5, True)
    assert not read_grid(table, 30, 32, product).inside


@given(st.integers(1, 4096), st.sampled_from([1, 2, 8, 32]))
def test_a_padded_width_is_the_next_multiple(width: int, step: int):
    result = padded(width, step)
    assert result % step == 0
    assert width <= result < width + step


def test_proportional_doubles():
    assert proportional(6) == 2 * proportional(3)
