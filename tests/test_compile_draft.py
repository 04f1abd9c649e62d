"""The whole compiler with a draft model, on tiny models: in memory, streamed, refused, left out."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from test_compile import PROMPTS, quiet
from tiny_models import TinyShape, gguf_name, tiny_weights, write_gguf

from planner.compile import Request, compile_plan
from planner.search import Search
from planner.verify import verify
from profiles.errors import IncompatibleError, InfeasibleError, UnsupportedError
from profiles.words import Format
from runtime.plan import DRAFT_FOLDER, ExecutionPlan
from runtime.plan_cycles import DraftSource
from runtime.plan_folder import load_plan
from runtime.sampling import GREEDY, Sampling
from runtime.session import Session

LAYERS = 6
MIB = 1 << 20

Compile = Callable[..., ExecutionPlan]


def write_model(path: Path, layers: int, **options: Any) -> Path:
    """The first ``layers`` of a model whose later ones add next to nothing."""
    shape = TinyShape(layers=layers, hidden=128, intermediate=384, head_dim=32)
    weights = tiny_weights(shape)
    faint = {
        gguf_name(name): np.float32(0.02) * weights[name]
        for layer in range(1, layers)
        for name in (f"layers.{layer}.o", f"layers.{layer}.down")
    }
    return write_gguf(path, shape, tensors=faint, **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``big.gguf``, ``small.gguf`` that nearly always says the same, and one of other tokens."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "big.gguf", LAYERS)
    write_model(folder / "small.gguf", 1)
    return folder


@pytest.fixture
def compiling(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Compiles ``big.gguf`` with ``small.gguf``; measurements are shared."""
    monkeypatch.setenv("FULCRUM_CACHE", str(models / "cache"))

    def call(name: str = "x", **changes: Any) -> ExecutionPlan:
        asked = Request(
            *(str(models / "big.gguf"), "oneplus12", tmp_path / f"{name}.plan"),
            context=128,
            prompts=PROMPTS,
            draft=str(models / "small.gguf"),
            draft_format=Format.W8A16,
        )
        return compile_plan(msgspec.structs.replace(asked, **changes), quiet)

    return call


@pytest.fixture
def without_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a random model says goes round in circles, where n-grams are the better draft."""
    monkeypatch.setattr(Search, "_lookup_options", lambda *_: [])


def smallest_budget(compiling: Compile, **changes: Any) -> int:
    """The budget that a refusal names, in bytes."""
    with pytest.raises(InfeasibleError, match="smallest budget that works") as caught:
        compiling("refused", dram_budget_bytes=MIB, **changes)
    named = re.search(r"--dram-budget (\d+)MiB", str(caught.value))
    assert named
    return int(named[1]) * MIB


def assert_lossless(folder: Path, plan: ExecutionPlan) -> None:
    assert load_plan(folder)[1] == plan
    with Session(folder, emulate=True) as session:
        sampled = Sampling(temperature=0.9, seed=5)
        assert verify(session, PROMPTS[:2], [GREEDY, sampled], 24, quiet).exact
        session.generate("count 4 5", max_new_tokens=24)
        assert session.finished().stats.accepted > 0


@pytest.mark.usefixtures("without_lookups")
def test_a_draft_model_that_pays_drafts_in_memory(compiling: Compile, tmp_path: Path) -> None:
    plan = compiling()
    assert plan.draft is not None
    assert plan.residency is None
    assert DraftSource.MODEL in {bucket.cycle.draft for bucket in plan.buckets}
    assert (tmp_path / "x.plan" / DRAFT_FOLDER).is_dir()
    assert_lossless(tmp_path / "x.plan", plan)


@pytest.mark.usefixtures("without_lookups")
def test_a_budget_that_does_not_hold_the_target_streams_it(
    compiling: Compile, tmp_path: Path
) -> None:
    budget = smallest_budget(compiling) + MIB
    plan = compiling(dram_budget_bytes=budget)
    assert plan.residency is not None
    assert plan.draft is not None
    assert plan.memory.total_bytes <= budget
    assert plan.memory.ring_bytes > 0
    assert_lossless(tmp_path / "x.plan", plan)


def test_the_budget_that_a_refusal_names_works_and_less_does_not(
    compiling: Compile, tmp_path: Path
) -> None:
    budget = smallest_budget(compiling)
    assert list(tmp_path.iterdir()) == []
    assert compiling(dram_budget_bytes=budget).memory.total_bytes <= budget
    with pytest.raises(InfeasibleError):
        compiling("less", dram_budget_bytes=budget - MIB)


@pytest.mark.usefixtures("without_lookups")
@pytest.mark.parametrize("streams", [False, True])
def test_two_compiles_give_the_same_bytes(
    compiling: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    budget = smallest_budget(compiling) + MIB if streams else None
    files = list[dict[str, bytes]]()
    for name in ("a", "b"):
        # Nothing is handed from one to the other
        monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path / f"cache-{name}"))
        compiling(name, dram_budget_bytes=budget)
        folder = tmp_path / f"{name}.plan"
        found = (file for file in folder.rglob("*") if file.is_file())
        files.append({str(file.relative_to(folder)): file.read_bytes() for file in found})
    assert files[0] == files[1]
    assert f"{DRAFT_FOLDER}/weights.bin" in files[0]


def test_a_draft_model_that_does_not_pay_is_left_out(
    compiling: Compile, models: Path, tmp_path: Path
) -> None:
    # As large as the target, it cannot be faster
    plan = compiling(draft=str(models / "big.gguf"))
    assert plan.draft is None
    assert plan.memory.draft_bytes == 0
    assert not (tmp_path / "x.plan" / DRAFT_FOLDER).exists()
    assert all(bucket.cycle.draft is not DraftSource.MODEL for bucket in plan.buckets)
    placement = next(entry for entry in plan.decisions if entry.name == "placement")
    assert "no bucket drafts with the model" in placement.note
    assert_lossless(tmp_path / "x.plan", plan)


def test_a_target_in_blocks_of_four_bits_cannot_stream(compiling: Compile, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="w4") as caught:
        compiling(target_format=Format.W4, dram_budget_bytes=MIB)
    assert "w8a16" in str(caught.value)
    assert "--dram-budget" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_draft_model_of_other_tokens_is_refused(
    compiling: Compile, models: Path, tmp_path: Path
) -> None:
    write_model(models / "other.gguf", 1)
    other = models / "other.gguf"
    other.write_bytes(other.read_bytes().replace(b"<|im_end|>", b"<|im_fin|>"))
    with pytest.raises(IncompatibleError, match="draft model's tokens"):
        compiling(draft=str(other))
    assert list(tmp_path.iterdir()) == []
