"""``plan.json`` as bytes: the version first, then the schema, then what the schema cannot say."""

import math
import re
import reprlib
from typing import Any, TypeVar

import msgspec

from profiles.errors import FulcrumError, IncompatibleError, InputError
from runtime.plan import FORMAT, FORMAT_MAJOR, ExecutionPlan
from runtime.plan_checks import faults

MAX_DOCUMENT_BYTES = 64 * 2**20
"""A longer ``plan.json`` is refused before it is read; real ones have below 1 MiB."""

RECOMPILE = "make the plan again with `plan compile`"
UPDATE = "update Fulcrum, or make the plan again with this version's `plan compile`"

# Quoting the offending value means decoding once more into loose objects, which take about 20
# times the document's size
_MAX_QUOTED_DOCUMENT_BYTES = 2**20
_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")
_SCHEMA_ERROR = re.compile(
    r"(?:Expected (?P<expected>.+?)(?:, got (?P<found>.+?))?|(?P<what>.+?))"
    r"(?: - at `(?P<path>.+)`)?",
    re.DOTALL,
)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")

_T = TypeVar("_T")


class _Header(msgspec.Struct):
    """All that is read before the version is known."""

    format: Any = None


def encode_plan(plan: ExecutionPlan) -> bytes:
    """The document: UTF-8, sorted keys, one value a line; equal plans give equal bytes.

    Raises:
        FulcrumError: The plan has a number that JSON cannot hold, or could not be read back; a
            fault of the compiler, not of its user.
    """
    # msgspec would write NaN and infinity as null
    if path := _not_finite(plan, "$"):
        raise FulcrumError("number is not finite", where=path, hint="this is a bug in the compiler")
    data = msgspec.json.format(msgspec.json.encode(plan, order="sorted"), indent=1) + b"\n"
    try:
        decode_plan(data, "new plan")
    except FulcrumError as error:
        raise FulcrumError(
            error.what,
            where=error.where,
            found=error.found,
            expected=error.expected,
            hint="this is a bug in the compiler",
        ) from error
    return data


def decode_plan(data: bytes, origin: object) -> ExecutionPlan:
    """The plan in ``data``; ``origin`` names the file in errors.

    Raises:
        InputError: Malformed, against the schema, or inconsistent; says where in the document.
        IncompatibleError: Written in another major version of the format.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        expected = f"at most {MAX_DOCUMENT_BYTES} bytes"
        raise InputError("too large for a plan", where=origin, expected=expected, hint=RECOMPILE)
    try:
        # msgspec decodes only the strings that it keeps, and would let the others pass
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at {error.start}"
        raise InputError("not UTF-8", where=origin, found=found, hint=RECOMPILE) from error
    hint = _check_version(_decode(data, _Header, origin, RECOMPILE).format, origin)
    plan = _decode(data, ExecutionPlan, origin, hint)
    for fault in faults(plan):
        raise InputError(
            fault.what,
            where=f"{origin}: {fault.where}",
            found=reprlib.repr(fault.found),
            expected=fault.expected,
            hint=hint,
        )
    return plan


def is_plan_document(data: bytes) -> bool:
    """Whether ``data`` looks like a ``plan.json`` of any version, even an inconsistent one."""
    try:
        header = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(header.get("format", b"null"), type=str)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return _VERSION.fullmatch(version) is not None and {"model", "buckets"} <= header.keys()


def _check_version(version: object, origin: object) -> str:
    """The hint for errors further down: a newer minor version may hold what this one cannot."""
    where = f"{origin}: $.format"
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if match is None:
        found = "no such field" if version is None else reprlib.repr(version)
        expected = f"a version such as {FORMAT}"
        raise InputError("not a plan", where=where, found=found, expected=expected, hint=RECOMPILE)
    major, minor = int(match[1]), int(match[2])
    if major != FORMAT_MAJOR:
        raise IncompatibleError(
            "plan has another major version of the format",
            where=where,
            found=version,
            expected=f"{FORMAT_MAJOR}.x, which this version of Fulcrum reads",
            hint=UPDATE if major > FORMAT_MAJOR else RECOMPILE,
        )
    return UPDATE if minor > int(FORMAT.split(".")[1]) else RECOMPILE


def _decode(data: bytes, kind: type[_T], origin: object, hint: str) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _schema_error(str(error), data, origin, hint) from error
    except msgspec.MsgspecError as error:
        raise InputError("not JSON", where=origin, found=error, hint=hint) from error
    except RecursionError as error:
        raise InputError(
            "nested too deeply", where=origin, expected="a plan document", hint=hint
        ) from error


def _schema_error(message: str, data: bytes, origin: object, hint: str) -> InputError:
    match = _SCHEMA_ERROR.fullmatch(message)
    parts = match.groupdict() if match else {"what": message}
    path = parts.get("path") or "$"
    found = parts.get("found")
    if parts.get("expected"):
        found = _value_at(data, path) or found
    return InputError(
        parts.get("what") or "wrong value",
        where=f"{origin}: {path}",
        found=found,
        expected=parts.get("expected"),
        hint=hint,
    )


def _value_at(data: bytes, path: str) -> str | None:
    """The value that msgspec complained about, shortened; None if it cannot be quoted."""
    if len(data) > _MAX_QUOTED_DOCUMENT_BYTES:
        return None
    try:
        node = msgspec.json.decode(data)
        for name, index in _STEP.findall(path):
            node = node[name] if name else node[int(index)]
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError):
        return None
    return reprlib.repr(node)


def _not_finite(node: object, path: str) -> str | None:
    """Path to the first number below ``node`` that is NaN or infinite."""
    children: list[tuple[str, object]] = []
    if isinstance(node, float):
        return None if math.isfinite(node) else path
    if isinstance(node, msgspec.Struct):
        children = [(f"{path}.{name}", getattr(node, name)) for name in node.__struct_fields__]
    elif isinstance(node, tuple):
        children = [(f"{path}[{place}]", child) for place, child in enumerate(node)]
    return next((bad for where, child in children if (bad := _not_finite(child, where))), None)
