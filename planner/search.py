"""Searches drafts for one assignment of the target: proposals, measured agreement, best cycles."""

from collections.abc import Sequence

import msgspec

from planner.buckets import edges, representative
from planner.calibrate import Calibration
from planner.cycles import Option, best, ngram_option, off_option, skip_option
from planner.layers import Proposal, propose
from planner.lookup import LookupOutcome, replay, replay_all
from planner.pass_tables import PassTimes
from planner.placement import Work
from planner.prompt_file import Split
from profiles.words import SubLayerId
from runtime.plan import DraftSource

DEPTH = 6
"""Longest chain that a skip mask drafts."""
FINALISTS = 2
"""Masks that are measured to full depth in a bucket, and n-gram settings that are re-scored."""

Mask = tuple[SubLayerId, ...]


class BucketChoice(msgspec.Struct, frozen=True):
    """A bucket with its options."""

    start: int
    end: int
    ranked: tuple[Option, ...]
    """Fastest first, on the re-score split."""
    off: Option
    masks: tuple[Mask, ...]
    """Skip masks that were measured, most promising first."""


class Search:
    """Draft options by bucket; agreement is measured once per mask, whatever asks for it."""

    def __init__(self, calibration: Calibration, context: int) -> None:
        self._calibration = calibration
        self._context = context
        self._lookups: list[LookupOutcome] | None = None

    def run(self, times: PassTimes) -> list[BucketChoice]:
        """All buckets under one assignment of the target."""
        return [self._bucket(times, *edge) for edge in edges(times, self._context)]

    def _bucket(self, times: PassTimes, start: int, end: int) -> BucketChoice:
        at = representative(start, end)
        off = off_option(times, at)
        proposals = propose(self._calibration.skip_losses(), self._costs(times, at))
        masks = self._promising(times, at, proposals)
        options = [off, *self._lookup_options(times, at)]
        for mask in masks[:FINALISTS]:
            counts = self._calibration.draft_agreement(mask, Split.RESCORE, DEPTH)
            options += [skip_option(times, at, mask, counts, n) for n in range(1, DEPTH + 1)]
        return BucketChoice(start, end, tuple(best(options)), off, tuple(masks))

    def reported(self, times: PassTimes, choice: BucketChoice) -> Option:
        """The chosen option as the report split has it."""
        at, chosen = representative(choice.start, choice.end), choice.ranked[0]
        cycle = chosen.cycle
        if cycle.draft is DraftSource.SKIP:
            counts = self._calibration.draft_agreement(chosen.skipped, Split.REPORT, DEPTH)
            return skip_option(times, at, chosen.skipped, counts, cycle.length)
        if cycle.draft is DraftSource.NGRAM:
            texts = self._calibration.texts(Split.REPORT)
            outcome = replay(texts, cycle.ngram_min, cycle.ngram_max, cycle.length)
            return ngram_option(times, at, outcome)
        return chosen

    def _costs(self, times: PassTimes, at: int) -> list[float]:
        """Time of each sub-layer when one token is drafted."""
        spans = times.drafting((), at).spans
        place = [span.processor for span in spans for _ in range(span.first, span.end)]
        work = Work((), 1, 1, at)
        return [
            times.machine.stage_us(place[i], SubLayerId(i), work) or 0.0 for i in range(len(place))
        ]

    def _promising(
        self, times: PassTimes, at: int, proposals: Sequence[Proposal]
    ) -> list[Mask]:
        """Masks by the speed that their agreement at depth 1, were it constant, would give."""
        scored: list[tuple[float, Mask]] = []
        for proposal in proposals:
            counts = self._calibration.draft_agreement(proposal.skipped, Split.RESCORE, 1)
            speed = max(
                skip_option(times, at, proposal.skipped, counts, n).tokens_per_s
                for n in range(1, DEPTH + 1)
            )
            scored.append((-speed, proposal.skipped))
        return [mask for _, mask in sorted(scored)]

    def _lookup_options(self, times: PassTimes, at: int) -> list[Option]:
        """The best settings of the search split, as the re-score split has them."""
        if self._lookups is None:
            self._lookups = replay_all(self._calibration.texts(Split.SEARCH))
        found = best(ngram_option(times, at, outcome) for outcome in self._lookups)[:FINALISTS]
        texts = self._calibration.texts(Split.RESCORE)
        cycles = [option.cycle for option in found]
        outcomes = [replay(texts, c.ngram_min, c.ngram_max, c.length) for c in cycles]
        return [ngram_option(times, at, outcome) for outcome in outcomes]


def geometric_speed(choices: Sequence[BucketChoice]) -> float:
    """Tokens per second over the buckets, geometric mean: no context length rules the others."""
    product = 1.0
    for choice in choices:
        product *= choice.ranked[0].tokens_per_s ** (1 / len(choices))
    return product
