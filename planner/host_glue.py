"""What a sub-layer takes beyond its products and its attention, seen in whole passes.

Between two uses of an operator a pass moves a layer's weights through the caches, so the
operator's code and buffers are cold again: some time for each sub-layer, some for each row. An
operator timed alone never pays that. Glue is what remains of a sub-layer, so it carries it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from planner.cost import sub_layer_parts
from profiles.points import GlueShape, Point, Quantity
from profiles.words import Format, Operator, Provenance, SubLayerKind
from runtime.model_spec import ModelSpec

_Settings = Mapping[tuple[object, ...], float]


class Remainder(NamedTuple):
    """Time of a sub-layer beyond its operators."""

    fixed_us: float
    row_us: float
    """Of each row, for each hidden feature."""


def with_remainder(
    alone: Sequence[Point], passes: Sequence[Point], spec: ModelSpec
) -> tuple[Point, ...]:
    """``alone``, operators timed alone, with glue raised by what ``passes`` take beyond their sum.

    ``passes`` are those of the model ``spec`` by width; context 0 is one with all switches off.
    """
    more = fit(alone, passes, spec)

    def raised(point: Point) -> Point:
        if not isinstance(point.shape, GlueShape):
            return point
        rows = point.width * point.shape.hidden
        time_us = Quantity(
            value=point.time_us.value + more.fixed_us + more.row_us * rows,
            source=Provenance.DERIVED,
            cite="measured alone, plus what passes of a probe model take beyond their operators",
        )
        return msgspec.structs.replace(point, time_us=time_us)

    return tuple(raised(point) for point in alone)


def fit(alone: Sequence[Point], passes: Sequence[Point], spec: ModelSpec) -> Remainder:
    """The remainder that explains ``passes`` best; zero where fewer than two can be explained."""
    times = {_setting(point): point.time_us.value for point in alone}
    off_us = [point.time_us.value for point in passes if point.context == 0 and point.width == 1]
    whole: list[tuple[int, float, float]] = []
    for point in passes:
        layer_us = _layer_us(times, point, spec) if point.context else None
        if layer_us is not None and off_us:
            more_us = point.time_us.value - off_us[0] - spec.layers * layer_us
            whole.append((point.width, point.time_us.value, more_us / spec.sub_layers))
    if len(whole) < 2:
        return Remainder(0.0, 0.0)
    widths, pass_us, more_us = (np.array(column, np.float64) for column in zip(*whole, strict=True))
    # noise goes with the time of a pass
    matrix = np.stack([np.ones_like(widths), widths], axis=1) / pass_us[:, None]
    fixed_us, row_us = (float(part) for part in np.linalg.lstsq(matrix, more_us / pass_us)[0])
    if fixed_us < 0:
        fixed_us, row_us = 0.0, max(0.0, float(_slope(widths / pass_us, more_us / pass_us)))
    elif row_us < 0:
        fixed_us, row_us = max(0.0, float(_slope(1 / pass_us, more_us / pass_us))), 0.0
    return Remainder(fixed_us, row_us / spec.hidden)


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / (x @ x))


def _layer_us(times: _Settings, whole: Point, spec: ModelSpec) -> float | None:
    """Sum of the operators of one layer; None when one of them was not timed."""
    total = 0.0
    for kind in SubLayerKind:
        for operator, shape in sub_layer_parts(spec, kind):
            fmt = whole.format if operator is Operator.LINEAR else Format.F32
            context = whole.context if operator is Operator.ATTENTION else 0
            value = times.get((operator, fmt, shape, whole.width, context))
            if value is None:
                return None
            total += value
    return total


def _setting(point: Point) -> tuple[object, ...]:
    return point.operator, point.format, point.shape, point.width, point.context
