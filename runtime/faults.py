"""What is wrong with a plan, and the checks that its parts have in common."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Fault(NamedTuple):
    """One thing that is wrong with a plan."""

    where: str
    """Path into the document, such as ``$.graphs[1].artefact.path``."""
    what: str
    found: object
    expected: object


def outside(where: str, value: float, low: float, high: float) -> Iterator[Fault]:
    """``value`` lies in ``low`` to ``high``."""
    # Written so that NaN, which compares false with everything, is outside
    if not low <= value <= high:
        expected = low if low == high else f"{low} to {high}"
        yield Fault(where, "number out of range", value, expected)


def not_empty(where: str, values: Sequence[object]) -> Iterator[Fault]:
    """A list has entries."""
    if not values:
        yield Fault(where, "empty list", "no entries", "at least 1")


def length(where: str, values: Sequence[object], length: int, what: str) -> Iterator[Fault]:
    """A list has ``length`` entries; ``what`` they are."""
    if len(values) != length:
        yield Fault(where, "list of the wrong length", len(values), f"{length}, {what}")


def ascending(where: str, values: Sequence[float]) -> Iterator[Fault]:
    """Each number is larger than the one before."""
    for place, (one, other) in enumerate(pairwise(values), start=1):
        if other <= one:
            yield Fault(f"{where}[{place}]", "numbers must ascend", other, f"> {one}")


def tiling(
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


def covers(where: str, ranges: Sequence[tuple[int, int]], end: int) -> Iterator[Fault]:
    """The last range ends at ``end``."""
    found = ranges[-1][1] if ranges else "an empty list"
    if found != end:
        yield Fault(where, "does not cover all sub-layers", found, f"an end at {end}")


def once(where: str, names: Sequence[str]) -> Iterator[Fault]:
    """No name is given more than once."""
    for name, count in Counter(names).items():
        if count > 1:
            yield Fault(where, "given more than once", name, "different names")
