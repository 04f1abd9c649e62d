"""Context ranges with one decision each, cut where attention and MLP change their relative cost."""

from collections.abc import Iterator

from planner.pass_tables import PassTimes
from planner.placement import Work
from profiles.words import SubLayerId

STEP_TOKENS = 256
LARGEST_RATIO = 5
"""KnapSpec clips the rounded ratio of the dearer to the cheaper kind of sub-layer here."""


def weight_ratio(times: PassTimes, context: int) -> tuple[int, int]:
    """Cost of one attention and of one MLP, as integer multiples of the cheaper (KnapSpec)."""
    machine, target = times.machine, times.target
    attention, mlp = (
        machine.stage_us(target.sub_layers[i], SubLayerId(i), Work((), 1, 1, context)) or 1.0
        for i in (0, 1)
    )
    unit = min(attention, mlp)
    return (
        min(round(attention / unit), LARGEST_RATIO),
        min(round(mlp / unit), LARGEST_RATIO),
    )


def edges(times: PassTimes, context: int) -> Iterator[tuple[int, int]]:
    """(from, to) of each bucket, covering 0 to ``context``."""
    start, ratio = 0, weight_ratio(times, STEP_TOKENS // 2)
    for at in range(STEP_TOKENS, context, STEP_TOKENS):
        following = weight_ratio(times, at + STEP_TOKENS // 2)
        if following != ratio:
            yield start, at
            start, ratio = at, following
    yield start, context


def representative(start: int, end: int) -> int:
    """The context that stands for a bucket: its middle."""
    return (start + end) // 2
