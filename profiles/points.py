"""Sourced numbers, the shapes of operators, and points: what an operator took in one setting."""

import datetime
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any

import msgspec

from profiles.errors import InputError
from profiles.toml_text import convert
from profiles.words import Format, Operator, Provenance

SOURCES = (Provenance.MEASURED, Provenance.PAPER, Provenance.DERIVED, Provenance.ASSUMED)
"""What a number in a profile may rest on."""

Dimension = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**16)]
Context = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class LinearShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="linear"):
    """A matrix product with constant weights."""

    k: Dimension
    """Input features."""
    n: Dimension
    """Output features."""


class AttentionShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="attention"):
    """Attention between the QKV product and the output product."""

    heads: Dimension
    kv_heads: Dimension
    head_dim: Dimension
    """Elements of one head."""


class GlueShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="glue"):
    """Norm, rotary embedding, residual and activation of one sub-layer."""

    hidden: Dimension


Shape = LinearShape | AttentionShape | GlueShape

SHAPE_OF: Mapping[Operator, type[LinearShape] | type[AttentionShape] | type[GlueShape]] = {
    Operator.LINEAR: LinearShape,
    Operator.ATTENTION: AttentionShape,
    Operator.GLUE: GlueShape,
    Operator.EXACT_ATTENTION: AttentionShape,
    Operator.STREAMED_LINEAR: LinearShape,
}
"""The shape that each operator's points carry."""

CONTEXTUAL = (Operator.ATTENTION, Operator.EXACT_ATTENTION)
"""Operators whose time depends on the context."""


class Quantity(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """A number and what it rests on. The unit is in the name of the field that holds it."""

    value: Amount
    """The number; if measured, the median of the repeats."""
    source: Provenance
    """One of ``SOURCES``."""
    cite: Name
    """Paper and table, how it was derived, why it is assumed, or the command that measured it."""
    spread: Amount | None = None
    """Measured only: interquartile range of the repeats over their median."""
    date: str | None = None
    """Measured only: the day, ISO 8601."""
    versions: dict[str, str] = {}
    """Measured only: software by name."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source {self.source.value!r} is not one of {listed(SOURCES)}")
        if self.source is Provenance.MEASURED:
            if self.spread is None or self.date is None:
                raise ValueError("a measured number needs `spread` and `date`")
            datetime.date.fromisoformat(self.date)
        elif self.spread is not None or self.date is not None or self.versions:
            raise ValueError("only a measured number has `spread`, `date` and `versions`")


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time of one operator in one setting."""

    processor: Name
    operator: Operator
    format: Format
    shape: Shape
    width: Count
    """Tokens in the pass, before padding."""
    context: Context = 0
    """Attention: positions that a row sees, the pass's own included; 0 otherwise."""
    time_us: Quantity


class PointGroup(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Points of one operator and source, as the file spells them."""

    processor: Name
    operator: Operator
    format: Format
    source: Provenance
    cite: Name
    date: str | None = None
    versions: dict[str, str] = {}
    columns: tuple[str, ...]
    rows: tuple[tuple[int | float, ...], ...]


def points_of(group: PointGroup, path: str, origin: str) -> Iterator[tuple[str, Point]]:
    """Each row of ``group`` as a point, with the path to it in the file ``origin``.

    Other columns than the operator's, or a row that does not fit them, is an ``InputError``.
    """
    columns = _columns(group.operator, group.source)
    if group.columns != columns:
        raise InputError(
            f"wrong columns for {group.operator} points",
            where=f"{origin} {path}.columns",
            found=listed(group.columns),
            expected=listed(columns),
            hint="name and order them so",
        )
    for index, row in enumerate(group.rows):
        where = f"{path}.rows[{index}]"
        if len(row) != len(columns):
            raise InputError(
                "row does not fit its columns",
                where=f"{origin} {where}",
                found=f"{len(row)} numbers",
                expected=f"{len(columns)}: {listed(columns)}",
            )
        cells = dict(zip(columns, row, strict=True))
        if cells["time_us"] == 0:
            raise InputError("number must be above zero", where=f"{origin} {where}.time_us")
        yield where, convert(_record(group, cells), Point, where, origin)


def groups_of(points: Iterable[Point]) -> Iterator[PointGroup]:
    """Runs of points that share processor, operator, format and source, in order."""

    def key(point: Point) -> tuple[object, ...]:
        time = point.time_us
        setting = (point.processor, point.operator, point.format)
        return (*setting, time.source, time.cite, time.date, time.versions)

    for _, run in groupby(points, key):
        members = list(run)
        first, time = members[0], members[0].time_us
        columns = _columns(first.operator, time.source)
        yield PointGroup(
            processor=first.processor,
            operator=first.operator,
            format=first.format,
            source=time.source,
            cite=time.cite,
            date=time.date,
            versions=time.versions,
            columns=columns,
            rows=tuple(_row(point, columns) for point in members),
        )


def listed(words: Iterable[object]) -> str:
    """``words`` with commas between, for messages."""
    return ", ".join(str(word) for word in words)


def _columns(operator: Operator, source: Provenance) -> tuple[str, ...]:
    shape = SHAPE_OF[operator].__struct_fields__
    context = ("context",) if operator in CONTEXTUAL else ()
    spread = ("spread",) if source is Provenance.MEASURED else ()
    return (*shape, "width", *context, "time_us", *spread)


def _record(group: PointGroup, cells: Mapping[str, float]) -> dict[str, object]:
    time: dict[str, object] = {
        "value": cells["time_us"],
        "source": group.source,
        "cite": group.cite,
    }
    if group.source is Provenance.MEASURED:
        time |= {"spread": cells["spread"], "date": group.date, "versions": group.versions}
    shape = SHAPE_OF[group.operator]
    tag = shape.__struct_config__.tag
    return {
        "processor": group.processor,
        "operator": group.operator,
        "format": group.format,
        "shape": {"type": tag, **{field: cells[field] for field in shape.__struct_fields__}},
        "width": cells["width"],
        "context": cells.get("context", 0),
        "time_us": time,
    }


def _row(point: Point, columns: tuple[str, ...]) -> tuple[float, ...]:
    cells: dict[str, Any] = msgspec.structs.asdict(point.shape) | {
        "width": point.width,
        "context": point.context,
        "time_us": point.time_us.value,
        "spread": point.time_us.spread,
    }
    return tuple(cells[column] for column in columns)
