"""Named ways to decode a plan: plain, as planned, or with a draft that the user picks."""

import re
from collections.abc import Sequence

import msgspec

from profiles.errors import InputError, nearest
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import (
    ALONE,
    OFF,
    Cycle,
    DraftShape,
    DraftSource,
    HeadOrder,
    runs_alone,
)
from runtime.plan_tables import PassKind

AR = "ar"
OFF_MODE = "off"
SPEC = "spec"
ONLINE = "online"
FORMS = "ar, off, spec, chainN, modelN, skipN, ngramN, treeN or online"
"""What a mode may be called, for messages."""
_ALIASES = {"plan": SPEC}
_EXAMPLES = (
    *(AR, OFF_MODE, SPEC, ONLINE, "tree"),
    *(f"{name}{count}" for name in ("chain", "model", "skip", "ngram") for count in (4, 8)),
)
_DRAFTED = re.compile(r"(chain|model|skip|ngram)([1-9]\d{0,2})")
_TREE = re.compile(r"tree([1-9]\d{0,3})?")
_MAX_LENGTH = 63
"""The verify pass is one row wider, and tables of plans end at 64 rows."""
_NGRAM_MIN, _NGRAM_MAX = 1, 3
"""Suffix lengths to look up when the plan does not look up itself."""


class Mode(msgspec.Struct, frozen=True):
    """A way to decode."""

    name: str
    """One of ``FORMS``, N being the drafted tokens; a tree by the nodes that it has."""
    cycle: Cycle | None
    """None follows the plan's buckets."""


def parse_mode(name: str, plan: ExecutionPlan) -> Mode:
    """The mode called ``name``; ``plan`` is another word for ``spec``.

    ``ar`` is plain decoding at its fastest, ``off`` the one that drafts are held to token by token;
    they are the same where the plan has no pass of a single row.

    Raises:
        InputError: No such mode, or the plan does not hold what it drafts with.
    """
    known = _ALIASES.get(name.strip().lower(), name.strip().lower())
    if known == AR:
        return Mode(AR, plain(plan))
    if known == OFF_MODE:
        return Mode(OFF_MODE, OFF)
    if known == SPEC:
        return Mode(SPEC, None)
    if known == ONLINE:
        return Mode(ONLINE, online(plan))
    if match := _TREE.fullmatch(known):
        cycle = tree(plan, int(match[1]) if match[1] else None)
        return Mode(f"tree{cycle.length}", cycle)
    match = _DRAFTED.fullmatch(known)
    if match is None or int(match[2]) > _MAX_LENGTH:
        hint = nearest(known, (*_EXAMPLES, *_ALIASES))
        expected = f"{FORMS}, with N from 1 to {_MAX_LENGTH}"
        raise InputError("unknown mode", found=repr(name), expected=expected, hint=hint)
    drafting = {"chain": chain, "model": model_chain, "skip": skip_chain, "ngram": ngram}
    return Mode(known, drafting[match[1]](plan, int(match[2])))


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
    """A chain of ``length`` tokens of the plan's best drafter: its draft model, else its mask."""
    if plan.draft is not None:
        return model_chain(plan, length)
    if best_mask(plan) is not None:
        return skip_chain(plan, length)
    raise InputError(
        "the plan has neither a draft model nor a skip mask to draft a chain with",
        hint="leave chain modes out, or use ngramN",
    )


def model_chain(plan: ExecutionPlan, length: int) -> Cycle:
    """A chain of ``length`` tokens of the plan's draft model."""
    if plan.draft is None:
        raise InputError("the plan has no draft model", hint="compile with --draft MODEL")
    return Cycle(DraftSource.MODEL, length, head=_head(plan))


def skip_chain(plan: ExecutionPlan, length: int) -> Cycle:
    """A chain of ``length`` tokens that the target drafts under the plan's best skip mask."""
    mask = best_mask(plan)
    if mask is None:
        raise InputError("the plan has no skip mask", hint="use ngramN, which needs none")
    return Cycle(DraftSource.SKIP, length, mask=mask, head=_head(plan))


