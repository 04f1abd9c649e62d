"""The comparisons of ``benchmarks/``, without the packages that they compare with."""

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from compiled_models import Recipe

import runtime.cycle
from planner.prompt_file import load_prompts

FOLDER = Path(__file__).parents[1] / "benchmarks"
PROMPTS = FOLDER / "prompts_lookup.jsonl"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the folder."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == FOLDER:
            del sys.modules[name]


@pytest.mark.parametrize("script", ["baselines", "session_overhead"])
def test_importing_a_script_loads_no_engine(script: str) -> None:
    wanted = "{'llama_cpp', 'transformers', 'torch', 'accelerate'}"
    code = f"import sys, {script}; print(sorted({wanted} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(FOLDER)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def run_baselines(benchmark: Any, *options: str) -> int:
    required = ["no-model.gguf", "no.plan", "--prompts", str(PROMPTS)]
    return benchmark("baselines").main([*required, *options])


@pytest.mark.parametrize("engine", ["llama.cpp", "transformers"])
def test_a_missing_engine_is_named_with_what_to_install(
    benchmark: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: str,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert run_baselines(benchmark, "--modes", f"{engine}:ar") == 2
    told = capsys.readouterr().err
    assert f"{engine} is not installed" in told
    assert "fulcrum-plan[bench]" in told


@pytest.mark.parametrize(
    ("modes", "reason"),
    [
        ("llama.cpp:lookup0", "unknown way"),
        ("vllm:ar", "unknown way"),
        ("llama.cpp", "unknown way"),
        ("llama.cpp:draft4", "needs a draft model"),
        ("transformers:assisted", "needs a draft model"),
    ],
)
def test_a_way_that_cannot_be_measured_is_refused(
    benchmark: Any, capsys: pytest.CaptureFixture[str], modes: str, reason: str
) -> None:
    assert run_baselines(benchmark, "--modes", modes) == 2
    assert reason in capsys.readouterr().err


class Pieces:
    """An engine that hands out fixed pieces until it is told to stop."""

    def __init__(self, pieces: Sequence[Sequence[int]]) -> None:
        self.pieces = pieces
        self.told = 0

    def decode(self, _: Any, put: Callable[[Sequence[int]], bool]) -> None:
        for piece in self.pieces:
            self.told += 1
            if put(piece):
                return


@pytest.mark.parametrize(
    ("pieces", "kept", "first", "told"),
    [
        ([[5, 6], [7], [8, 9], [4]], (5, 6, 7, 8), 2, 3),
        ([[5], [6, 0, 7], [8]], (5, 6, 0), 1, 2),
        ([[5, 6, 7, 8, 9]], (5, 6, 7, 8), 4, 1),
    ],
    ids=["count reached", "end inside a piece", "one piece"],
)
def test_a_run_ends_at_the_count_or_at_the_end_of_the_answer(
    benchmark: Any, pieces: list[list[int]], kept: tuple[int, ...], first: int, told: int
) -> None:
    engines = benchmark("baseline_engines")
    engine = Pieces(pieces)
    run = engines.measure(engine, engines.Task("ar", 1, (1,), 4), eos_ids=(0,))
    assert (run.token_ids, run.first_tokens, engine.told) == (kept, first, told)
    assert run.decode_us >= 0
    assert run.prefill_us > 0


def sample(benchmark: Any, engine: str, prompt: str, us: float, **changes: Any) -> Any:
    """21 tokens, 20 of them timed, of 1 token each ``us``."""
    run = benchmark("baseline_engines").Run
    ids = changes.pop("ids", tuple(range(21)))
    fields = {"mode": "ar", "threads": 1, "prompts": "p", "category": "c", "prompt_tokens": 9}
    return benchmark("baseline_table").Sample(
        engine=engine,
        label=engine,
        prompt_id=prompt,
        run=run(ids, 1, 1.0, us * (len(ids) - 1)),
        **{**fields, **changes},
    )


def test_figures_are_medians_of_rates_and_of_ratios_to_llama_cpp(benchmark: Any) -> None:
    made = [
        sample(benchmark, engine, prompt, us, threads=threads)
        for engine, threads, times in (
            ("llama.cpp", 1, (100, 200, 400)),
            ("fulcrum", 1, (50, 50, 800)),
            ("fulcrum", 2, (25, 50, 25)),
        )
        for prompt, us in zip("abc", times, strict=True)
    ]
    llama, ours = benchmark("baseline_table").figures(made)
    assert llama.tokens_per_s == {1: pytest.approx(5000)}
    assert ours.tokens_per_s == {1: pytest.approx(20000), 2: pytest.approx(40000)}
    assert ours.vs_llama_ar == {1: pytest.approx(2)}
    assert ours.best_vs_best == pytest.approx(4)


def test_agreement_counts_tokens_up_to_the_first_that_differs(benchmark: Any) -> None:
    other = (*range(10), 99, *range(11, 21))
    made = [
        sample(benchmark, "fulcrum", "a", 10),
        sample(benchmark, "llama.cpp", "a", 10, ids=other),
        sample(benchmark, "llama.cpp", "a", 10, ids=other, mode="lookup2"),
    ]
    *_, lookup = benchmark("baseline_table").figures(made)
    assert lookup.same_as_ours == pytest.approx(10 / 21)
    assert lookup.same_as_own == 1


def test_a_prompt_that_one_way_answers_shortly_is_left_out_for_all(benchmark: Any) -> None:
    made = [
        sample(benchmark, "llama.cpp", "a", 10),
        sample(benchmark, "llama.cpp", "b", 10),
        sample(benchmark, "fulcrum", "a", 10),
        sample(benchmark, "fulcrum", "b", 10, ids=(1, 2, 3)),
    ]
    table = benchmark("baseline_table")
    assert {s.prompt_id for s in table.counted(made)} == {"a"}
    assert [row.answers for row in table.figures(made)] == [1, 1]


def test_every_row_of_the_table_has_as_many_cells_as_its_head(benchmark: Any) -> None:
    table = benchmark("baseline_table")
    made = [
        sample(benchmark, "llama.cpp", "a", 10),
        sample(benchmark, "transformers", "a", 10, threads=2),
    ]
    lines = table.markdown(table.figures(made)).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 4


def test_prompts_to_look_up_in_are_half_texts_and_half_code() -> None:
    prompts = load_prompts(PROMPTS)
    code = [prompt for prompt in prompts if prompt.category == "edit-code"]
    assert (len(prompts), len(code)) == (12, 6)
    assert all("```" in prompt.prompt for prompt in code)


def test_the_parts_of_a_profiled_step_fit_into_it(
    benchmark: Any, compiled: Callable[[Recipe], Path]
) -> None:
    choose = runtime.cycle.choose
    found = benchmark("session_overhead").profile(compiled(Recipe()), 1, context=40, steps=6)
    assert runtime.cycle.choose is choose
    assert all(us > 0 for us in found.parts_us.values())
    assert 0 < found.ours_us < found.step_us
    assert 0 < found.ours_share < 1


def test_loading_is_timed_in_a_process_of_its_own(
    benchmark: Any, compiled: Callable[[Recipe], Path]
) -> None:
    found = benchmark("session_overhead").loading(compiled(Recipe()), 1, True, repeat=1)
    assert 0 < found.import_s + found.load_s + found.first_token_s < found.process_s
    assert found.format == "w8a16"


def test_two_constants_a_row_explain_levers_table_6_within_a_tenth(benchmark: Any) -> None:
    lever = benchmark("lever_table6")
    coarse = range(0, 2_000_000, 100_000)
    fits = [lever.fitted(row, lever.DOUBLE, coarse) for row in lever.TABLE_6]
    assert sum(fit.error for fit in fits) / len(fits) < 0.1
    assert "mean error" in lever.report(lever.DOUBLE, fits)
