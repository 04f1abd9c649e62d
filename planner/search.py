"""Searches drafts: proposals of the knapsack, measured agreement, n-gram replays, best cycles."""

import math
from collections.abc import Sequence

import msgspec

from planner.agreement import DepthCounts
from planner.buckets import Range, ranges
from planner.calibrate import Calibration
from planner.cycles import (
    MARGIN,
    Option,
    best,
    ngram_option,
    off_option,
    plain_option,
    rank,
    skip_option,
)
from planner.layers import SHARES, Proposal, Surrogate, propose, values
from planner.lookup import LookupOutcome, replay, replay_all
from planner.model_drafts import ModelDrafts
from planner.pass_tables import PassTimes
from planner.placement import Machine
from planner.prompt_file import Split
from profiles.words import SubLayerId
from runtime.plan_cycles import DraftSource

DEPTH = 6
"""Longest chain that a skip mask drafts."""
FINALISTS = 2
"""Masks that are measured to full depth in a bucket, and n-gram settings that are re-scored."""
SHORTEST_CONTEXT = 64
"""Where the octaves of context begin."""
ALL_ACCEPTED = DepthCounts((0,), (1,))
"""Counts whose rate is 1."""

Mask = tuple[SubLayerId, ...]


class BucketChoice(msgspec.Struct, frozen=True):
    """A bucket with its options."""

    range: Range
    ranked: tuple[Option, ...]
    """The choice first, on the re-score split."""
    off: Option
    """Plain decoding at its fastest."""
    proposed: int
    """Skip masks that the knapsack proposed."""
    hopeful: int
    """Those that would win if every drafted token were accepted; the others are not measured."""


class Search:
    """Draft options by bucket; agreement is measured once per mask, whatever asks for it."""

    def __init__(
        self,
        machine: Machine,
        calibration: Calibration,
        context: int,
        drafts: ModelDrafts | None = None,
    ) -> None:
        """``machine`` has all of the target in memory; its buckets are those of every plan."""
        self._machine = machine
        self._calibration = calibration
        self._drafts = drafts
        self.ranges = ranges(machine, context)
        self._worth: list[float] = []
        self._proposals: dict[Range, list[Proposal]] = {}
        self._lookups: list[LookupOutcome] | None = None
        self._fastest: dict[Range, float] = {}
        """Tokens per second of the best cycle so far, where there is a draft model."""

    def run(self, times: PassTimes) -> list[BucketChoice]:
        """All buckets under one assignment of the target."""
        return settle([self._bucket(times, part) for part in self.ranges])

    def _bucket(self, times: PassTimes, part: Range) -> BucketChoice:
        at = part.middle
        off, plain = off_option(times, at), plain_option(times, at)
        options = [off, *self._lookup_options(times, at)]
        if self._drafts is not None and times.draft is not None:
            options += self._drafts.options(times, at)
        best_here = max(option.tokens_per_s for option in (plain, *options))
        to_beat = max(best_here, self._fastest.get(part, 0.0))
        if self._drafts is not None:
            self._fastest[part] = to_beat
        proposed = hopeful = 0
        if could_skip(times, at, to_beat):
            skips, proposed, hopeful = self._skip_options(times, part, to_beat)
            options += skips
        return BucketChoice(part, tuple(rank(options, off)), plain, proposed, hopeful)

    def _skip_options(
        self, times: PassTimes, part: Range, to_beat: float
    ) -> tuple[list[Option], int, int]:
        """Chains under the best masks, with how many were proposed and how many could win."""
        at, proposals = part.middle, self._proposed(part)
        favourite, hopeful = self._hopeful(times, at, proposals, to_beat)
        masks = self._promising(times, at, hopeful)[:FINALISTS]
        options: list[Option] = []
        for mask in masks or [favourite]:
            depth = DEPTH if masks else 1
            counts = self._calibration.draft_agreement(mask, Split.RESCORE, depth)
            options += [skip_option(times, at, mask, counts, n) for n in range(1, DEPTH + 1)]
        return options, len(proposals), len(hopeful)

    def _proposed(self, part: Range) -> list[Proposal]:
        """What the knapsack proposes; what single skips lose is measured when it is needed."""
        if part not in self._proposals:
            losses = self._calibration.skip_losses()
            self._worth = values(losses, Surrogate.AGREEMENT)
            units = _units(part, self._machine.spec.sub_layers)
            self._proposals[part] = propose(losses, units)
        return self._proposals[part]

    def reported(self, times: PassTimes, choice: BucketChoice) -> Option:
        """The chosen option as the report split has it."""
        at, chosen = choice.range.middle, choice.ranked[0]
        cycle = chosen.cycle
        if cycle.draft is DraftSource.SKIP:
            counts = self._calibration.draft_agreement(chosen.skipped, Split.REPORT, DEPTH)
            return skip_option(times, at, chosen.skipped, counts, cycle.length)
        if cycle.draft is DraftSource.MODEL and self._drafts is not None:
            return self._drafts.scored(times, at, chosen, Split.REPORT)
        if cycle.draft is DraftSource.NGRAM:
            texts = self._calibration.texts(Split.REPORT)
            outcome = replay(texts, cycle.ngram_min, cycle.ngram_max, cycle.length)
            return ngram_option(times, at, outcome)
        return chosen

    def _hopeful(
        self, times: PassTimes, at: int, proposals: Sequence[Proposal], to_beat: float
    ) -> tuple[Mask, list[Mask]]:
        """The mask that looks best, and those that would win if all they draft were accepted.

        Where there are none of the latter the favourite is measured all the same, one token deep,
        so that the plan can say by how much it loses.
        """
        guesses = {
            p.skipped: fastest(times, at, p.skipped, self._guess(p.skipped)) for p in proposals
        }
        favourite = max(guesses, key=lambda mask: (guesses[mask], mask))
        hopeful = [m for m in guesses if fastest(times, at, m, ALL_ACCEPTED) > to_beat]
        return favourite, hopeful

    def _guess(self, skipped: Mask) -> DepthCounts:
        """Agreement if the losses of single sub-layers were independent."""
        agreement = math.exp(-sum(self._worth[i] for i in skipped))
        scale = 1_000_000
        return DepthCounts((scale - 1,), (round(agreement * scale),))

    def _promising(self, times: PassTimes, at: int, masks: Sequence[Mask]) -> list[Mask]:
        """Masks by the speed that their agreement at depth 1, were it constant, would give."""
        scored = [
            (-fastest(times, at, m, self._calibration.draft_agreement(m, Split.RESCORE, 1)), m)
            for m in masks
        ]
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


