"""Plans that carry a draft model, trees and an envelope of growth; nothing here can be run."""

import msgspec
from varied_plans import varied_plan

from profiles.words import AttentionKernel, Format
from runtime.plan import Artefact, DraftModel, ExecutionPlan, Formats, KvLayout
from runtime.plan_cycles import Cycle, DraftShape, DraftSource, Growth, HeadOrder, TreeTemplate
from runtime.plan_tables import PassKind, PassTable

FORK = TreeTemplate(parents=(0, 0, 1), ranks=(0, 1, 0))
LONG = TreeTemplate(parents=(0, 0, 1, 3, 4), ranks=(0, 1, 0, 0, 0))
GROWTH = Growth(16, 5, 3, 4, (0.0, 0.5), ((0.3, 0.9), (0.1, 0.2)))
GROWN = Cycle(DraftSource.MODEL, 16, shape=DraftShape.ONLINE, head=HeadOrder.PATH)
FORKED = Cycle(DraftSource.MODEL, 3, shape=DraftShape.STATIC, head=HeadOrder.PATH)


def with_tables(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with a price of drafting under its mask."""
    table = PassTable(PassKind.DRAFT, 1, (1,), (0,), ((1.0,),))
    return msgspec.structs.replace(
        plan, tables=msgspec.structs.replace(plan.tables, passes=(table,))
    )


def with_draft(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with a draft model of its own shape."""
    formats = Formats(Format.W8A16, Format.W8A16, Format.W8A16)
    weights = Artefact("draft/weights.bin", 1, "0" * 64)
    draft = DraftModel(
        *(plan.model, formats, AttentionKernel.EXACT, (), weights, (), KvLayout(64, 1024))
    )
    return msgspec.structs.replace(plan, draft=draft)


def tree_plan(*cycles: Cycle) -> ExecutionPlan:
    """A plan with everything to draft with."""
    plan = with_draft(with_tables(varied_plan(cycles=cycles)))
    return msgspec.structs.replace(plan, trees=(FORK, LONG), growths=(GROWTH,))
