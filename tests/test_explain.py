"""Why a plan is what it is: nothing left out, margins right, readable width."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_plans import sample_plan
from varied_plans import decision, varied_plan

from planner.explain import explain_data, explain_text, margin_percent, off_below, runner_up
from planner.inspect.text import COLUMNS
from planner.inspect.units import three_digits
from runtime.plan import Candidate, Decision


def flat(text: str) -> str:
    return " ".join(text.split())


def test_every_decision_says_choice_rival_and_what_would_flip_it() -> None:
    plan = sample_plan()
    text = flat(explain_text(plan))
    place = 0
    for made in plan.decisions:
        rival = runner_up(made)
        assert rival is not None
        for words in (made.name, made.chosen, made.objective, rival.name, made.solver):
            place = text.index(words, place)
        place = text.index(made.flips_when, place)
    for assumption in plan.assumptions:
        place = text.index(assumption, place)


def test_margins_and_units_are_in_the_text() -> None:
    text = explain_text(varied_plan(decisions=[decision(note="Rival measured twice.")]))
    assert "tokens per second, maximised: 41.3" in text
    assert "n-gram, 6 drafted: 33.1 (the choice is 24.8 % better)" in text
    assert "others       off  27.0  (the choice is 53.0 % better)" in text
    assert "enumeration; optimal" in text
    assert "Rival measured twice." in text


def test_a_small_objective_counts_as_well() -> None:
    made = Decision(
        name="placement[0]",
        chosen="split",
        objective="microseconds of a pass, minimised",
        value=80.0,
        solver="shortest path",
        gap=0.02,
        candidates=(Candidate("split", 80.0), Candidate("cpu only", 100.0)),
        flips_when="a handover takes 30 µs more",
    )
    assert margin_percent(made, made.candidates[1]) == pytest.approx(20.0)
    assert "within 2.00 % of the optimum" in explain_text(varied_plan(decisions=[made]))


def test_a_better_rival_that_lost_shows_as_such() -> None:
    made = Decision(
        name="cycle[0]",
        chosen="off",
        objective="tokens per second, maximised",
        value=9.0,
        solver="enumeration",
        gap=None,
        candidates=(Candidate("skip", 10.0), Candidate("off", 9.0)),
        flips_when="",
    )
    assert margin_percent(made, made.candidates[0]) == pytest.approx(-10.0)
    text = explain_text(varied_plan(decisions=[made]))
    assert "skip: 10.0 (better by 10.0 %, yet not chosen)" in text
    assert "no bound known" in text
    assert "flips when   not known" in text


@pytest.mark.parametrize(
    ("rivals", "words"),
    [
        ((), "runner-up    none"),
        ((("twin", 41.3),), "twin: 41.3 (equal; the tie-break decided)"),
        ((("zero", 0.0),), "zero: 0 (no ratio)"),
        ((("bad", float("nan")),), "bad: nan (no ratio)"),
        (tuple((f"rival {number}", 40.0 - number) for number in range(9)), "and 4 more"),
    ],
)
def test_odd_rivals_are_explained(rivals: tuple[tuple[str, float], ...], words: str) -> None:
    assert words in explain_text(varied_plan(decisions=[decision(rivals=rivals)]))


def test_a_draft_says_when_plain_decoding_would_win() -> None:
    plan = varied_plan(decisions=[decision("cycle[0]"), decision("cycle[2]"), decision("masks")])
    forecast = plan.buckets[0].forecast
    drafts, plain, other = plan.decisions
    expected = forecast.cycle_us / forecast.ar_us
    assert off_below(plan, drafts) == pytest.approx(expected)
    assert off_below(plan, plain) is off_below(plan, other) is None
    text = flat(explain_text(plan))
    assert text.count("off wins if") == 1
    assert f"fewer than {three_digits(expected)} tokens; 3.80 are forecast" in text


@pytest.mark.parametrize("name", ["cycle[9]", "cycle[]", "cycle[0]x", "cycle[-1]"])
def test_a_decision_of_no_bucket_is_not_compared_with_off(name: str) -> None:
    assert off_below(varied_plan(), decision(name)) is None


def test_a_plan_without_decisions_says_so() -> None:
    text = explain_text(varied_plan(cycles=(), assumptions=()))
    assert "No decisions recorded." in text
    assert "Assumptions" not in text


def test_data_has_the_documented_keys() -> None:
    plan = sample_plan()
    data = json.loads(json.dumps(explain_data(plan)))
    assert set(data) == {"model", "device", "decisions", "assumptions"}
    assert len(data["decisions"]) == len(plan.decisions)
    for shown, made in zip(data["decisions"], plan.decisions, strict=True):
        assert set(shown) == {
            "name",
            "chosen",
            "objective",
            "value",
            "runner_up",
            "margin_percent",
            "solver",
            "gap",
            "candidates",
            "flips_when",
            "off_below_tokens",
            "note",
        }
        assert shown["chosen"] == made.chosen
        assert shown["margin_percent"] > 0


@given(
    st.lists(
        st.tuples(
            st.text(max_size=150),
            st.floats(),
            st.lists(st.tuples(st.text(), st.floats())),
            st.text(),
        ),
        max_size=4,
    )
)
@settings(max_examples=50, deadline=None)
def test_any_decision_fits_the_page(
    made: list[tuple[str, float, list[tuple[str, float]], str]],
) -> None:
    decisions = [
        decision(chosen=chosen, value=value, rivals=rivals, note=note)
        for chosen, value, rivals, note in made
    ]
    plan = varied_plan(decisions=decisions)
    text = explain_text(plan)
    assert text == explain_text(plan)
    assert max(len(line) for line in text.splitlines()) <= COLUMNS
