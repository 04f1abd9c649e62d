"""Checks of how a plan decodes: cycles, tree templates, envelopes of online growth."""

from collections.abc import Iterator

from profiles.words import AttentionKernel
from runtime.faults import Fault, ascending, length, not_empty, outside
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import Cycle, DraftShape, DraftSource, misused_lone

# The pass that verifies is one row wider than the draft, and a pass has at most 1024 rows
_MAX_DRAFT_TOKENS = 1023
_MAX_NGRAM_TOKENS = 64
_MAX_BRANCH = 256
"""Candidates of a node; more are never worth their time."""


def cycle_faults(plan: ExecutionPlan, index: int) -> Iterator[Fault]:
    """The cycle of a bucket: its draft, and what that needs."""
    cycle = plan.buckets[index].cycle
    path = f"$.buckets[{index}].cycle"
    if why := misused_lone(cycle, plan.numerics):
        yield Fault(f"{path}.lone", why, True, False)
    elif cycle.lone is not plan.buckets[0].cycle.lone:
        what = "rows decoded alone would meet rows of wider passes"
        yield Fault(f"{path}.lone", what, cycle.lone, plan.buckets[0].cycle.lone)
    if cycle.draft is DraftSource.OFF:
        yield from outside(f"{path}.length", cycle.length, 0, 0)
    else:
        yield from outside(f"{path}.length", cycle.length, 1, _MAX_DRAFT_TOKENS)
    yield from outside(f"{path}.mask", cycle.mask, 0, len(plan.masks) - 1)
    if cycle.draft is DraftSource.NGRAM:
        yield from outside(f"{path}.ngram_max", cycle.ngram_max, 1, _MAX_NGRAM_TOKENS)
        yield from outside(f"{path}.ngram_min", cycle.ngram_min, 1, cycle.ngram_max)
    if cycle.draft is DraftSource.MODEL and plan.draft is None:
        yield Fault(f"{path}.draft", "the plan has no draft model", cycle.draft, "a $.draft")
    yield from _shape(plan, cycle, path)


def _shape(plan: ExecutionPlan, cycle: Cycle, path: str) -> Iterator[Fault]:
    if cycle.shape is DraftShape.CHAIN:
        yield from outside(f"{path}.tree", cycle.tree, 0, 0)
        return
    if cycle.draft is DraftSource.OFF:
        yield Fault(f"{path}.shape", "no draft has a shape", cycle.shape, DraftShape.CHAIN)
    if plan.numerics[0].attention is not AttentionKernel.EXACT:
        found, expected = plan.numerics[0].attention, AttentionKernel.EXACT
        yield Fault(f"{path}.shape", "trees need another attention kernel", found, expected)
    if cycle.shape is DraftShape.STATIC:
        sizes = [len(tree.parents) for tree in plan.trees]
    else:
        sizes = [growth.max_nodes for growth in plan.growths]
    yield from outside(f"{path}.tree", cycle.tree, 0, len(sizes) - 1)
    # After a fault of the index there is no size to compare with
    for size in sizes[cycle.tree : cycle.tree + 1]:
        yield from outside(f"{path}.length", cycle.length, size, size)


def tree_faults(plan: ExecutionPlan) -> Iterator[Fault]:
    """Templates: parents before their children, siblings of all ranks below each."""
    for index, tree in enumerate(plan.trees):
        path = f"$.trees[{index}]"
        yield from outside(f"{path}.parents, its length", len(tree.parents), 1, _MAX_DRAFT_TOKENS)
        yield from length(f"{path}.ranks", tree.ranks, len(tree.parents), "one for each node")
        for node, parent in enumerate(tree.parents):
            yield from outside(f"{path}.parents[{node}]", parent, 0, node)
        ranks: dict[int, list[int]] = {}
        for parent, rank in zip(tree.parents, tree.ranks, strict=False):
            ranks.setdefault(parent, []).append(rank)
        for parent, found in ranks.items():
            if sorted(found) != list(range(len(found))):
                expected = f"each of 0 to {len(found) - 1} once"
                yield Fault(f"{path}.ranks", f"ranks below node {parent}", tuple(found), expected)


def growth_faults(plan: ExecutionPlan) -> Iterator[Fault]:
    """Envelopes of online growth."""
    for index, growth in enumerate(plan.growths):
        path = f"$.growths[{index}]"
        yield from outside(f"{path}.max_nodes", growth.max_nodes, 1, _MAX_DRAFT_TOKENS)
        yield from outside(f"{path}.max_depth", growth.max_depth, 1, growth.max_nodes)
        yield from outside(f"{path}.branch", growth.branch, 1, _MAX_BRANCH)
        yield from outside(f"{path}.batch", growth.batch, 1, growth.max_nodes)
        yield from not_empty(f"{path}.bands", growth.bands)
        for lowest in growth.bands[:1]:
            yield from outside(f"{path}.bands[0]", lowest, 0, 0)
        yield from ascending(f"{path}.bands", growth.bands)
        yield from not_empty(f"{path}.hits", growth.hits)
        for rank, shares in enumerate(growth.hits):
            where = f"{path}.hits[{rank}]"
            yield from length(where, shares, len(growth.bands), "one for each band")
