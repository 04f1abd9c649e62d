"""What ``docs/commands.md`` says, for tests that hold the commands against it."""

from collections.abc import Iterable, Set
from pathlib import Path

_DOCUMENT = (Path(__file__).parents[1] / "docs" / "commands.md").read_text(encoding="utf-8")


def general() -> str:
    """What holds for every command."""
    return _DOCUMENT.partition("\n## ")[0]


def section(command: str) -> str:
    """What the document says of one command; empty if it does not mention it."""
    return _DOCUMENT.partition(f"\n## plan {command}")[2].partition("\n## ")[0]


def check_keys(command: str, found: Iterable[str], expected: Set[str]) -> None:
    """The keys are exactly the expected ones, and the command's section names each."""
    assert set(found) == expected
    assert {key for key in expected if f"`{key}`" not in section(command)} == set()
