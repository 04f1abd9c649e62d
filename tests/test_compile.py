"""The whole compiler on tiny models: plans that run, are lossless, and repeat byte by byte."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tiny_models import GQA, MHA, TinyShape, write_hf_folder

from planner.commands.compile import parse_formats
from planner.compile import Request, compile_plan
from planner.prompt_file import Prompt
from planner.verify import verify
from profiles.errors import FulcrumError, InfeasibleError, InputError, UnsupportedError
from profiles.words import Format
from runtime.plan import Formats
from runtime.plan_cycles import OFF, DraftSource
from runtime.plan_folder import load_plan
from runtime.plan_tables import PassKind
from runtime.pricing import PriceList
from runtime.sampling import GREEDY, Sampling
from runtime.session import Session

PROMPTS = tuple(Prompt(f"p{i}", "c", f"count {i} {i + 1} {i + 2} count {i}") for i in range(6))
DEVICE = "oneplus12"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path / "cache"))


def quiet(_stage: str, _done: int, _total: int) -> None:
    """No progress."""


def request(folder: Path, output: Path, fmt: Format = Format.W8A16) -> Request:
    """A compile of a tiny model for the phone."""
    return Request(str(folder), DEVICE, output, fmt, context=192, prompts=PROMPTS)


@pytest.mark.parametrize("shape", [GQA, MHA])
@pytest.mark.parametrize("fmt", [Format.W8A16, Format.F32])
def test_a_compiled_plan_runs_and_is_lossless(
    tmp_path: Path, shape: TinyShape, fmt: Format
) -> None:
    write_hf_folder(tmp_path / "model", shape)
    plan = compile_plan(request(tmp_path / "model", tmp_path / "x.plan", fmt), quiet)
    _, loaded = load_plan(tmp_path / "x.plan")
    assert loaded == plan
    assert {d.name for d in plan.decisions} >= {"placement", "cycle[0]"}
    with Session(tmp_path / "x.plan", emulate=True) as session:
        for sampling in (Sampling(), Sampling(temperature=0.9, seed=5)):
            plain = session.generate("count 4 5", max_new_tokens=40, sampling=sampling, cycle=OFF)
            for bucket in plan.buckets:
                again = session.generate(
                    "count 4 5", max_new_tokens=40, sampling=sampling, cycle=bucket.cycle
                )
                assert again.token_ids == plain.token_ids
            assert plain.stats.simulated_us > 0


@pytest.mark.parametrize("context", [16, 64, 65])
def test_a_short_context_makes_a_plan_too(tmp_path: Path, context: int) -> None:
    write_hf_folder(tmp_path / "model", GQA)
    asked = msgspec.structs.replace(
        request(tmp_path / "model", tmp_path / "x.plan"), context=context
    )
    compile_plan(asked, quiet)
    with Session(tmp_path / "x.plan", emulate=True) as session:
        said = session.generate("ab", max_new_tokens=100, cycle=OFF)
        assert said.finish_reason == "context"
        assert session.generate("ab", max_new_tokens=100).token_ids == said.token_ids


def test_the_forecast_is_what_the_runtime_looks_up(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "model", GQA)
    plan = compile_plan(request(tmp_path / "model", tmp_path / "x.plan"), quiet)
    prices = PriceList(plan.tables)
    for bucket in plan.buckets:
        cycle, at = bucket.cycle, (bucket.context_from + bucket.context_to) // 2
        if cycle.draft is DraftSource.NGRAM:
            continue
        rows = cycle.length + 1
        kind = PassKind.VERIFY if cycle.length else PassKind.AR
        us = rows * prices.cycle_us + prices.pass_us(kind, 0, rows, at) + prices.head_us(rows)
        us += cycle.length * prices.pass_us(PassKind.DRAFT, cycle.mask, 1, at)
        assert us == pytest.approx(bucket.forecast.cycle_us, rel=0.02)


def compile_elsewhere(model: Path, output: Path, cache: Path) -> None:
    """Compile in another process."""
    code = (
        "import sys, pathlib; sys.path.insert(0, 'tests')\n"
        "import test_compile as t\n"
        "from planner.compile import compile_plan\n"
        f"t.compile_plan(t.request(pathlib.Path({str(model)!r}), pathlib.Path({str(output)!r})),"
        " t.quiet)"
    )
    root = Path(__file__).parent.parent
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=root,
        env={"FULCRUM_CACHE": str(cache), "PATH": "/usr/bin:/bin"},
        timeout=300,
    )


def test_two_compiles_in_two_processes_give_the_same_bytes(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "model", GQA)
    for name in ("a", "b"):
        # Each with a cache of its own: nothing is handed from one to the other
        compile_elsewhere(tmp_path / "model", tmp_path / f"{name}.plan", tmp_path / f"cache-{name}")
    files = sorted(p.name for p in (tmp_path / "a.plan").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "b.plan").iterdir())
    for name in files:
        a, b = ((tmp_path / f"{plan}.plan" / name).read_bytes() for plan in "ab")
        assert a == b, name
    text = (tmp_path / "a.plan" / "plan.json").read_text()
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "smollm2-135n"}, InputError, "smollm2-135m"),
        ({"device": "oneplus13"}, InputError, "oneplus12"),
        ({"target_format": Format.W8}, UnsupportedError, "w8a16"),
        ({"context": 1 << 20}, InputError, "context"),
        ({"dram_budget_bytes": 1 << 20}, InfeasibleError, "--dram-budget"),
    ],
)
def test_impossible_requests_say_why_and_leave_nothing(
    tmp_path: Path, change: dict[str, object], error: type[FulcrumError], says: str
) -> None:
    write_hf_folder(tmp_path / "model", GQA)
    fields = {"model": str(tmp_path / "model"), "device": DEVICE, "prompts": PROMPTS}
    asked = Request(**(fields | {"output": tmp_path / "x.plan"} | change))  # type: ignore[arg-type]
    with pytest.raises(error, match=says):
        compile_plan(asked, quiet)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["model"]


def test_an_interrupt_at_any_stage_leaves_nothing(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "model", GQA)
    seen: list[str] = []

    def note(stage: str, _done: int, _total: int) -> None:
        if stage not in seen:
            seen.append(stage)
            raise KeyboardInterrupt

    for _ in range(30):
        try:
            compile_plan(request(tmp_path / "model", tmp_path / "x.plan"), note)
        except KeyboardInterrupt:
            left = sorted(p.name for p in tmp_path.iterdir() if p.name != "cache")
            assert left == ["model"]
        else:
            break
    assert len(seen) >= 5
    load_plan(tmp_path / "x.plan")


def test_parts_that_are_not_named_are_as_the_rest_or_usual() -> None:
    usual, mlp = Format.W8A16, Format.W4
    assert parse_formats("mlp=w4") == Formats(usual, mlp, usual)
    assert parse_formats("mlp=w4,f32") == parse_formats("f32, MLP = w4")
    assert parse_formats("f32,mlp=w4") == Formats(Format.F32, mlp, Format.F32)


@pytest.mark.parametrize("text", ["mlp=w4,mlp=f32", "w4,f32", "w4,mlp=f32,w4", "mlp=w4,mlp=w4"])
def test_a_format_that_is_given_twice_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="given twice"):
        parse_formats(text)


def test_parts_may_have_formats_of_their_own(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "model", GQA)
    mixed = parse_formats("w8a16,mlp=w8a8,head=f32")
    assert mixed == Formats(Format.W8A16, Format.W8A8, Format.F32)
    asked = Request(
        *(str(tmp_path / "model"), DEVICE, tmp_path / "x.plan", mixed), prompts=PROMPTS, context=64
    )
    plan = compile_plan(asked, quiet)
    assert plan.part_formats == mixed
    assert str(mixed) == "attention=w8a16,mlp=w8a8,head=f32"
    found = [c.format for c in plan.numerics for _ in range(c.end - c.first)]
    assert found == [Format.W8A16, Format.W8A8] * GQA.layers
    with Session(tmp_path / "x.plan", emulate=True) as session:
        result = verify(session, PROMPTS[:2], [GREEDY], 12, quiet)
    assert result.exact
