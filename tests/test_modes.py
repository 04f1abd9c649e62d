"""Names of ways to decode: what they draft with, and what a plan that lacks it answers."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from compiled_models import Recipe
from tree_plans import FORKED, GROWN, tree_plan, with_tables
from varied_plans import NGRAM, OFF, SKIP, varied_plan

from planner.inspect.figures import cycle_label, draft_passes
from planner.modes import Mode, parse_mode, parse_modes, reference, shaped, sources
from profiles.errors import InputError
from runtime.plan_cycles import Cycle, DraftShape, DraftSource, HeadOrder
from runtime.plan_folder import read_plan

Compiled = Callable[[Recipe], Path]


def test_a_chain_is_the_draft_models_where_there_is_one() -> None:
    plan = tree_plan(OFF)
    assert parse_mode("chain8", plan).cycle == Cycle(DraftSource.MODEL, 8)
    assert parse_mode("model8", plan).cycle == Cycle(DraftSource.MODEL, 8)
    assert parse_mode("skip8", plan).cycle == Cycle(DraftSource.SKIP, 8, mask=1)
    without = with_tables(varied_plan(cycles=(OFF,)))
    assert parse_mode("chain8", without).cycle == Cycle(DraftSource.SKIP, 8, mask=1)


def test_a_tree_is_the_plans_own_or_the_largest_that_is_not_larger() -> None:
    plan = tree_plan(FORKED)
    assert parse_mode("tree", plan) == Mode("tree3", FORKED)
    assert parse_mode("TREE4", plan) == Mode("tree3", FORKED)
    long = Cycle(DraftSource.MODEL, 5, shape=DraftShape.STATIC, tree=1, head=HeadOrder.PATH)
    assert parse_mode("tree5", plan) == parse_mode("tree64", plan) == Mode("tree5", long)
    assert parse_mode("tree", tree_plan(OFF)).name == "tree5"


def test_a_tree_that_the_plan_does_not_carry_is_refused_with_those_that_it_does() -> None:
    with pytest.raises(InputError, match=r"at most 2 nodes.*3, 5"):
        parse_mode("tree2", tree_plan(FORKED))
    with pytest.raises(InputError, match=r"only its own can be run.*none"):
        parse_mode("tree8", varied_plan())
    with pytest.raises(InputError, match="does not grow trees"):
        parse_mode("online", varied_plan())


def test_online_is_the_plans_envelope() -> None:
    assert parse_mode("online", tree_plan(OFF, GROWN)) == Mode("online", GROWN)
    assert parse_mode("online", tree_plan(OFF)).cycle == msgspec.structs.replace(
        GROWN, head=HeadOrder.BATCH
    )


def test_every_source_can_fill_a_tree() -> None:
    plan = tree_plan(FORKED, NGRAM)
    assert sources(plan) == (DraftSource.MODEL, DraftSource.SKIP, DraftSource.NGRAM)
    filled = [shaped(plan, DraftShape.STATIC, 1, source) for source in sources(plan)]
    assert [cycle.draft for cycle in filled] == list(sources(plan))
    assert {(cycle.shape, cycle.tree, cycle.length) for cycle in filled} == {("static", 1, 5)}
    assert filled[1].mask == 1
    assert (filled[2].ngram_min, filled[2].ngram_max) == (NGRAM.ngram_min, NGRAM.ngram_max)
    assert shaped(plan, DraftShape.STATIC, 0, DraftSource.SKIP).draft is DraftSource.SKIP


def test_lookups_stay_chains_where_the_plan_looks_up_trees() -> None:
    looked_up = msgspec.structs.replace(NGRAM, shape=DraftShape.STATIC, length=3)
    assert parse_mode("ngram6", tree_plan(looked_up)).cycle == NGRAM


@pytest.mark.parametrize("name", ["", "chain0", "chain64", "tree0", "treeX", "chain", "model64"])
def test_what_is_no_mode_is_refused_with_all_that_are(name: str) -> None:
    with pytest.raises(InputError, match=r"unknown mode.*treeN or online"):
        parse_mode(name, tree_plan(OFF))


@pytest.mark.parametrize("name", ["chain4", "model4", "skip4"])
def test_a_plan_without_drafters_says_what_is_missing(name: str) -> None:
    plan = varied_plan(cycles=(OFF,), skipped=())
    with pytest.raises(InputError, match=r"draft model|skip mask"):
        parse_mode(name, plan)


def test_a_name_that_was_made_up_for_a_mode_names_that_mode() -> None:
    plan = tree_plan(FORKED, GROWN, SKIP)
    for mode in parse_modes("chain4,model2,skip3,ngram5,tree64,tree,online,spec", plan):
        assert parse_mode(mode.name, plan) == mode
        assert reference(mode, plan) == "ar"


def test_cycles_are_called_by_who_drafts_what() -> None:
    plan = tree_plan(FORKED)
    assert cycle_label(Cycle(DraftSource.MODEL, 12), plan) == "134M draft, chain of 12"
    assert cycle_label(Cycle(DraftSource.MODEL, 12)) == "draft model, chain of 12"
    assert cycle_label(FORKED, plan) == "134M draft, tree of 3 nodes"
    assert cycle_label(GROWN, plan) == "134M draft, online, up to 16 nodes"
    looked_up = msgspec.structs.replace(NGRAM, shape=DraftShape.STATIC, length=24)
    assert cycle_label(looked_up, plan) == "n-gram 2-4, tree of 24 nodes"
    assert cycle_label(SKIP, plan) == "skip mask 1, 4 drafted"


@pytest.mark.parametrize(
    ("cycle", "passes"),
    [(FORKED, 2), (shaped(tree_plan(OFF), DraftShape.STATIC, 1), 4), (GROWN, 5), (SKIP, 4)],
)
def test_a_tree_takes_a_drafting_pass_for_each_depth(cycle: Cycle, passes: int) -> None:
    assert draft_passes(tree_plan(OFF), cycle) == passes


def test_no_modes_are_no_default(compiled: Compiled) -> None:
    for names in ("", ",", " , "):
        with pytest.raises(InputError, match="no modes"):
            parse_modes(names, read_plan(compiled(Recipe())))
