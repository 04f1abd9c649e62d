"""Ways to break a file or a document: cut, flip, swap for what is no file, hostile values."""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HUGE = (2**31, 2**32, 2**48, 2**63 - 1, 2**63, 2**64 - 1, 10**30, 10**400)
SMALL = (-(2**63), -1, 0, 1)
FLOATS = (1e308, -1e308, 1e-320, 0.5)
OTHER: tuple[Any, ...] = (
    None,
    True,
    "",
    "x",
    "\u0000",
    "../x",
    "/etc/passwd",
    [],
    {},
    [[]],
    [None],
)


class Case(NamedTuple):
    """One broken input."""

    name: str
    kind: str
    """Reader that it is for."""
    path: Path
    certain: bool
    """It must be refused; otherwise it may turn out harmless."""


class Corpus:
    """Makes copies of a small valid folder or file, each broken in one way."""

    def __init__(self, kind: str, root: Path, valid: Path) -> None:
        self.kind, self.root, self.valid = kind, root, valid
        self.cases: list[Case] = []
        self.random = random.Random(kind)

    def add(self, name: str, change: Callable[[Path], object], certain: bool = True) -> None:
        """A copy that ``change`` breaks; it is given the copy's path."""
        folder = self.root / f"{len(self.cases):04}"
        folder.mkdir(parents=True)
        path = folder / self.valid.name
        if self.valid.is_dir():
            path.mkdir()
            for file in self.valid.iterdir():
                # Breaking a copy replaces a file, so that the original keeps its content
                os.link(file, path / file.name)
        else:
            os.link(self.valid, path)
        change(path)
        self.cases.append(Case(f"{self.kind}/{name}", self.kind, path, certain))


def replace(path: Path, data: bytes) -> None:
    """New content under the name; what the name was linked to stays."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def cuts(data: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """``data`` cut off at places spread over it, more of them near the start."""
    places = sorted({int(len(data) * (step / count) ** 3) for step in range(count)})
    for place in places:
        yield f"cut at {place}", data[:place]


def flips(
    data: bytes, count: int, source: random.Random, end: int = 0
) -> Iterator[tuple[str, bytes]]:
    """``data`` with one bit changed, within its first ``end`` bytes (0: anywhere)."""
    for _ in range(count):
        place, bit = source.randrange(min(end or len(data), len(data))), source.randrange(8)
        broken = bytearray(data)
        broken[place] ^= 1 << bit
        yield f"bit {bit} of byte {place}", bytes(broken)


def not_files(path: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """What may be where a file should be. ``path`` is relative to the copy, or ``.``."""

    def at(copy: Path) -> Path:
        place = copy if path == Path() else copy / path
        place.unlink()
        return place

    def large(copy: Path) -> None:
        with at(copy).open("wb") as file:
            file.truncate(2**40)

    yield "missing", at
    yield "empty", lambda copy: at(copy).touch()
    yield "folder", lambda copy: at(copy).mkdir()
    yield "named pipe", lambda copy: os.mkfifo(at(copy))
    yield "link to itself", lambda copy: at(copy).symlink_to(path.name or copy.name)
    yield "link to nothing", lambda copy: at(copy).symlink_to("/nowhere/at/all")
    yield "link to zeros without end", lambda copy: at(copy).symlink_to("/dev/zero")
    yield "link to noise without end", lambda copy: at(copy).symlink_to("/dev/urandom")
    yield "link to a folder", lambda copy: at(copy).symlink_to("/etc")
    yield "a tebibyte of nothing", large


def broken_json(text: str) -> Iterator[tuple[str, bytes]]:
    """JSON that is none, or that a careless reader trips over."""
    data = text.encode()
    yield "deep lists", b"[" * 100_000 + b"]" * 100_000
    yield "deep objects", b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    yield "deep value", text.replace("{", '{"x": ' + "[" * 90_000 + "]" * 90_000 + ", ", 1).encode()
    yield "not a number", text.replace("{", '{"x": NaN, ', 1).encode()
    yield "UTF-16", text.encode("utf-16")
    yield "Latin-1", text.replace("{", '{"\xe9": 1, ', 1).encode("latin-1")
    yield "null byte", data + b"\0"
    yield "text behind", data + b"{}"
    yield "single quotes", data.replace(b'"', b"'")
    yield "a list", b"[" + data + b"]"
    yield "a string", json.dumps(text).encode()
    yield "null", b"null"
    yield "lone surrogate", text.replace("{", '{"\\ud800": "\\udfff", ', 1).encode()
    yield "digits without end", text.replace("{", '{"x": ' + "9" * 500_000 + ", ", 1).encode()


def hostile_values(document: Any, count: int, source: random.Random) -> Iterator[tuple[str, Any]]:
    """``document`` with one value changed: of another type, too large, too small, gone."""
    places = list(_places(document, ()))
    values: list[Any] = [*HUGE, *SMALL, *FLOATS, *OTHER, _Gone]
    for _ in range(count):
        place, value = source.choice(places), source.choice(values)
        changed = json.loads(json.dumps(document))
        node = changed
        for step in place[:-1]:
            node = node[step]
        if value is _Gone:
            del node[place[-1]]
        else:
            node[place[-1]] = value
        shown = "gone" if value is _Gone else repr(value)[:24]
        yield f"{'.'.join(map(str, place))} = {shown}", changed


class _Gone:
    pass


def _places(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(node, Mapping):
        children = list(node.items())
    elif isinstance(node, list):
        children = list(enumerate(node))[:6]
    else:
        return
    for key, child in children:
        yield from _places(child, (*path, key))
