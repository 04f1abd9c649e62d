"""Prompt files: JSON lines with ``id``, ``category``, ``prompt`` and optionally ``split``."""

import enum
import importlib.resources
import os
from pathlib import Path
from typing import Annotated

import msgspec

from profiles.errors import InputError, nearest

MAX_BYTES = 64 * 2**20
"""A larger file is refused before it is read: it is a data set, not a list of prompts."""

BUNDLED = ("calibration", "verify")

_LINE = (
    "a JSON object with the strings id, category and prompt, and optionally split"
    " (search, rescore or report)"
)
_UTF8_BOM = b"\xef\xbb\xbf"


class Split(enum.StrEnum):
    """Which stage of calibration may look at a prompt; each prompt serves one stage only."""

    SEARCH = "search"
    """Measurements that candidates are chosen from."""
    RESCORE = "rescore"
    """Ranks the survivors of the search again."""
    REPORT = "report"
    """The numbers shown to the user; they never chose anything."""


class Prompt(msgspec.Struct, frozen=True):
    """One line of a prompt file; keys beyond these four are ignored."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    """Unique within its file."""
    category: Annotated[str, msgspec.Meta(min_length=1)]
    """Groups prompts in reports, such as ``code`` or ``chat``."""
    prompt: str
    """What the user says, without chat template; never blank."""
    split: Split | None = None
    """Absent where a file leaves the split to whoever reads it."""


def load_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """The prompts of a file, in file order; blank lines are skipped.

    Raises:
        InputError: The file is missing, too large, empty or malformed; says ``file:line``.
    """
    file = Path(path)
    if not file.is_file():
        found = "a folder" if file.is_dir() else "no such file"
        raise InputError("cannot read prompts", where=file, found=found, expected="a JSONL file")
    try:
        with file.open("rb") as stream:
            # One byte past the limit, rather than the size beforehand: a file may grow meanwhile
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError("cannot read prompts", where=file, found=error.strerror) from error
    return _parse(data, file)


def bundled_prompts(name: str) -> list[Prompt]:
    """The prompts that come with Fulcrum: ``calibration`` (with splits) or ``verify``.

    Raises:
        InputError: No bundled file has this name.
    """
    if name not in BUNDLED:
        hint = nearest(name, BUNDLED)
        raise InputError("unknown bundled prompts", found=repr(name), hint=hint)
    resource = importlib.resources.files("planner") / "prompts" / f"{name}.jsonl"
    return _parse(resource.read_bytes(), f"prompts/{name}.jsonl")


def _parse(data: bytes, where: object) -> list[Prompt]:
    if len(data) > MAX_BYTES:
        raise InputError(
            "prompt file is too large", where=where, expected=f"at most {MAX_BYTES} bytes"
        )
    line_of_id: dict[str, int] = {}
    prompts: list[Prompt] = []
    # Split on bytes: str.splitlines would also split at U+2028, which JSON allows in a string
    for number, line in enumerate(data.removeprefix(_UTF8_BOM).split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{where}:{number}"
        prompt = _parse_line(line, place)
        first = line_of_id.setdefault(prompt.id, number)
        if first != number:
            raise InputError(
                "duplicate id",
                where=place,
                found=f"{prompt.id!r}, also on line {first}",
                expected="an id that no other line has",
            )
        prompts.append(prompt)
    if not prompts:
        raise InputError("no prompts", where=where, found="an empty file", expected=_LINE)
    return prompts


def _parse_line(line: bytes, place: str) -> Prompt:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} in column {error.start + 1}"
        raise InputError("not UTF-8", where=place, found=found, expected="UTF-8 text") from error
    try:
        prompt = msgspec.json.decode(text, type=Prompt)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError("not a prompt", where=place, found=error, expected=_LINE) from error
    if not prompt.prompt.strip():
        raise InputError("blank prompt", where=place, found=repr(prompt.prompt), expected="text")
    return prompt
