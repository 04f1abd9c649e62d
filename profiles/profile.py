"""What a device is: processors, storage, memory, heat, measured points; every number sourced.

A profile is a TOML file (``docs/profile-format.md``) or these frozen structs; the two convert
into each other without loss.
"""

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec

from profiles.errors import IncompatibleError, InputError, nearest
from profiles.points import (
    SHAPE_OF,
    SOURCES,
    AttentionShape,
    Count,
    GlueShape,
    LinearShape,
    Name,
    Point,
    PointGroup,
    Quantity,
    Shape,
    groups_of,
    listed,
    points_of,
)
from profiles.toml_text import convert, parse_toml, toml_text
from profiles.words import Format, Operator, ProcessorKind, Provenance

__all__ = [
    "FORMAT",
    "SHAPE_OF",
    "SOURCES",
    "AttentionShape",
    "DeviceProfile",
    "GlueShape",
    "LinearShape",
    "Memory",
    "Point",
    "Processor",
    "Quantity",
    "ReadPattern",
    "Shape",
    "Storage",
    "StorageRead",
    "digest",
    "each_quantity",
    "load_profile",
    "parse_profile",
    "provenance_counts",
    "save_profile",
    "shipped_profiles",
]

FORMAT = "1.0"
"""Version of the profile format that this module writes; it reads every 1.x."""

_MAX_FILE_BYTES = 32 * 2**20
_MAY_BE_ZERO = ("launch_us", "sync_us", "stream_call_us", "cycle_us")


