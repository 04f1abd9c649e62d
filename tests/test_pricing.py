"""Prices by table: interpolation between contexts, rounding up of widths, what is missing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import FulcrumError
from runtime.plan_tables import CostTables, PassKind, PassTable
from runtime.pricing import PriceList, interpolate

VERIFY = PassTable(
    PassKind.VERIFY,
    0,
    widths=(1, 4, 32),
    contexts=(0, 100, 1000),
    us=((10.0, 20.0, 110.0), (40.0, 50.0, 140.0), (300.0, 310.0, 400.0)),
)
DRAFT = PassTable(PassKind.DRAFT, 2, widths=(1,), contexts=(64,), us=((7.0,),))
TABLES = CostTables((VERIFY, DRAFT), (1, 2, 10), (5.0, 6.0, 22.0), cycle_us=3.0, ngram_us=1.5)
PRICES = PriceList(TABLES)

# Far enough apart that no step between two neighbours is lost in rounding
axes = st.lists(st.integers(0, 10_000), min_size=1, max_size=8, unique=True).map(sorted)
prices = st.floats(0, 1e6)


@given(xs=axes, data=st.data(), x=st.floats(-100, 20_000))
def test_interpolation_equals_numpys(xs: list[int], data: st.DataObject, x: float) -> None:
    ys = data.draw(st.lists(prices, min_size=len(xs), max_size=len(xs)))
    assert interpolate(xs, ys, x) == pytest.approx(np.interp(x, xs, ys), rel=1e-9, abs=1e-6)


@given(xs=axes, data=st.data())
def test_interpolation_gives_every_point_back_and_stays_between_neighbours(
    xs: list[int], data: st.DataObject
) -> None:
    ys = data.draw(st.lists(prices, min_size=len(xs), max_size=len(xs)))
    assert [interpolate(xs, ys, x) for x in xs] == pytest.approx(ys, rel=1e-12, abs=1e-9)
    x = data.draw(st.floats(xs[0], xs[-1]))
    assert min(ys) - 1e-6 <= interpolate(xs, ys, x) <= max(ys) + 1e-6


def test_the_end_values_continue_beyond_the_ends() -> None:
    assert interpolate((10, 20), (1.0, 2.0), -5) == 1.0
    assert interpolate((10, 20), (1.0, 2.0), 99) == 2.0


@pytest.mark.parametrize(
    ("context", "us"), [(0, 10.0), (50, 15.0), (100, 20.0), (550, 65.0), (1000, 110.0), (9999, 110)]
)
def test_a_pass_is_interpolated_between_contexts(context: int, us: float) -> None:
    assert PRICES.pass_us(PassKind.VERIFY, 0, 1, context) == us


@pytest.mark.parametrize(
    ("width", "us"), [(1, 10.0), (2, 40.0), (4, 40.0), (5, 300.0), (32, 300.0), (33, 300.0)]
)
def test_a_width_costs_what_the_next_wider_row_costs(width: int, us: float) -> None:
    assert PRICES.pass_us(PassKind.VERIFY, 0, width, 0) == us


def test_a_table_of_one_point_holds_everywhere() -> None:
    for width, context in ((1, 0), (1, 64), (8, 5000)):
        assert PRICES.pass_us(PassKind.DRAFT, 2, width, context) == 7.0


def test_the_head_is_interpolated_between_rows() -> None:
    assert [PRICES.head_us(rows) for rows in (1, 2, 6, 10, 50)] == [5.0, 6.0, 14.0, 22.0, 22.0]


def test_constants_are_the_tables() -> None:
    assert (PRICES.cycle_us, PRICES.ngram_us) == (3.0, 1.5)


@pytest.mark.parametrize(("kind", "mask"), [(PassKind.DRAFT, 0), (PassKind.AR, 0)])
def test_a_pass_without_a_table_is_named(kind: PassKind, mask: int) -> None:
    with pytest.raises(FulcrumError, match=f"no cost of a {kind} pass under mask {mask}"):
        PRICES.pass_us(kind, mask, 1, 10)
