"""Where things stand in the picture of a bucket: columns, lanes and the x of each sub-layer."""

from collections.abc import Sequence

import msgspec

from planner.inspect.figures import BucketFigures
from runtime.plan import ExecutionPlan
from runtime.plan_tables import Placement

PAGE_WIDTH = 1600.0
MARGIN = 40.0
RIGHT = PAGE_WIDTH - MARGIN

STAGE_X, STAGE_WIDTH = MARGIN + 4, 148.0
"""Boxes that say what a row does: draft, verify, decode."""
BAND_X = 208.0
EMBED_X, EMBED_WIDTH = 236.0, 52.0
SPANS_X, SPANS_END = 352.0, 1216.0
HEAD_X, HEAD_WIDTH = 1282.0, 60.0
SAMPLER_X, SAMPLER_WIDTH = 1398.0, 58.0
BAND_END = 1468.0
LAST_X = 1488.0
LAST_WIDTH = RIGHT - LAST_X

LANE_HEIGHT, LANE_GAP = 60.0, 12.0
ONLY_LANE_HEIGHT = 84.0
"""A lane alone leaves room for the boxes beside it."""
BOX_HEIGHT = 40.0
_BOX_LOWER = 3.0
"""By how much boxes stand below their lane's middle: the processor's name is above them."""

_LABELLED_GAP = 74.0
_GAP_SHARE = 0.45
"""At most this part of the spans' room goes to gaps between them."""
_NARROW_GAP = 12.0

_COLOURS = (
    ("#2b5c8a", "#9dbcd8"),
    ("#a85f1a", "#e6bf94"),
    ("#3b7a57", "#a8cdb8"),
    ("#6b4d8a", "#c3b1d6"),
)


class Colours(msgspec.Struct, frozen=True):
    """The two shades of a processor."""

    dark: str
    """Attention, and the processor's name."""
    light: str
    """MLP."""


def colours_of(processors: Sequence[str]) -> dict[str, Colours]:
    """A pair of shades for each processor, repeating after four."""
    return {
        processor: Colours(*_COLOURS[number % len(_COLOURS)])
        for number, processor in enumerate(processors)
    }


class Scale(msgspec.Struct, frozen=True):
    """Maps sub-layers to x, the same for all rows of a bucket so that their cells align."""

    cuts: tuple[int, ...]
    """Sub-layers before which there is a gap."""
    slot: float
    """Room of one sub-layer."""
    gap: float

    @property
    def labelled(self) -> bool:
        """Whether a gap has room for the label of its handover."""
        return self.gap >= _LABELLED_GAP

    def start(self, sub_layer: int) -> float:
        """Left end of a sub-layer's slot."""
        return SPANS_X + sub_layer * self.slot + self._gaps(sub_layer)

    def end(self, sub_layer: int) -> float:
        """Right end of the slot of the sub-layer before ``sub_layer``."""
        return self.start(sub_layer - 1) + self.slot

    def _gaps(self, sub_layer: int) -> float:
        return self.gap * sum(cut <= sub_layer for cut in self.cuts)


def scale_of(plan: ExecutionPlan, passes: Sequence[Placement]) -> Scale:
    """The scale of a bucket: a gap wherever a span or a numerics class begins."""
    sub_layers = max(
        1,
        plan.model.sub_layers,
        *(span.end for one in passes for span in one.spans),
        *(numerics.end for numerics in plan.numerics),
    )
    begins = {int(span.first) for one in passes for span in one.spans}
    begins |= {int(numerics.first) for numerics in plan.numerics}
    cuts = tuple(sorted(begins - {0}))
    room = SPANS_END - SPANS_X
    gap = 0.0
    if cuts:
        share = _GAP_SHARE * room / len(cuts)
        gap = _LABELLED_GAP if share >= _LABELLED_GAP else min(_NARROW_GAP, share)
    return Scale(cuts=cuts, slot=(room - gap * len(cuts)) / sub_layers, gap=gap)


class Lanes(msgspec.Struct, frozen=True):
    """The lanes of a bucket's rows, one per processor that its cycle uses."""

    processors: tuple[str, ...]

    @property
    def height(self) -> float:
        """Of a row."""
        count = max(1, len(self.processors))
        return count * self.lane_height + (count - 1) * LANE_GAP

    @property
    def lane_height(self) -> float:
        """Of one lane."""
        return LANE_HEIGHT if len(self.processors) > 1 else ONLY_LANE_HEIGHT

    def top(self, processor: str, row_y: float) -> float:
        """Upper end of a processor's lane in the row that begins at ``row_y``."""
        return row_y + self.processors.index(processor) * (self.lane_height + LANE_GAP)

    def middle(self, processor: str, row_y: float) -> float:
        """Centre line of the boxes in a processor's lane."""
        return self.top(processor, row_y) + self.lane_height / 2 + _BOX_LOWER


def lanes_of(figures: BucketFigures) -> Lanes:
    """The processors of a bucket's cycle, in alphabetical order."""
    used = {one.head_processor for one in figures.cycle_passes}
    used.update(span.processor for one in figures.cycle_passes for span in one.spans)
    return Lanes(tuple(sorted(used)))
