"""Acceptance as it is met while running, against what calibration said.

A text can be easier or harder to draft than those of the calibration. The plan's probabilities are
not solved for again: their odds are scaled by how often drafted nodes were accepted of late.
"""

import bisect
from collections.abc import Sequence

from profiles.words import NodeId
from runtime.plan_cycles import Growth
from runtime.tree import TokenTree

MEMORY = 0.95
"""What a cycle leaves of those before it: about twenty cycles count."""
PRIOR = 4.0
"""Hits and misses, each, that speak for the calibration; they also lead back to it when nothing is
drafted any more, so that drafting is tried again."""
HOPE = 0.005
"""By how much a cycle that drafts nothing brings hope back: slowly, for each try costs a pass."""
BOUND = 4.0
"""Most that the odds are scaled, up or down."""


class Feedback:
    """The running correction of one session; each envelope has its own.

    Candidates of rank 0 and those of all other ranks are corrected apart, since the more often the
    first one is right, the less often the others are.
    """

    def __init__(self, growth: Growth) -> None:
        self._growth = growth
        self._met = [[0.0, 0.0], [0.0, 0.0]]
        """Hits and misses, decayed, of rank 0 and of the others."""
        self._expected = [[0.0, 0.0], [0.0, 0.0]]
        """What the calibration said of the same nodes."""
        self._hopes = [max(row) for row in growth.hits]
        self._usual = list(self._hopes)
        """Running mean of the calibrated probability, by rank. It begins with hope, which costs a
        pass where it is wrong; too little hope would never be put right."""

    def calibrated(self, rank: int, probability: float) -> float:
        """Measured acceptance of a candidate, given that its parent is accepted."""
        row = self._growth.hits[min(rank, len(self._growth.hits) - 1)]
        return row[max(bisect.bisect_right(self._growth.bands, probability) - 1, 0)]

    def corrected(self, rank: int, chance: float) -> float:
        """A calibrated probability as this session bears it out."""
        scaled = self.factor(rank) * chance
        return scaled / (1 - chance + scaled) if scaled else 0.0

    def factor(self, rank: int) -> float:
        """What the odds of a rank are multiplied by."""
        kind = min(rank, 1)
        (hits, misses), (said_hits, said_misses) = self._met[kind], self._expected[kind]
        odds = (hits + PRIOR) / (misses + PRIOR)
        said = (said_hits + PRIOR) / (said_misses + PRIOR)
        return min(max(odds / said, 1 / BOUND), BOUND)

    def usual(self, rank: int) -> float:
        """Corrected acceptance to be expected of a candidate that is not known yet."""
        return self.corrected(rank, self._usual[min(rank, len(self._usual) - 1)])

    def notice(self, rank: int, chance: float) -> None:
        """A candidate was drafted: its calibrated probability counts for ``usual``."""
        if rank < len(self._usual):
            self._usual[rank] += (1 - MEMORY) * (chance - self._usual[rank])

    def observe(
        self,
        tree: TokenTree,
        ranks: Sequence[int],
        chances: Sequence[float],
        path: Sequence[NodeId],
    ) -> None:
        """The target agreed with ``path`` of the verified ``tree``; call it once every cycle.

        ``ranks`` and calibrated ``chances`` are by node. Only children of the path's nodes tell
        something: what hangs on a rejected node was not put to the test.
        """
        for sums in (*self._met, *self._expected):
            sums[0] *= MEMORY
            sums[1] *= MEMORY
        if len(tree) == 1:
            pairs = zip(self._usual, self._hopes, strict=True)
            self._usual = [mean + HOPE * (hope - mean) for mean, hope in pairs]
        accepted = set(path)
        for parent in path:
            for node in tree.children(parent):
                kind, chance = min(ranks[node], 1), chances[node]
                self._met[kind][node not in accepted] += 1
                self._expected[kind][0] += chance
                self._expected[kind][1] += 1 - chance