def ngram(plan: ExecutionPlan, length: int) -> Cycle:
    """Up to ``length`` tokens looked up in the context, as the plan looks up if it does."""
    for cycle in planned_cycles(plan):
        if cycle.draft is DraftSource.NGRAM:
            return msgspec.structs.replace(
                cycle, length=length, shape=DraftShape.CHAIN, tree=0, head=_head(plan)
            )
    return Cycle(
        *(DraftSource.NGRAM, length),
        ngram_min=_NGRAM_MIN,
        ngram_max=_NGRAM_MAX,
        head=_head(plan),
    )


def tree(plan: ExecutionPlan, nodes: int | None = None) -> Cycle:
    """The plan's static tree of ``nodes`` drafted nodes, or of the most below that.

    Without ``nodes`` the tree that a bucket uses, else the largest. Who drafts in a bucket drafts
    here too, else the plan's best drafter.
    """
    sizes = [len(template.parents) for template in plan.trees]
    used = [c.tree for c in planned_cycles(plan) if c.shape is DraftShape.STATIC]
    fitting = [i for i, size in enumerate(sizes) if nodes is None or size <= nodes]
    if not fitting:
        found = ", ".join(map(str, sorted(set(sizes)))) or "none"
        raise InputError(
            "the plan carries no such tree, and only its own can be run",
            found=f"at most {nodes} nodes" if nodes else "any tree",
            expected=f"one of its own, by nodes: {found}",
            hint="use chainN" if sizes else "use chainN, or compile a plan that takes a tree",
        )

    def worth(index: int) -> tuple[bool, int, bool]:
        return nodes is None and index in used, sizes[index], index in used

    return shaped(plan, DraftShape.STATIC, max(fitting, key=worth))


def online(plan: ExecutionPlan) -> Cycle:
    """Trees grown as the draft's probabilities say, within the envelope that the plan carries."""
    if not plan.growths:
        raise InputError("the plan does not grow trees online", hint="use treeN, chainN or spec")
    used = [c.tree for c in planned_cycles(plan) if c.shape is DraftShape.ONLINE]
    return shaped(plan, DraftShape.ONLINE, used[0] if used else 0)


def shaped(
    plan: ExecutionPlan, shape: DraftShape, index: int, source: DraftSource | None = None
) -> Cycle:
    """A cycle with the plan's tree or envelope ``index``.

    Without ``source``: the plan's own cycle if a bucket has it, else filled by the best drafter.
    """
    static = shape is DraftShape.STATIC
    length = len(plan.trees[index].parents) if static else plan.growths[index].max_nodes
    for cycle in planned_cycles(plan):
        if (cycle.shape, cycle.tree) == (shape, index) and source in (None, cycle.draft):
            return cycle
    filler = CHAINS[source or sources(plan)[0]](plan, length)
    return msgspec.structs.replace(filler, shape=shape, tree=index)


CHAINS = {
    DraftSource.MODEL: model_chain,
    DraftSource.SKIP: skip_chain,
    DraftSource.NGRAM: ngram,
}
"""A chain by who drafts it."""


def sources(plan: ExecutionPlan) -> tuple[DraftSource, ...]:
    """Who can draft for this plan, the best first."""
    model = (DraftSource.MODEL,) if plan.draft is not None else ()
    skip = (DraftSource.SKIP,) if best_mask(plan) is not None else ()
    return *model, *skip, DraftSource.NGRAM


def _head(plan: ExecutionPlan) -> HeadOrder:
    """How the plan's own drafts run the head."""
    drafting = [c.head for c in planned_cycles(plan) if c.draft is not DraftSource.OFF]
    return drafting[0] if drafting else HeadOrder.BATCH


def planned_cycles(plan: ExecutionPlan) -> Sequence[Cycle]:
    """The different cycles of the plan's buckets, in their order."""
    return tuple(dict.fromkeys(bucket.cycle for bucket in plan.buckets))


def speculates(plan: ExecutionPlan) -> bool:
    """Whether any bucket drafts."""
    return any(cycle.draft is not DraftSource.OFF for cycle in planned_cycles(plan))
