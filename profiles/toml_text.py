"""TOML in and out: errors carry a path into the document, the text is readable and never varies.

Python reads TOML (``tomllib``) and does not write it. A table that holds ``value`` is written
inline, so that a number and where it comes from share a line; a list of lists is written one row
a line.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from profiles.errors import InputError

Table = Mapping[str, object]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """The document in ``text``; malformed TOML is an ``InputError`` with line and column."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            "not valid TOML", where=origin, found=error, hint="correct the text there"
        ) from None


def convert(value: object, kind: Any, root: str, origin: str) -> Any:
    """``value`` as the type ``kind``; ``root`` is its path in the document, ``origin`` the file.

    A wrong type or an exceeded bound is an ``InputError`` with the full path, such as
    ``$.processors[1].launch_us``.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `")
        path = root + (at.removesuffix("`").removeprefix("$") if at else "")
        expected, _, found = message.removeprefix("Expected ").partition(", got ")
        plain = not message.startswith("Expected ")
        raise InputError(
            message if plain else "wrong value",
            where=f"{origin} {path}",
            found=found or None,
            expected=None if plain else expected,
            hint="see the profile format for this field",
        ) from None


def toml_text(document: Table) -> str:
    """``document`` as TOML: keys in the order given, plain values before tables.

    Values are strings, booleans, numbers, lists and mappings with string keys; anything else is a
    ``TypeError``. Equal documents give equal text.
    """
    lines: list[str] = []
    _table(document, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(table: Table, path: tuple[str, ...], lines: list[str]) -> None:
    for key, value in table.items():
        if not _is_table(value) and not _is_table_list(value):
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in table.items():
        inner = (*path, key)
        name = ".".join(_key(part) for part in inner)
        if _is_table(value):
            lines.extend(("", f"[{name}]"))
            _table(cast(Table, value), inner, lines)
        elif _is_table_list(value):
            for element in cast(Sequence[Table], value):
                lines.extend(("", f"[[{name}]]"))
                _table(element, inner, lines)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and "value" not in value


def _is_table_list(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    elements = cast(Sequence[object], value)
    return bool(elements) and isinstance(elements[0], Mapping)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, except that JSON leaves DEL as it is
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: object) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        # 20 reads better than 20.0 and loads as the same number where one is expected
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, Mapping):
        table = cast(Table, value)
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in table.items()) + " }"
    if isinstance(value, Sequence):
        return _array(cast(Sequence[object], value))
    raise TypeError(f"cannot write {type(value).__name__} as TOML")


def _array(elements: Sequence[object]) -> str:
    texts = [_value(element) for element in elements]
    if elements and isinstance(elements[0], Sequence) and not isinstance(elements[0], str):
        return "[\n" + "".join(f"    {text},\n" for text in texts) + "]"
    return f"[{', '.join(texts)}]"
