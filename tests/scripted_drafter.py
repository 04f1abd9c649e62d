"""A drafter whose candidates are a function of the path, and that checks how it is used."""

from collections.abc import Callable, Sequence

from profiles.words import NodeId
from runtime.sampling import Candidates
from runtime.tree import ROOT, TokenTree

Script = Callable[[list[int], int], Candidates]


class ScriptedDrafter:
    """``script(path tokens, count)`` answers; ``passes`` records the nodes of each pass."""

    def __init__(self, script: Script, pass_us: float = 10.0, row_us: float = 1.0) -> None:
        self.script = script
        self.pass_us, self.row_us = pass_us, row_us
        self.passes: list[list[NodeId]] = []
        self._expanded: set[NodeId] = set()

    def begin(self, _tokens: Sequence[int], /) -> None:
        self.passes, self._expanded = [], set()

    def expand(self, tree: TokenTree, nodes: Sequence[NodeId], count: int) -> list[Candidates]:
        assert nodes
        if not self._expanded:
            assert list(nodes) == [ROOT]
        else:
            assert all(tree.parents[node] in self._expanded for node in nodes)
        assert not self._expanded & set(nodes)
        self._expanded |= set(nodes)
        self.passes.append(list(nodes))
        found = [self.script(tree.path_tokens(node), count) for node in nodes]
        assert all(len(candidates.ids) <= count for candidates in found)
        return found

    def accept(self, _tree: TokenTree, _path: Sequence[NodeId], /) -> None:
        pass

    def price_us(self, rows: int, _context: int, /) -> float:
        return self.pass_us + self.row_us * rows
