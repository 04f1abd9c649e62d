"""Tables of the benchmarks."""

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
