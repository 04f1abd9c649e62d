"""Cycle options: expected tokens, times, ranking and what the decisions say."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import GQA, tiny_spec

from planner.agreement import DepthCounts
from planner.buckets import ranges
from planner.corpus import Text
from planner.cycles import (
    MARGIN,
    best,
    decide,
    depth_rates,
    ngram_option,
    off_option,
    plain_option,
    rank,
    skip_option,
)
from planner.lookup import LookupOutcome, replay
from planner.memory import check_budget, memory_need
from planner.pass_tables import NGRAM_US, PassTimes, best_chunk, context_grid, cost_tables
from planner.placement import Assignment, Machine
from profiles.errors import InfeasibleError
from profiles.profile import load_profile
from profiles.words import Format, SubLayerId
from runtime.plan import formats_of
from runtime.plan_tables import PassKind
from runtime.pricing import PriceList

SPEC = tiny_spec(GQA)
MACHINE = Machine(load_profile("oneplus12"), SPEC, Format.W8A16)
TIMES = PassTimes(MACHINE, Assignment(("cpu",) * SPEC.sub_layers, "cpu"))
MASK = (SubLayerId(1), SubLayerId(2))


@given(st.floats(0.01, 0.99), st.integers(1, 8))
def test_equal_acceptance_gives_the_closed_formula_of_knapspec(rate: float, length: int) -> None:
    counts = DepthCounts((999_999,) * 6, (round(rate * 1e6),) * 6)
    option = skip_option(TIMES, 128, MASK, counts, length)
    a = counts.rates()[0]
    assert option.tokens == pytest.approx((1 - a ** (length + 1)) / (1 - a))
    draft, verify = TIMES.drafting(MASK, 128).us, TIMES.committing(length + 1, 128).us
    passes = length + 1
    assert option.us == pytest.approx(length * draft + verify + passes * TIMES.cycle_us)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=8, max_size=40))
def test_a_replay_commits_exactly_the_known_text(tokens: list[int]) -> None:
    text = Text("t", "c", 4, tuple(tokens))
    outcome = replay([text], 1, 3, 4)
    assert sum((hit + 1) * n for _, hit, n in outcome.cycles) == len(tokens) - 4
    option = ngram_option(TIMES, 128, outcome)
    cycles = sum(n for *_, n in outcome.cycles)
    assert option.tokens * cycles == pytest.approx(len(tokens) - 4)


def test_lookup_that_never_matches_costs_a_step_and_the_look_up() -> None:
    option = ngram_option(TIMES, 128, LookupOutcome(1, 3, 4, ((0, 0, 50),)))
    off = off_option(TIMES, 128)
    assert option.tokens == 1
    assert option.us == pytest.approx(off.us + NGRAM_US)
    assert best([option, off])[0] is off


def test_depth_rates_are_conditional() -> None:
    outcome = LookupOutcome(1, 3, 2, ((0, 0, 7), (1, 1, 2), (2, 0, 4), (2, 1, 2), (2, 2, 2)))
    assert depth_rates(outcome) == (6 / 10, 2 / 4)


def test_the_decision_names_winner_runner_up_and_what_would_flip_it() -> None:
    off = plain_option(TIMES, 128)
    poor = skip_option(TIMES, 128, MASK, DepthCounts((100,), (3,)), 4)
    ranked = best([poor, off])
    decision = decide("cycle[0]", ranked, off, "")
    assert decision.chosen == "off"
    assert [c.name for c in decision.candidates] == ["off", poor.name]
    assert "commits" in decision.flips_when or "never" in decision.flips_when
    good = skip_option(TIMES, 128, MASK, DepthCounts((10**6,), (10**6,)), 4)
    needed = decide("cycle[0]", [good, off], off, "").flips_when
    assert f"{good.tokens:.2f} to {off.tokens_per_s * (1 + MARGIN) * good.us / 1e6:.2f}" in needed


def test_tables_price_what_was_priced() -> None:
    tables = cost_tables(TIMES, [(), MASK], 1024, [512])
    prices = PriceList(tables)
    for context in context_grid(1024):
        for rows in (1, 4, 7, 16):
            placed = TIMES.committing(rows, context)
            told = prices.pass_us(PassKind.VERIFY, 0, rows, context)
            assert told + prices.head_us(rows) == pytest.approx(placed.us, rel=0.02)
        draft = TIMES.drafting(MASK, context)
        told = prices.pass_us(PassKind.DRAFT, 1, 1, context)
        assert told == pytest.approx(draft.us)
    assert best_chunk(TIMES, 256) in tables.head_widths


@pytest.mark.parametrize("context", [16, 63, 64, 65, 4096])
def test_the_contexts_of_tables_ascend_and_end_with_the_plans(context: int) -> None:
    grid = context_grid(context)
    assert list(grid) == sorted(set(grid))
    assert grid[-1] == context


@pytest.mark.parametrize("context", [16, 255, 256, 257, 4096])
def test_buckets_cover_the_context_without_gaps(context: int) -> None:
    found = ranges(MACHINE, context)
    assert found[0].start == 0
    assert found[-1].end == context
    assert all(a.end == b.start < b.end for a, b in itertools.pairwise(found))
    assert all(min(part.attention_units, part.mlp_units) == 1 for part in found)


def test_a_budget_that_is_too_small_says_the_smallest_that_works() -> None:
    need = memory_need(SPEC, formats_of(Format.W8A16), 128)
    total = need.weights_bytes + need.kv_bytes + need.interpreter_bytes
    check_budget(need, total)
    with pytest.raises(InfeasibleError, match=f"{-(-total // (1 << 20))}MiB") as caught:
        check_budget(need, total - 1)
    assert caught.value.exit_code == 4


def test_a_draft_has_to_promise_more_than_the_margin() -> None:
    off = off_option(TIMES, 128)
    for gain, winner in ((MARGIN - 0.01, off.name), (MARGIN + 0.01, "draft")):
        draft = msgspec.structs.replace(off, name="draft", tokens=1 + gain)
        assert rank([draft, off], off)[0].name == winner
