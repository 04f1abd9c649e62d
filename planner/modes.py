"""Named ways to decode a plan: plain, as planned, or with a draft that the user picks."""

import re
from collections.abc import Sequence

import msgspec

from profiles.errors import InputError, nearest
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import ALONE, OFF, Cycle, DraftSource, runs_alone
from runtime.plan_tables import PassKind

AR = "ar"
OFF_MODE = "off"
SPEC = "spec"
_ALIASES = {"plan": SPEC}
_EXAMPLES = (AR, OFF_MODE, SPEC, "chain4", "chain8", "ngram4", "ngram8")
_DRAFTED = re.compile(r"(chain|ngram)([1-9]\d{0,2})")
_MAX_LENGTH = 63
"""The verify pass is one row wider, and tables of plans end at 64 rows."""
_NGRAM_MIN, _NGRAM_MAX = 1, 3
"""Suffix lengths to look up when the plan does not look up itself."""


class Mode(msgspec.Struct, frozen=True):
    """A way to decode."""

    name: str
    """``ar``, ``off``, ``spec``, ``chainN`` or ``ngramN``, N being the drafted tokens."""
    cycle: Cycle | None
    """None follows the plan's buckets."""


def parse_mode(name: str, plan: ExecutionPlan) -> Mode:
    """The mode called ``name``; ``plan`` is another word for ``spec``.

    ``ar`` is plain decoding at its fastest, ``off`` the one that drafts are held to token by token;
    they are the same where the plan has no pass of a single row.

    Raises:
        InputError: No such mode, or the plan has no skip mask to draft with.
    """
    known = _ALIASES.get(name.strip().lower(), name.strip().lower())
    if known == AR:
        return Mode(AR, plain(plan))
    if known == OFF_MODE:
        return Mode(OFF_MODE, OFF)
    if known == SPEC:
        return Mode(SPEC, None)
    match = _DRAFTED.fullmatch(known)
    if match is None or int(match[2]) > _MAX_LENGTH:
        hint = nearest(known, (*_EXAMPLES, *_ALIASES))
        raise InputError(
            "unknown mode",
            found=repr(name),
            expected=f"ar, off, spec, chainN or ngramN with N from 1 to {_MAX_LENGTH}",
            hint=hint,
        )
    length = int(match[2])
    return Mode(known, chain(plan, length) if match[1] == "chain" else ngram(plan, length))


def parse_modes(names: str, plan: ExecutionPlan) -> tuple[Mode, ...]:
    """Modes of a comma-separated list, each once, in its order; plain decoding comes first.

    With ``off`` if a mode drafts, since its output is to be compared with that.
    """
    if not names.strip(", "):
        raise InputError("no modes to measure", where="--modes", expected="such as ar,spec")
    named = [parse_mode(name, plan) for name in names.split(",") if name.strip()]
    modes = [parse_mode(AR, plan), *named]
    if any(reference(mode, plan) == OFF_MODE for mode in named):
        modes.insert(1, parse_mode(OFF_MODE, plan))
    return tuple({mode.name: mode for mode in modes}.values())


def plain(plan: ExecutionPlan) -> Cycle:
    """Plain decoding at its fastest."""
    return ALONE if runs_alone(plan.numerics) else OFF


def reference(mode: Mode, plan: ExecutionPlan) -> str:
    """The mode whose output ``mode`` has to equal token by token."""
    cycle = mode.cycle or plan.buckets[0].cycle
    return AR if cycle.lone or not runs_alone(plan.numerics) else OFF_MODE


def best_mask(plan: ExecutionPlan) -> int | None:
    """The skip mask that drafts best: one that a bucket uses, else the planner's first finalist.

    None when the plan has no mask, or no cost of drafting under one.
    """
    priced = {table.mask for table in plan.tables.passes if table.kind is PassKind.DRAFT}
    used = [b.cycle.mask for b in plan.buckets if b.cycle.draft is DraftSource.SKIP]
    others = [mask.id for mask in plan.masks if mask.skipped]
    return next((mask for mask in (*used, *others) if mask in priced), None)


def chain(plan: ExecutionPlan, length: int) -> Cycle:
    """A chain of ``length`` tokens that the target drafts under the plan's best skip mask."""
    mask = best_mask(plan)
    if mask is None:
        raise InputError(
            "the plan has no skip mask to draft a chain with",
            hint="leave chain modes out, or use ngramN",
        )
    return Cycle(DraftSource.SKIP, length, mask=mask)


def ngram(plan: ExecutionPlan, length: int) -> Cycle:
    """Up to ``length`` tokens looked up in the context, as the plan looks up if it does."""
    for cycle in planned_cycles(plan):
        if cycle.draft is DraftSource.NGRAM:
            return msgspec.structs.replace(cycle, length=length)
    return Cycle(DraftSource.NGRAM, length, ngram_min=_NGRAM_MIN, ngram_max=_NGRAM_MAX)


def planned_cycles(plan: ExecutionPlan) -> Sequence[Cycle]:
    """The different cycles of the plan's buckets, in their order."""
    return tuple(dict.fromkeys(bucket.cycle for bucket in plan.buckets))


def speculates(plan: ExecutionPlan) -> bool:
    """Whether any bucket drafts."""
    return any(cycle.draft is not DraftSource.OFF for cycle in planned_cycles(plan))