def _units(part: Range, sub_layers: int) -> list[float]:
    """Knapsack weight of each sub-layer."""
    return [float((part.attention_units, part.mlp_units)[i % 2]) for i in range(sub_layers)]


def could_skip(times: PassTimes, at: int, to_beat: float) -> bool:
    """Whether the cheapest draft under a skip mask would win if all of it were accepted.

    A streamed target would read what drafts, once for every token: it never does.
    """
    if times.streaming is not None:
        return False
    full = times.drafting((), at)
    cheapest = full.head_us + min(SHARES) * (full.us - full.head_us) + times.cycle_us
    return any(
        1e6 * (n + 1) > to_beat * (n * cheapest + times.cycle_us + times.committing(n + 1, at).us)
        for n in range(1, DEPTH + 1)
    )


def fastest(times: PassTimes, at: int, mask: Mask, counts: DepthCounts) -> float:
    """Tokens per second of the best chain length, acceptance being ``counts`` at every depth."""
    return max(skip_option(times, at, mask, counts, n).tokens_per_s for n in range(1, DEPTH + 1))


def settle(choices: Sequence[BucketChoice]) -> list[BucketChoice]:
    """Plain decoding at its fastest in all buckets, unless drafts gain more over all contexts.

    Its rows are those of no other pass, so a plan has it everywhere or nowhere.
    """
    if mean_speed(choices) >= (1 + MARGIN) * plain_speed(choices):
        return list(choices)
    return [
        msgspec.structs.replace(
            choice, ranked=(choice.off, *(o for o in choice.ranked if o != choice.off))
        )
        for choice in choices
    ]


def mean_speed(choices: Sequence[BucketChoice]) -> float:
    """Tokens per second of the chosen cycles over all contexts."""
    return _over_contexts([(choice.range, choice.ranked[0].tokens_per_s) for choice in choices])


def plain_speed(choices: Sequence[BucketChoice]) -> float:
    """Tokens per second of plain decoding over all contexts."""
    return _over_contexts([(choice.range, choice.off.tokens_per_s) for choice in choices])


def _over_contexts(speeds: Sequence[tuple[Range, float]]) -> float:
    """Geometric mean in which each octave of context counts alike.

    So it depends neither on how many buckets there are nor on the longest context alone.
    """
    total = weights = 0.0
    for part, speed in speeds:
        start = max(part.start, SHORTEST_CONTEXT)
        octaves = math.log2(part.end / start) if part.end > start else 1.0
        total += octaves * math.log(speed)
        weights += octaves
    return math.exp(total / weights)
