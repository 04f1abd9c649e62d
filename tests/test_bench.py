"""Measurement: modes in turns, ratios of pairs, medians, and what the command shows."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import documented
import pytest
from compiled_models import AR_US, CYCLE_US, HEAD_ROW_US, Recipe
from tiny_models import MHA
from tree_plans import FORK, FORKED, GROWTH, LONG, tree_plan
from varied_plans import SKIP as SKIPPING_4
from varied_plans import varied_plan

from planner import cli
from planner.bench import Sample, contenders, measure, peak_rss_bytes
from planner.bench_figures import bench_data, figures, forecast_speedup, quartiles, totals
from planner.commands.bench import parse_rival
from planner.commands.bench_text import bench_text
from planner.modes import Mode, best_mask, parse_mode, parse_modes, speculates
from planner.prompt_file import Prompt
from planner.sizes import parse_rate
from profiles.errors import InputError
from profiles.words import AttentionKernel, SubLayerId
from runtime import memory
from runtime.plan import Residency
from runtime.plan_cycles import ALONE, OFF, Cycle, DraftSource
from runtime.plan_folder import read_plan
from runtime.session import load
from runtime.stats import Stats

Compiled = Callable[[Recipe], Path]

SKIP = Cycle(DraftSource.SKIP, 3, mask=2)
SKIPPING = Recipe(masks=((2,), (2, 5)), faint=(2, 5), cycles=((0, SKIP),))
STREAMED = Recipe(
    masks=((2, 5),),
    faint=(2, 5),
    attention=AttentionKernel.EXACT,
    cycles=((0, FORKED),),
    residency=Residency((SubLayerId(1), SubLayerId(2), SubLayerId(5)), 2, 1 << 16),
    draft_seed=0,
    trees=(FORK, LONG),
    growths=(GROWTH,),
)
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
    "decode_peak_bytes",
}
CYCLE_KEYS = {
    *("draft_us", "draft_passes", "verify_us", "exposed_io_us", "expected_exposed_io_us"),
    *("stalled_us", "flash_bytes", "ahead_bytes", "nodes_by_depth"),
}
HEAD_KEYS = {
    *("model", "device", "target_format", "device_is_here", "plan_speculates", "prompts"),
    *("rounds", "headline_mode", "modes", "rivals", "forecast_speedup_vs_ar"),
    *("flash_rate_bytes_per_s", "memory_need_bytes", "memory_budget_bytes"),
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


def test_totals_add_what_every_sample_counted() -> None:
    stats = [
        Stats(new_tokens=3, nodes_by_depth=[2, 1], tried_by_depth=[2, 1], flash_bytes=7),
        Stats(new_tokens=4, nodes_by_depth=[1], tried_by_depth=[1], flash_bytes=5, draft_us=2.0),
    ]
    found = totals([Sample("ar", "a", "code", 0, (), one) for one in stats])
    assert (found.new_tokens, found.flash_bytes, found.draft_us) == (7, 12, 2.0)
    assert (found.nodes_by_depth, found.tried_by_depth) == ([3, 1], [3, 1])
    assert stats[0].nodes_by_depth == [2, 1]


def test_exposed_reading_is_held_against_what_was_not_read_ahead() -> None:
    # 100 bytes a cycle at 10 bytes per microsecond, of which 40 were there
    stats = Stats(
        *(), new_tokens=4, cycles=2, decode_us=80.0, flash_bytes=200, ahead_bytes=80, read_us=20.0
    )
    stats.exposed_io_us, stats.stalled_us = 15.0, 3.0
    stats.tried_by_depth, stats.accepted_by_depth = [4, 2], [2, 1]
    found = figures([Sample("ar", "a", "code", 0, (1,), stats)], "ar", comparable=True)
    assert found.flash_bytes_per_token == 50
    assert found.flash_bytes_per_s == 10e6
    assert found.per_cycle.expected_exposed_io_us == pytest.approx(6.0)
    assert (found.per_cycle.exposed_io_us, found.per_cycle.stalled_us) == (7.5, 1.5)
    assert found.exposed_over_expected == pytest.approx(1.25)
    assert found.acceptance_by_depth == (0.5, 0.5)


def test_a_mode_is_compared_with_each_rival_in_pairs() -> None:
    samples = [
        *(sample("ar", "a", 0, 100.0), sample("spec", "a", 0, 50.0), sample("x:ar", "a", 0, 200.0)),
        *(sample("ar", "b", 0, 100.0), sample("spec", "b", 0, 25.0), sample("x:ar", "b", 0, 50.0)),
    ]
    found = figures(samples, "spec", comparable=True, rivals=["x:ar"]).speedup_vs_rivals["x:ar"]
    assert found.speedup == 3.0
    assert found.quartiles == (2.5, 3.5)
    assert found.total_speedup == pytest.approx(250 / 75)


def test_the_forecast_is_that_of_the_buckets_that_were_decoded_in() -> None:
    plan = varied_plan(cycles=(SKIPPING_4, OFF))
    assert forecast_speedup(plan, [sample("ar", "a", 0, 1.0)]) is None
    long, short = sample("spec", "a", 0, 1.0), sample("spec", "b", 0, 1.0)
    long.stats.prompt_tokens, short.stats.prompt_tokens = 700, 10
    first, second = (bucket.forecast for bucket in plan.buckets)
    expected = first.tokens_per_cycle * first.ar_us / first.cycle_us
    assert forecast_speedup(plan, [short]) == pytest.approx(expected)
    assert forecast_speedup(plan, [long]) == pytest.approx(second.ar_us / second.cycle_us)
    both = forecast_speedup(plan, [long, short])
    assert both is not None
    assert min(expected, 1.0) <= both <= max(expected, 1.0)


@pytest.mark.parametrize(
    ("text", "path", "mode"),
    [
        ("x.plan", "x.plan", "ar"),
        ("x.plan:chain8", "x.plan", "chain8"),
        ("/a:b/x.plan", "/a:b/x.plan", "ar"),
        ("/a:b/x.plan: SPEC", "/a:b/x.plan", "spec"),
    ],
)
def test_a_rival_is_a_plan_and_maybe_a_mode(text: str, path: str, mode: str) -> None:
    rival = parse_rival(text)
    assert (str(rival.path), rival.mode) == (path, mode)


def test_a_folder_with_a_colon_is_a_plan(tmp_path: Path) -> None:
    (tmp_path / "odd:spec").mkdir()
    assert parse_rival(str(tmp_path / "odd:spec")).mode == "ar"


def test_quartiles_of_one_value_are_that_value() -> None:
    assert quartiles([2.0]) == (2.0, 2.0)
    assert quartiles([1.0, 2.0, 3.0]) == (1.5, 2.5)


def test_the_peak_memory_is_that_of_a_python_process() -> None:
    assert 10 * 2**20 < peak_rss_bytes() < 2**40


@pytest.mark.parametrize("resets", [True, False])
def test_the_peak_of_a_mode_is_that_of_its_own_samples(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, resets: bool
) -> None:
    peaks = iter(range(3 * 10**9, 4 * 10**9, 10**8))
    monkeypatch.setattr(memory, "reset_peak", lambda: resets)
    monkeypatch.setattr(memory, "peak_rss_bytes", lambda: next(peaks))
    with load(compiled(SKIPPING)) as session:
        ways = contenders(session, parse_modes("ar,off", session.plan))
        asked = {"rounds": 1, "max_new_tokens": 2, "report": lambda *_: None}
        samples = measure(ways, PROMPTS[:2], **asked)
    found = [figures(samples, name, comparable=True) for name in ("ar", "off")]
    if resets:
        # ar, off; off, ar
        assert [f.decode_peak_bytes for f in found] == [3_300_000_000, 3_200_000_000]
        assert {f.peak_rss_bytes for f in found} == {3_300_000_000}
    else:
        assert [f.decode_peak_bytes for f in found] == [None, None]
        assert {f.peak_rss_bytes for f in found} == {samples[-1].peak_rss_bytes}


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


def test_bench_measures_rivals_beside_the_plan(
    compiled: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = compiled(SKIPPING), compiled(Recipe())
    rivals = ["--rival", str(other), "--rival", f"{other}:NGRAM4", "--rival", f"{other}:ar"]
    data = json.loads(bench(capsys, folder, "--json", "--modes", "spec", *rivals))
    names = [f"{other.name}:ar", f"{other.name}:ngram4", f"{other.name}:ar #2"]
    assert list(data["rivals"]) == names
    assert list(data["modes"]) == ["ar", "off", "spec"]
    for mode in (*data["modes"].values(), *data["rivals"].values()):
        assert list(mode["speedup_vs_rivals"]) == names
        found = mode["speedup_vs_rivals"][names[0]]
        documented.check_keys("bench", found, {"speedup", "quartiles", "total_speedup"})
        assert found["speedup"] > 0
    assert data["rivals"][names[0]]["speedup_vs_rivals"][names[0]]["speedup"] == 1.0
    text = bench(capsys, folder, "--modes", "spec,chain8", *rivals)
    assert ("while decoding at most" in text) == memory.reset_peak()
    assert "speedup over" in text
    assert ", all plans together" in text
    assert max(map(len, text.splitlines())) <= 100


def test_every_mode_of_a_streamed_plan_is_exact_and_shows_its_draft(
    compiled: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = "chain4,model2,skip2,ngram3,tree4,tree,online,spec"
    arguments = ["--modes", wanted, "--limit", "1", "--flash-rate", "800MB/s"]
    data = json.loads(bench(capsys, compiled(STREAMED), "--json", *arguments))
    modes = data["modes"]
    assert list(modes) == [
        *("ar", "chain4", "model2", "skip2", "ngram3", "tree3", "online", "spec"),
    ]
    assert all(mode["token_exact"] for mode in modes.values())
    assert data["flash_rate_bytes_per_s"] == 800_000_000
    # The draft model has the target's own weights
    assert modes["chain4"]["acceptance_by_depth"] == [1.0] * 4
    assert modes["tree3"]["per_cycle"]["nodes_by_depth"][0] > 1
    assert modes["model2"]["per_cycle"]["draft_passes"] >= 1
    assert modes["ar"]["per_cycle"]["draft_passes"] == 0


def test_a_rival_of_another_model_is_refused(
    compiled: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    other = compiled(Recipe(shape=MHA))
    assert cli.main(["bench", str(compiled(SKIPPING)), "--rival", str(other)]) == 3
    assert "a plan of the same model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--modes", ""], "no modes to measure"),
        (["--flash-rate", "500MB"], "not a rate"),
        (["--flash-rate", "500MB/s"], "streams nothing"),
        (["--modes", "tree8"], "only its own can be run"),
        (["--modes", "online"], "does not grow trees"),
        (["--modes", "model8"], "no draft model"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    compiled: Compiled, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert cli.main(["bench", str(compiled(SKIPPING)), *arguments]) == 2
    assert says in capsys.readouterr().err


def streamed_data() -> dict[str, object]:
    """What a bench of a streamed plan with trees says, with long names."""
    made: list[Sample] = []
    for number, mode in enumerate(("ar", "chain8", "spec", "a-plan-of-a-long-name.plan:ar")):
        stats = Stats(new_tokens=64, cycles=20, drafted=400, accepted=44, decode_us=12.3e6)
        stats.flash_bytes, stats.ahead_bytes, stats.read_us = 10**9, 10**8, 3e5
        stats.exposed_io_us = 1.5e5 * number
        stats.tried_by_depth = stats.accepted_by_depth = stats.nodes_by_depth = [20] * 16
        for prompt in ("a", "b"):
            category = "code" if prompt == "a" else "chat"
            made.append(Sample(mode, prompt, category, 0, (number == 3,), stats))
    plan = tree_plan(SKIPPING_4)
    return bench_data(made, plan, False, ["a-plan-of-a-long-name.plan:ar"], 5 * 10**8)


def test_a_streamed_bench_shows_its_cycles_in_100_columns() -> None:
    text = bench_text(streamed_data())
    assert max(map(len, text.splitlines())) <= 100
    assert "3.33 GB/s" in text
    assert "while decoding" not in text
    assert "flash slowed to 500 MB/s" in text
    assert "accepted at depth 1, 2" in text
    assert "spec over plain, in all: forecast" in text
    assert "chat 1.00" in text
    assert "other tokens, as formats or passes differ: a-plan-of-a-long-name.plan:ar" in text
    assert "a bug" not in text


def test_a_plan_in_memory_has_no_table_of_flash(
    compiled: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "exposed" not in bench(capsys, compiled(SKIPPING), "--limit", "1")


def test_a_rate_is_a_size_in_a_second() -> None:
    with pytest.raises(InputError, match="not a rate"):
        parse_rate("5MB")
    assert parse_rate(" 1.5 GB/s ") == 1_500_000_000


def test_bench_says_that_a_plan_is_off_and_of_another_device(
    compiled: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    text = bench(capsys, compiled(ELSEWHERE), "--emulate")
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["mode", "ar", "off", "spec"]
    assert "the plan is OFF everywhere" in text
    assert "predicted for tiny-device, where nothing was measured" in text
    assert "OFF" not in bench(capsys, compiled(SKIPPING), "--limit", "1")
