"""Measurement: modes in turns, ratios of pairs, medians, and what the command shows."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import documented
import pytest
from compiled_models import AR_US, CYCLE_US, HEAD_ROW_US, Recipe

from planner import cli
from planner.bench import Sample, contenders, measure, peak_rss_bytes
from planner.bench_figures import figures, forecast_speedup, quartiles, totals
from planner.commands.bench import parse_rival
from planner.modes import Mode, best_mask, parse_mode, parse_modes, speculates
from planner.prompt_file import Prompt
from runtime.plan_cycles import ALONE, OFF, Cycle, DraftSource
from runtime.plan_folder import read_plan
from runtime.session import load
from runtime.stats import Stats

Compiled = Callable[[Recipe], Path]

SKIP = Cycle(DraftSource.SKIP, 3, mask=2)
SKIPPING = Recipe(masks=((2,), (2, 5)), faint=(2, 5), cycles=((0, SKIP),))
ELSEWHERE = Recipe(masks=((2, 5),), soc="a chip that nobody has")
PROMPTS = [
    Prompt("one", "code", "for the end of the end"),
    Prompt("two", "chat", "in the self"),
    Prompt("three", "code", "return self"),
]
MODE_KEYS = {
    *("tokens_per_s", "total_tokens_per_s", "total_speedup_vs_ar"),
    *("ar_tokens_per_s", "speedup_vs_ar"),
    *("speedup_quartiles", "mean_accepted", "mean_drafted", "cycles", "new_tokens"),
    *("predicted_tokens_per_s", "predicted_speedup_vs_ar", "measured_over_predicted"),
    *("flash_bytes_per_token", "flash_bytes_per_s", "exposed_over_expected"),
    *("speedup_vs_rivals", "acceptance_by_depth", "per_cycle", "peak_rss_bytes", "token_exact"),
}
CYCLE_KEYS = {
    *("draft_us", "draft_passes", "verify_us", "exposed_io_us", "expected_exposed_io_us"),
    *("stalled_us", "flash_bytes", "ahead_bytes", "nodes_by_depth"),
}
HEAD_KEYS = {
    *("model", "device", "target_format", "device_is_here", "plan_speculates", "prompts"),
    *("rounds", "headline_mode", "modes", "rivals", "forecast_speedup_vs_ar"),
    "flash_rate_bytes_per_s",
}


def sample(
    mode: str, prompt: str, turn: int, us: float, *, ids: Sequence[int] = (1, 2), cycles: int = 2
) -> Sample:
    """Two tokens in ``us`` microseconds, predicted to take 50."""
    stats = Stats(
        new_tokens=2, cycles=cycles, drafted=4, accepted=1, decode_us=us, simulated_us=50.0
    )
    category = "code" if prompt == "a" else "chat"
    return Sample(mode, prompt, category, turn, tuple(ids), stats)


def test_a_speedup_is_the_median_of_paired_ratios() -> None:
    # The machine is half as fast in round 1; pairs do not see it
    samples = [
        *(sample("ar", "a", 0, 100.0), sample("spec", "a", 0, 50.0)),
        *(sample("ar", "a", 1, 200.0), sample("spec", "a", 1, 100.0)),
        *(sample("ar", "b", 0, 100.0), sample("spec", "b", 0, 25.0)),
        *(sample("ar", "b", 1, 200.0), sample("spec", "b", 1, 50.0)),
    ]
    found = figures(samples, "spec", comparable=True)
    assert found.speedup_vs_ar == 3.0
    assert found.speedup_quartiles == (2.5, 3.5)
    per_prompt = [statistics.median((40e3, 20e3)), statistics.median((80e3, 40e3))]
    assert found.tokens_per_s == pytest.approx(statistics.median(per_prompt))
    assert found.total_tokens_per_s == pytest.approx(8e6 / 225)
    assert found.predicted_tokens_per_s == pytest.approx(40e3)
    assert found.measured_over_predicted == pytest.approx(45e3 / 40e3)
    assert found.new_tokens == 4
    assert found.cycles == 4
    assert (found.mean_accepted, found.mean_drafted) == (0.5, 2.0)
    assert figures(samples, "ar", comparable=True).speedup_vs_ar == 1.0


def test_another_devices_prediction_is_not_compared_with_this_machine() -> None:
    samples = [sample("ar", "a", 0, 100.0)]
    assert figures(samples, "ar", comparable=False).measured_over_predicted is None


def test_a_differing_output_is_told() -> None:
    samples = [sample("ar", "a", 0, 100.0), sample("spec", "a", 0, 50.0, ids=(1, 3))]
    assert not figures(samples, "spec", comparable=True).token_exact
    assert figures(samples, "ar", comparable=True).token_exact


def test_a_mode_that_made_no_cycle_has_figures() -> None:
    nothing = Sample("ar", "a", "code", 0, (), Stats())
    found = figures([nothing], "ar", comparable=True)
    assert (found.tokens_per_s, found.speedup_vs_ar, found.mean_accepted) == (0.0, 0.0, 0.0)


def test_quartiles_of_one_value_are_that_value() -> None:
    assert quartiles([2.0]) == (2.0, 2.0)
    assert quartiles([1.0, 2.0, 3.0]) == (1.5, 2.5)


def test_the_peak_memory_is_that_of_a_python_process() -> None:
    assert 10 * 2**20 < peak_rss_bytes() < 2**40


def test_modes_take_turns_in_alternating_order(compiled: Compiled) -> None:
    told: list[tuple[int, int]] = []
    with load(compiled(SKIPPING)) as session:
        modes = parse_modes("ar,spec,ngram2", session.plan)
        samples = measure(
            *(contenders(session, modes), PROMPTS),
            rounds=2,
            max_new_tokens=6,
            report=lambda _, done, total: told.append((done, total)),
        )
    order = [(s.round, s.prompt_id, s.mode) for s in samples]
    names = ["ar", "off", "spec", "ngram2"]
    expected: list[tuple[int, str, str]] = []
    for turn in range(2):
        for index, prompt in enumerate(PROMPTS):
            turned = names if (turn + index) % 2 == 0 else names[::-1]
            expected += [(turn, prompt.id, name) for name in turned]
    assert order == expected
    assert told == [(done, 24) for done in range(25)]
    assert all(len(s.token_ids) == s.stats.new_tokens == 6 for s in samples)
    exact = [s for s in samples if s.prompt_id == "one" and s.mode != "ar"]
    assert len({s.token_ids for s in exact}) == 1


def test_modes_are_named_after_what_drafts(compiled: Compiled) -> None:
    plan = read_plan(compiled(SKIPPING))
    assert best_mask(plan) == 2
    assert parse_mode("chain8", plan) == Mode("chain8", Cycle(DraftSource.SKIP, 8, mask=2))
    ngram = Cycle(DraftSource.NGRAM, 4, ngram_min=1, ngram_max=3)
    assert parse_mode(" NGRAM4 ", plan) == Mode("ngram4", ngram)
    assert parse_mode("off", plan) == Mode("off", OFF)
    assert parse_mode("ar", plan) == Mode("ar", ALONE)
    assert parse_mode("plan", plan) == parse_mode("spec", plan) == Mode("spec", None)
    names = [mode.name for mode in parse_modes("spec,chain2,spec,plan,", plan)]
    assert names == ["ar", "off", "spec", "chain2"]
    assert [mode.name for mode in parse_modes("ar", plan)] == ["ar"]


def test_lookup_modes_look_up_as_the_plan_does(compiled: Compiled) -> None:
    cycle = Cycle(DraftSource.NGRAM, 5, ngram_min=2, ngram_max=4)
    plan = read_plan(compiled(Recipe(cycles=((0, cycle),))))
    assert parse_mode("ngram7", plan).cycle == Cycle(DraftSource.NGRAM, 7, ngram_min=2, ngram_max=4)
    assert best_mask(plan) is None
    assert speculates(plan)


def test_a_plan_that_is_off_still_offers_its_first_mask(compiled: Compiled) -> None:
    plan = read_plan(compiled(ELSEWHERE))
    assert best_mask(plan) == 1
    assert not speculates(plan)


def bench(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    prompts = folder.parent / "bench.jsonl"
    lines = [{"id": p.id, "category": p.category, "prompt": p.prompt} for p in PROMPTS]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    request = ["bench", str(folder), "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert cli.main([*request, "--repeat", "1", *arguments]) == 0
    return capsys.readouterr().out


def test_bench_json_has_every_key_for_every_mode(
    compiled: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(bench(capsys, compiled(SKIPPING), "--json", "--modes", "spec,chain8"))
    documented.check_keys("bench", data, HEAD_KEYS | MODE_KEYS)
    assert list(data["modes"]) == ["ar", "off", "spec", "chain8"]
    assert data["headline_mode"] == "spec"
    assert data["tokens_per_s"] == data["modes"]["spec"]["tokens_per_s"] > 0
    assert data["device_is_here"]
    assert data["plan_speculates"]
    for mode in data["modes"].values():
        documented.check_keys("bench", mode, MODE_KEYS | {"by_category"})
        assert set(mode["by_category"]) == {"code", "chat"}
        assert all(set(part) == MODE_KEYS for part in mode["by_category"].values())
        documented.check_keys("bench", mode["per_cycle"], CYCLE_KEYS)
        assert mode["token_exact"]
        assert mode["flash_bytes_per_token"] == 0
    plain = data["modes"]["ar"]
    assert (plain["speedup_vs_ar"], plain["mean_drafted"], plain["cycles"]) == (1.0, 0.0, 3 * 8)
    step_us = AR_US + HEAD_ROW_US + CYCLE_US
    assert plain["predicted_tokens_per_s"] == pytest.approx(1e6 / step_us)


def test_bench_says_that_a_plan_is_off_and_of_another_device(
    compiled: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    text = bench(capsys, compiled(ELSEWHERE), "--emulate")
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["mode", "ar", "off", "spec"]
    assert "the plan is OFF everywhere" in text
    assert "predicted for tiny-device, where nothing was measured" in text
    assert "OFF" not in bench(capsys, compiled(SKIPPING), "--limit", "1")