class Processor(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """One place where operators run."""

    id: Name
    kind: ProcessorKind
    threads: Count
    """Threads that every number was taken with; other counts are never extrapolated."""
    width_step: Count
    """Widths are padded to a multiple of this."""
    max_width: Count
    """Widest pass, in tokens."""
    launch_us: Quantity
    """Fixed cost of one operator inside a running segment."""
    sync_us: Quantity
    """Fixed cost of handing data to this processor and back."""
    stream_call_us: Quantity | None = None
    """Fixed cost of a sub-layer whose weights stream from flash: a call of its own."""
    bandwidth_bytes_per_s: Quantity
    """Memory bandwidth that it reaches alone."""
    power_watt: Quantity | None = None
    """Power of the device while it decodes here."""
    memory_limit_bytes: Quantity | None = None
    """Most weights and state that one session can address."""
    supports: dict[Operator, tuple[Format, ...]]
    """Formats by operator."""
    peak_ops_per_s: dict[Format, Quantity]
    """Reachable operations by format; a multiply-add is two."""


class ReadPattern(StrEnum):
    """Order of the blocks that a storage rate was taken with."""

    SEQUENTIAL = "sequential"
    RANDOM = "random"


class StorageRead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rate of reading blocks of one size."""

    block_bytes: Annotated[int, msgspec.Meta(ge=512, le=2**30)]
    pattern: ReadPattern
    direct: bool
    """Past the page cache (O_DIRECT)."""
    bytes_per_s: Quantity


class Storage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Flash or disk that weights stream from."""

    reads: Annotated[tuple[StorageRead, ...], msgspec.Meta(min_length=1)]
    reading_slowdown: Quantity | None = None
    """Factor on the time of a pass beside which reads go on; None: nobody measured it."""


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """DRAM, shared by all processors."""

    total_bytes: Quantity
    default_budget_bytes: Quantity
    """What a plan may use when nobody says otherwise."""
    bandwidth_bytes_per_s: Quantity
    """Reached by all processors at once."""


class DeviceProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, weakref=True):
    """A device, as the planner knows it. At least one processor is a CPU."""

    format: str
    """Version of the profile format, ``major.minor``."""
    name: Name
    description: str
    soc: str
    os: str
    cycle_us: Quantity
    """Constant of one draft-to-commit cycle: Python calls, sampling, bookkeeping."""
    memory: Memory
    storage: Storage
    thermal: dict[str, Quantity]
    """Factor on every time, by thermal state; ``cold`` is always there."""
    processors: Annotated[tuple[Processor, ...], msgspec.Meta(min_length=1)]
    points: tuple[Point, ...] = ()

    def processor(self, processor_id: str) -> Processor:
        """The processor named ``processor_id``; an unknown name is an ``InputError``."""
        for processor in self.processors:
            if processor.id == processor_id:
                return processor
        known = [processor.id for processor in self.processors]
        raise InputError(
            f"profile {self.name} has no such processor",
            found=repr(processor_id),
            hint=nearest(processor_id, known),
        )


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with Fulcrum, sorted."""
    names = [entry.name for entry in resources.files("profiles").joinpath("devices").iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_profile(name_or_path: str | os.PathLike[str]) -> DeviceProfile:
    """Read a shipped profile by name, or a profile file by path.

    An unknown name, an unreadable or malformed file is an ``InputError`` that says where in the
    document; a file of another major version is an ``IncompatibleError``.
    """
    text_name = os.fspath(name_or_path)
    known = shipped_profiles()
    if text_name in known:
        entry = resources.files("profiles").joinpath("devices", f"{text_name}.toml")
        return parse_profile(entry.read_text(encoding="utf-8"), f"{text_name}.toml")
    path = Path(text_name)
    if not path.exists() and path.suffix != ".toml" and path.name == text_name:
        hint = nearest(text_name, known) + ", or give the path of a profile file"
        raise InputError("unknown device", found=repr(text_name), hint=hint)
    try:
        return parse_profile(_read(path).decode(), text_name)
    except OSError as error:
        hint = "check the path, or name one of: " + ", ".join(known)
        raise InputError(
            "cannot read profile", where=path, found=error.strerror, hint=hint
        ) from None
    except UnicodeDecodeError:
        raise InputError("profile is not UTF-8 text", where=path, hint="save it as UTF-8") from None


def _read(path: Path) -> bytes:
    # Opening a named pipe would wait for ever, and a device has no end
    if not stat.S_ISREG(path.stat().st_mode):
        hint = "name a profile file"
        raise InputError("cannot read profile", where=path, found="not a file", hint=hint)
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        expected = f"<= {_MAX_FILE_BYTES} B"
        raise InputError("file is too large for a profile", where=path, expected=expected)
    return data


def save_profile(profile: DeviceProfile, path: str | os.PathLike[str]) -> None:
    """Write ``profile`` as TOML; a reader sees the old file or the new one, never half of it.

    A profile that would not load again is an ``InputError`` and nothing is written.
    """
    target = Path(path)
    text = toml_text(_document(profile))
    parse_profile(text, str(target))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        raise InputError(
            "cannot write profile", where=target, found=error.strerror, hint="check the folder"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def digest(profile: DeviceProfile) -> str:
    """SHA-256, hex, of the profile's content; two files that load equal have the same one."""
    return hashlib.sha256(msgspec.json.encode(profile, order="deterministic")).hexdigest()


def provenance_counts(profile: DeviceProfile) -> dict[Provenance, int]:
    """How many of the profile's numbers rest on each of ``SOURCES``."""
    counts = Counter(quantity.source for _, quantity in each_quantity(profile))
    return {source: counts[source] for source in SOURCES}


def each_quantity(node: object, path: str = "$") -> Iterator[tuple[str, Quantity]]:
    """Every number below ``node`` with the path to it, in the order of the document."""
    if isinstance(node, Quantity):
        yield path, node
    elif isinstance(node, msgspec.Struct):
        for name in node.__struct_fields__:
            yield from each_quantity(getattr(node, name), f"{path}.{name}")
    elif isinstance(node, dict):
        for name, value in node.items():
            yield from each_quantity(value, f"{path}.{name}")
    elif isinstance(node, tuple):
        for index, value in enumerate(node):
            yield from each_quantity(value, f"{path}[{index}]")


def parse_profile(text: str, origin: str) -> DeviceProfile:
    """Read a profile from TOML ``text``; ``origin`` names the file in errors."""
    document = parse_toml(text, origin)
    _check_version(document.get("format"), origin)
    groups = convert(document.pop("points", []), tuple[PointGroup, ...], "$.points", origin)
    profile = convert(document, DeviceProfile, "$", origin)
    _check(profile, origin)
    placed = [
        entry
        for index, group in enumerate(groups)
        for entry in points_of(group, f"$.points[{index}]", origin)
    ]
    _check_points(profile, placed, origin)
    return msgspec.structs.replace(profile, points=tuple(point for _, point in placed))


