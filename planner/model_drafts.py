"""What a draft model could do in a bucket: chains, static trees, trees grown online.

Chains and static trees are replayed from the ranks that the target's tokens have for the draft
model, on texts of the split that is asked for. Online growth is drafted for real on those texts,
once; in other buckets the same cycles are priced again.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from planner.calibrate import Calibration
from planner.cycles import (
    Option,
    best,
    cycle_us,
    model_chain,
    model_growth,
    model_tree,
    timed,
)
from planner.draft_acceptance import (
    BANDS,
    DraftReading,
    TextRanks,
    band_hits,
    rank_counts,
)
from planner.draft_replay import Replayed, replay_chain, replay_online, replay_static
from planner.pass_tables import PassTimes, cost_tables, possible_widths
from planner.prompt_file import Split
from planner.trees import TreeLimits, rank_rates, search_trees
from profiles.words import AttentionKernel
from runtime.plan_cycles import Growth, HeadOrder
from runtime.pricing import PriceList

CHAINS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""Lengths that are tried."""
LIMITS = TreeLimits(nodes=63, depth=24, branch=4)
"""Of static trees: a pass of 64 rows."""
GROWN = Growth(max_nodes=63, max_depth=32, branch=3, batch=8, bands=BANDS, hits=())
"""Envelope of online growth; its probabilities are measured."""
SHORTEST_CONTEXT = 64
FINALISTS = 2
"""Chains and trees of the search split that are scored again."""


class ModelDrafts:
    """A draft model beside the target on the calibration's texts."""

    def __init__(self, calibration: Calibration, reading: DraftReading, name: str) -> None:
        self.name = name
        self._calibration = calibration
        self._reading = reading
        self._grown: dict[tuple[Growth, Split, PassTimes], Mapping[Replayed, int]] = {}

    def options(self, times: PassTimes, at: int) -> list[Option]:
        """The best of each shape on the search split, as the re-score split has them."""
        found = self._finalists(times, at)
        scored = [self.scored(times, at, option, Split.RESCORE) for option in found]
        if times.machine.attention is AttentionKernel.EXACT:
            hits = band_hits(self._ranks(Split.SEARCH), ranks=GROWN.branch)
            option = model_growth(self.name, msgspec.structs.replace(GROWN, hits=hits))
            scored.append(self.scored(times, at, option, Split.RESCORE))
        return scored

    def scored(self, times: PassTimes, at: int, option: Option, split: Split) -> Option:
        """``option`` as the texts of ``split`` have it."""
        cycles = self._replayed(times, at, option, split)
        return timed(times, at, option, cycles)

    def _finalists(self, times: PassTimes, at: int) -> list[Option]:
        widest = possible_widths(times)[-1]
        chains = [model_chain(self.name, n) for n in CHAINS if n < widest]
        found = best(self.scored(times, at, option, Split.SEARCH) for option in chains)[:FINALISTS]
        if times.machine.attention is AttentionKernel.FUSED:
            return found
        acceptance = rank_rates(
            rank_counts(self._ranks(Split.SEARCH), LIMITS.depth, reach=LIMITS.branch)
        )
        searched = search_trees(acceptance, BucketCosts(times, at), LIMITS)
        trees = [searched.best, *searched.runners_up]
        options = [model_tree(self.name, tree.template) for tree in trees]
        ranked = best(self.scored(times, at, option, Split.SEARCH) for option in options)
        return [*found, *ranked[:FINALISTS]]

    def _replayed(
        self, times: PassTimes, at: int, option: Option, split: Split
    ) -> Mapping[Replayed, int]:
        """Cycles on the texts of ``split``, and how often there was such a one."""
        if option.growth is not None:
            return self._really_drafted(times, at, option.growth, split)
        if option.template is not None:
            replay = partial(replay_static, template=option.template)
        else:
            replay = partial(replay_chain, length=option.cycle.length)
        return Counter(cycle for text in self._ranks(split) for cycle in replay(text))

    def _really_drafted(
        self, times: PassTimes, at: int, growth: Growth, split: Split
    ) -> Mapping[Replayed, int]:
        """Growth looks times up as it will at run time: in the tables of the first bucket that
        asks."""
        key = growth, split, times
        if key not in self._grown:
            prices = PriceList(cost_tables(times, [()], max(at, SHORTEST_CONTEXT), [at]))
            drafter = self._reading.drafter(prices)
            texts = self._calibration.texts(split)
            cycles: list[Replayed] = []
            for index, text in enumerate(texts):
                self._calibration.report(f"growing trees online ({split})", index, len(texts))
                times_after = partial(prices.cycle, 0, head=HeadOrder.BATCH)
                cycles += replay_online(text, drafter, growth, times_after)
            self._grown[key] = Counter(cycles)
        return self._grown[key]

    def _ranks(self, split: Split) -> list[TextRanks]:
        return self._calibration.draft_ranks(self._reading, split)


class BucketCosts(NamedTuple):
    """``planner.trees.TreeCosts`` of a bucket."""

    times: PassTimes
    context: int

    @property
    def steps(self) -> Sequence[int]:
        """Rows at which a width step of the verify pass ends."""
        return possible_widths(self.times)

    def draft_us(self, rows: int, /) -> float:
        """A pass of the draft model, its head and its constant included."""
        return self.times.proposing(rows, self.context).us + self.times.cycle_us

    def cycle_us(self, draft_us: float, rows: int, /) -> float:
        """A whole cycle, the head running over all rows in one batch."""
        head_us = self.times.head_us(rows, self.context)
        return cycle_us(self.times, self.context, draft_us, rows, head_us)
