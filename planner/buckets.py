"""Context ranges with one decision each, cut where attention and MLP change their relative cost."""

from typing import NamedTuple

from planner.placement import Machine, Work, place
from profiles.words import SubLayerId

STEP_TOKENS = 256
LARGEST_RATIO = 5
"""KnapSpec clips the rounded ratio of the dearer to the cheaper kind of sub-layer here."""


class Range(NamedTuple):
    """Contexts from ``start`` up to, not including, ``end``."""

    start: int
    end: int
    attention_units: int
    mlp_units: int
    """Weights of the two kinds in the knapsack, as multiples of the cheaper."""

    @property
    def middle(self) -> int:
        """The context that the range is priced at."""
        return (self.start + self.end) // 2


def weight_ratio(machine: Machine, context: int) -> tuple[int, int]:
    """Time of one attention and one MLP as integer multiples of the cheaper (KnapSpec).

    One token is drafted, each sub-layer where that is fastest.
    """
    stages = tuple(SubLayerId(i) for i in range(machine.spec.sub_layers))
    work = Work(stages, 1, 1, context)
    where = place(machine, work).sub_layers
    attention, mlp = (machine.stage_us(where[i], stages[i], work) or 1.0 for i in (0, 1))
    unit = min(attention, mlp)
    return min(round(attention / unit), LARGEST_RATIO), min(round(mlp / unit), LARGEST_RATIO)


def ranges(machine: Machine, context: int) -> list[Range]:
    """Buckets that cover 0 to ``context``."""
    found: list[Range] = []
    start, ratio = 0, weight_ratio(machine, min(STEP_TOKENS, context) // 2)
    for at in range(STEP_TOKENS, context, STEP_TOKENS):
        following = weight_ratio(machine, min(at + STEP_TOKENS // 2, context))
        if following != ratio:
            found.append(Range(start, at, *ratio))
            start, ratio = at, following
    return [*found, Range(start, context, *ratio)]
