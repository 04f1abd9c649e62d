"""The cycle of a bucket: of everything that could draft, what commits most tokens in least time.

Each option is priced as a whole: drafting passes with their heads, the verify pass at its padded
width, its head, and the constant of a cycle. KnapSpec's closed formula is the case of equal
acceptance at every depth and a verify pass whose cost does not grow; here both are measured.
"""

from collections.abc import Iterable, Sequence

import msgspec

from planner.agreement import DepthCounts
from planner.lookup import LookupOutcome
from planner.pass_tables import NGRAM_US, PassTimes
from profiles.words import SubLayerId
from runtime.plan import Candidate, Decision, Forecast
from runtime.plan_cycles import ALONE, OFF, Cycle, DraftSource

MARGIN = 0.05
"""What a draft has to promise over plain decoding: less is within the prediction's error."""
SHOWN = 6
"""Candidates that a decision lists."""


class Option(msgspec.Struct, frozen=True):
    """A cycle with what it yields and takes at one context."""

    name: str
    cycle: Cycle
    tokens: float
    """Committed tokens per cycle."""
    drafted: float
    us: float
    acceptance: tuple[float, ...] = ()
    skipped: tuple[SubLayerId, ...] = ()
    """Sub-layers that a self-draft leaves out."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per time, KnapSpec's TPT."""
        return 1e6 * self.tokens / self.us


def off_option(times: PassTimes, context: int) -> Option:
    """Plain autoregressive decoding in passes that agree with those that verify drafts."""
    us = times.cycle_us + times.committing(1, context).us
    return Option("off, beside drafts" if times.runs_alone else "off", OFF, 1.0, 0.0, us)


def plain_option(times: PassTimes, context: int) -> Option:
    """Plain autoregressive decoding at its fastest: what speculation has to beat."""
    if not times.runs_alone:
        return off_option(times, context)
    return Option("off", ALONE, 1.0, 0.0, times.cycle_us + times.alone(context).us)


def skip_option(
    times: PassTimes,
    context: int,
    skipped: Sequence[SubLayerId],
    counts: DepthCounts,
    length: int,
) -> Option:
    """Chain of ``length`` tokens under a skip mask; deeper than measured repeats the last rate.

    The cycle's mask number is given when the plan is put together.
    """
    rates = counts.rates()
    rates = (*rates, *([rates[-1]] * (length - len(rates))))[:length]
    tokens = chain = 1.0
    for rate in rates:
        chain *= rate
        tokens += chain
    us = (length + 1) * times.cycle_us + length * times.drafting(skipped, context).us
    us += times.committing(length + 1, context).us
    return Option(
        name=f"skip {len(skipped)}, chain of {length}",
        cycle=Cycle(DraftSource.SKIP, length),
        tokens=tokens,
        drafted=float(length),
        us=us,
        acceptance=tuple(rates),
        skipped=tuple(skipped),
    )


def ngram_option(times: PassTimes, context: int, outcome: LookupOutcome) -> Option:
    """Lookup drafting as replayed; cycles without a match are plain steps."""
    cycles = sum(n for *_, n in outcome.cycles) or 1
    tokens = drafted = us = 0.0
    for proposed, accepted, count in outcome.cycles:
        tokens += count * (accepted + 1)
        drafted += count * proposed
        us += count * times.committing(proposed + 1, context).us
    cycle = Cycle(
        DraftSource.NGRAM,
        outcome.length,
        ngram_min=outcome.ngram_min,
        ngram_max=outcome.ngram_max,
    )
    return Option(
        f"n-gram {outcome.ngram_min}-{outcome.ngram_max}, up to {outcome.length}",
        cycle,
        tokens / cycles,
        drafted / cycles,
        us / cycles + times.cycle_us + NGRAM_US,
        depth_rates(outcome),
    )


def depth_rates(outcome: LookupOutcome) -> tuple[float, ...]:
    """Acceptance by depth, given a draft that long whose earlier tokens were accepted."""
    rates: list[float] = []
    for depth in range(1, outcome.length + 1):
        tried = sum(n for d, a, n in outcome.cycles if d >= depth and a >= depth - 1)
        hits = sum(n for d, a, n in outcome.cycles if d >= depth and a >= depth)
        if not tried:
            break
        rates.append(hits / tried)
    return tuple(rates)


def best(options: Iterable[Option]) -> list[Option]:
    """Fastest first; among equals the shorter draft, then the name."""
    return sorted(options, key=lambda o: (-o.tokens_per_s, o.cycle.length, o.name))


def rank(options: Iterable[Option], off: Option) -> list[Option]:
    """Fastest first, but plain decoding before whatever promises less than ``MARGIN`` over it."""
    ranked = best(options)
    if ranked[0].tokens_per_s < off.tokens_per_s * (1 + MARGIN):
        ranked.remove(off)
        ranked.insert(0, off)
    return ranked


def forecast(option: Option, plain: Option) -> Forecast:
    """What the plan states of a bucket; ``plain`` is the device's fastest plain decoding."""
    return Forecast(option.tokens, option.drafted, option.us, plain.us, option.acceptance)


def decide(name: str, ranked: Sequence[Option], off: Option, note: str) -> Decision:
    """The record of choosing ``ranked[0]``."""
    chosen = ranked[0]
    shown = [*ranked[:SHOWN], *([off] if off not in ranked[:SHOWN] else [])]
    return Decision(
        name=name,
        chosen=chosen.name,
        objective="predicted tokens per second, maximised; a draft has to promise"
        f" {MARGIN:.0%} over off",
        value=chosen.tokens_per_s,
        solver="the fastest of all options that were measured",
        gap=None,
        candidates=tuple(Candidate(o.name, o.tokens_per_s) for o in best(shown)),
        flips_when=_flip(ranked, off),
        note=note,
    )


def _flip(ranked: Sequence[Option], off: Option) -> str:
    chosen = ranked[0]
    if len(ranked) == 1:
        return "there was nothing to choose from"
    rival = ranked[1]
    if chosen is not off:
        beaten = rival.tokens_per_s * (1 + MARGIN if rival is off else 1)
        needed = beaten * chosen.us / 1e6
        return (
            f"committed tokens per cycle fall from {chosen.tokens:.2f} to {needed:.2f}; "
            f"then {rival.name} is as fast"
        )
    needed = off.tokens_per_s * (1 + MARGIN) * rival.us / 1e6
    if needed > rival.cycle.length + 1:
        return f"never by acceptance: {rival.name} loses even if every draft is accepted"
    return f"{rival.name} commits {needed:.2f} tokens per cycle instead of {rival.tokens:.2f}"
