"""Device time of passes, looked up in the plan's tables; nothing is simulated here."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from profiles.errors import IncompatibleError
from runtime.plan_cycles import HeadOrder
from runtime.plan_tables import CostTables, PassKind, PassTable


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear in ascending ``xs``; the end values continue beyond the ends."""
    right = bisect.bisect_left(xs, x)
    if right == 0:
        return ys[0]
    if right == len(xs):
        return ys[-1]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


class PriceList:
    """The tables of a plan, by pass kind and mask."""

    def __init__(self, tables: CostTables) -> None:
        self._tables = tables
        self._passes = {(table.kind, table.mask): table for table in tables.passes}
        self._streams = tables.streams
        self.cycle_us = tables.cycle_us
        self.ngram_us = tables.ngram_us

    def pass_us(self, kind: PassKind, mask: int, width: int, context: int) -> float:
        """A pass of ``width`` rows over ``context`` positions; widths round up to a table row."""
        table = self._passes.get((kind, mask))
        if table is None:
            raise IncompatibleError(
                f"the plan has no cost of a {kind} pass under mask {mask}",
                hint="make the plan again with `plan compile`",
            )
        return interpolate(table.contexts, _row(table, width), context)

    def verify_us(
        self, bucket: int, kind: PassKind, width: int, context: int, ahead_us: float
    ) -> float:
        """A pass that commits, without the head; where sub-layers stream, ``ahead_us`` after the
        end of the one before."""
        if not self._streams:
            return self.pass_us(kind, 0, width, context)
        table = self._streams[bucket]
        row = table.us[min(bisect.bisect_left(table.widths, width), len(table.us) - 1)]
        return interpolate(table.ahead_us, row, ahead_us)

    def cycle(self, bucket: int, context: int, head: HeadOrder) -> "CycleTimes":
        """What a cycle takes besides drafting, for ``runtime.growth``."""
        return CycleTimes(self, bucket, context, head)

    @property
    def steps(self) -> tuple[int, ...]:
        """Widths of verify passes that the tables list."""
        if self._streams:
            return self._streams[0].widths
        return self._passes[PassKind.VERIFY, 0].widths

    def head_us(self, rows: int) -> float:
        """The LM head over ``rows`` rows."""
        return interpolate(self._tables.head_widths, self._tables.head_us, rows)


class CycleTimes(NamedTuple):
    """``runtime.growth.Times`` of one bucket at one context."""

    prices: PriceList
    bucket: int
    context: int
    head: HeadOrder

    @property
    def steps(self) -> tuple[int, ...]:
        """Widths up to which a verify pass costs the same."""
        return self.prices.steps

    def verify_us(self, rows: int, ahead_us: float, /) -> float:
        """The verify pass with its head and the constant of a cycle.

        Along the path the head is taken to run over half of the rows: no one knows yet.
        """
        prices = self.prices
        along = self.head is HeadOrder.PATH
        rest = prices.head_us(1) * (rows + 1) / 2 if along else prices.head_us(rows)
        rest += prices.cycle_us
        where = self.bucket, PassKind.VERIFY, rows, self.context + rows
        return rest + prices.verify_us(*where, ahead_us + rest)


def _row(table: PassTable, width: int) -> Sequence[float]:
    index = bisect.bisect_left(table.widths, width)
    return table.us[min(index, len(table.us) - 1)]