def _check_version(version: object, origin: str) -> None:
    if not isinstance(version, str) or not re.fullmatch(r"\d+\.\d+", version):
        raise InputError(
            "not a device profile", where=f"{origin} $.format", found=repr(version), expected=FORMAT
        )
    if version.split(".")[0] != FORMAT.split(".")[0]:
        raise IncompatibleError(
            "profile has another major version",
            where=f"{origin} $.format",
            found=version,
            expected=f"{FORMAT.split('.')[0]}.x",
            hint="use a matching release of Fulcrum, or measure the device again",
        )


def _check(profile: DeviceProfile, origin: str) -> None:
    """What single fields cannot say, points apart; an ``InputError`` names the path."""
    for path, quantity in each_quantity(profile):
        if quantity.value == 0 and not path.endswith(_MAY_BE_ZERO):
            raise _refusal("number must be above zero", origin, path, found=0, expected="> 0")
    if profile.memory.default_budget_bytes.value > profile.memory.total_bytes.value:
        raise _refusal("budget exceeds the memory", origin, "$.memory.default_budget_bytes")
    if "cold" not in profile.thermal:
        found = listed(profile.thermal)
        raise _refusal("no thermal state `cold`", origin, "$.thermal", found=found)
    if all(processor.kind is not ProcessorKind.CPU for processor in profile.processors):
        raise _refusal("no processor of kind `cpu`", origin, "$.processors")
    seen: set[str] = set()
    for index, processor in enumerate(profile.processors):
        path = f"$.processors[{index}]"
        if processor.id in seen:
            raise _refusal("id is used twice", origin, f"{path}.id", found=processor.id)
        seen.add(processor.id)
        if processor.max_width % processor.width_step:
            expected = f"a multiple of width_step {processor.width_step}"
            found = processor.max_width
            raise _refusal(
                "wrong value", origin, f"{path}.max_width", found=found, expected=expected
            )
        formats = {fmt for supported in processor.supports.values() for fmt in supported}
        if lacking := sorted(formats - processor.peak_ops_per_s.keys()):
            expected = f"an entry for {listed(lacking)}"
            raise _refusal(
                "supported format without a peak",
                origin,
                f"{path}.peak_ops_per_s",
                expected=expected,
            )


def _check_points(profile: DeviceProfile, placed: Iterable[tuple[str, Point]], origin: str) -> None:
    processors = {processor.id: processor for processor in profile.processors}
    seen: set[tuple[object, ...]] = set()
    for path, point in placed:
        processor = processors.get(point.processor)
        if processor is None:
            raise _refusal(
                f"unknown processor, {nearest(point.processor, processors)}",
                origin,
                path,
                found=repr(point.processor),
            )
        if point.format not in processor.supports.get(point.operator, ()):
            found = f"{point.operator} in {point.format}"
            what = f"{processor.id} does not list this format as supported"
            raise _refusal(what, origin, path, found=found)
        if point.width > processor.max_width:
            expected = f"<= {processor.max_width}, the max_width of {processor.id}"
            raise _refusal("width", origin, path, found=point.width, expected=expected)
        setting = (point.processor, point.operator, point.format)
        key = (*setting, point.shape, point.width, point.context)
        if key in seen:
            raise _refusal("point is given twice", origin, path, found=point.shape)
        seen.add(key)


def _refusal(
    what: str, origin: str, path: str, *, found: object = None, expected: object = None
) -> InputError:
    hint = "correct the profile; docs/profile-format.md describes each field"
    return InputError(what, where=f"{origin} {path}", found=found, expected=expected, hint=hint)


def _document(profile: DeviceProfile) -> dict[str, object]:
    document = msgspec.to_builtins(msgspec.structs.replace(profile, points=()))
    del document["points"]
    if profile.points:
        document["points"] = msgspec.to_builtins(list(groups_of(profile.points)))
    return document
