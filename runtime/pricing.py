"""Device time of passes, looked up in the plan's tables; nothing is simulated here."""

import bisect
from collections.abc import Sequence

from profiles.errors import IncompatibleError
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

    def head_us(self, rows: int) -> float:
        """The LM head over ``rows`` rows."""
        return interpolate(self._tables.head_widths, self._tables.head_us, rows)


def _row(table: PassTable, width: int) -> Sequence[float]:
    index = bisect.bisect_left(table.widths, width)
    return table.us[min(index, len(table.us) - 1)]
