"""The cycle of a bucket: of everything that could draft, what commits most tokens in least time.

Each option is priced as a whole: drafting passes with their heads, the verify pass at its padded
width, its head, and the constant of a cycle. KnapSpec's closed formula is the case of equal
acceptance at every depth and a verify pass whose cost does not grow; here both are measured.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from planner.agreement import DepthCounts
from planner.draft_replay import Replayed
from planner.lookup import LookupOutcome
from planner.pass_tables import NGRAM_US, PassTimes
from profiles.words import SubLayerId
from runtime.plan import Candidate, Decision, Forecast
from runtime.plan_cycles import (
    ALONE,
    OFF,
    Cycle,
    DraftShape,
    DraftSource,
    Growth,
    HeadOrder,
    TreeTemplate,
)

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
    template: TreeTemplate | None = None
    growth: Growth | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per time, KnapSpec's TPT."""
        return 1e6 * self.tokens / self.us


def cycle_us(
    times: PassTimes, context: int, drafting_us: float, rows: int, head_us: float
) -> float:
    """Time of a cycle. The flash reads ahead while the head and the next draft run."""
    rest = drafting_us + head_us + times.cycle_us
    return rest + times.verify_us(rows, context, ahead_us=rest)


def head_order(times: PassTimes, context: int, cycles: Mapping[Replayed, int]) -> HeadOrder:
    """Which order of the head is faster over these cycles and how often there were such.

    In one batch it runs over every row; along the path over those that were accepted and one more,
    each alone (Lever).
    """
    batch = path = 0.0
    for cycle, count in cycles.items():
        batch += count * times.head_us(cycle.rows, context)
        path += count * (cycle.accepted + 1) * times.head_us(1, context)
    return HeadOrder.PATH if path < batch else HeadOrder.BATCH


def off_option(times: PassTimes, context: int) -> Option:
    """Plain autoregressive decoding in passes that agree with those that verify drafts."""
    us = cycle_us(times, context, 0.0, 1, times.head_us(1, context))
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
    replayed = {Replayed(drafted + 1, (), hit): n for drafted, hit, n in outcome.cycles}
    cycle = Cycle(
        DraftSource.NGRAM,
        outcome.length,
        ngram_min=outcome.ngram_min,
        ngram_max=outcome.ngram_max,
    )
    option = Option(
        f"n-gram {outcome.ngram_min}-{outcome.ngram_max}, up to {outcome.length}",
        *(cycle, 1.0, 0.0, 1.0),
        acceptance=depth_rates(outcome),
    )
    return timed(times, context, option, replayed, NGRAM_US)


def timed(
    times: PassTimes,
    context: int,
    option: Option,
    replayed: Mapping[Replayed, int],
    lookup_us: float = 0.0,
) -> Option:
    """``option`` with what its replayed cycles yield and take, and the faster order of the head.

    Drafting passes are those of the draft model; each pays the constant of a pass.
    """
    order = head_order(times, context, replayed)
    along = order is HeadOrder.PATH
    tokens = drafted = us = 0.0
    for cycle, count in replayed.items():
        drafting = lookup_us + sum(
            times.proposing(width, context).us + times.cycle_us for width in cycle.levels
        )
        head = (cycle.accepted + 1 if along else 1) * times.head_us(
            1 if along else cycle.rows, context
        )
        tokens += count * (cycle.accepted + 1)
        drafted += count * (cycle.rows - 1)
        us += count * cycle_us(times, context, drafting, cycle.rows, head)
    cycles = sum(replayed.values()) or 1
    return msgspec.structs.replace(
        option,
        cycle=msgspec.structs.replace(option.cycle, head=order),
        tokens=tokens / cycles,
        drafted=drafted / cycles,
        us=us / cycles,
    )


def model_chain(name: str, length: int) -> Option:
    """A chain of the draft model, not priced yet."""
    return Option(f"{name}, chain of {length}", Cycle(DraftSource.MODEL, length), 1.0, 0.0, 1.0)


def model_tree(name: str, template: TreeTemplate) -> Option:
    """A static tree of the draft model; its number is given when the plan is put together."""
    nodes = len(template.parents)
    return Option(
        f"{name}, tree of {nodes} nodes, depth {template_depth(template)}",
        Cycle(DraftSource.MODEL, nodes, shape=DraftShape.STATIC),
        *(1.0, 0.0, 1.0),
        template=template,
    )


def model_growth(name: str, growth: Growth) -> Option:
    """A tree grown while decoding, likewise."""
    return Option(
        f"{name}, grown online up to {growth.max_nodes} nodes, depth {growth.max_depth}",
        Cycle(DraftSource.MODEL, growth.max_nodes, shape=DraftShape.ONLINE),
        *(1.0, 0.0, 1.0),
        growth=growth,
    )


def template_depth(template: TreeTemplate) -> int:
    """Of the deepest node; the root has depth 0."""
    depths = [0]
    for parent in template.parents:
        depths.append(depths[parent] + 1)
    return max(depths)


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
