"""Budgets and tables of ``benchmarks/flash.py``, on plans that nothing was measured with."""

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from compiled_models import Recipe
from tree_plans import FORKED, tree_plan
from varied_plans import OFF, varied_plan

from planner.bench import Sample
from planner.bench_figures import bench_data
from profiles.words import SubLayerId
from runtime.plan import Residency
from runtime.plan_folder import read_plan
from runtime.stats import Stats
from runtime.weight_ranges import aligned, sub_layer_bytes

FOLDER = Path(__file__).parents[1] / "benchmarks"
Compiled = Callable[[Recipe], Path]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("flash")


def measured(modes: list[str], rivals: list[str]) -> dict[str, Any]:
    stats = Stats(new_tokens=64, cycles=20, drafted=100, accepted=44, decode_us=1e6)
    stats.flash_bytes, stats.ahead_bytes, stats.read_us, stats.simulated_us = 10**9, 0, 3e5, 1.1e6
    samples = [
        Sample(mode, prompt, "code", 0, (1,), stats)
        for mode in (*modes, *rivals)
        for prompt in ("a", "b")
    ]
    return json.loads(json.dumps(bench_data(samples, tree_plan(FORKED), True, rivals)))


def test_a_budget_leaves_room_for_the_share_and_a_ring(flash: Any, compiled: Compiled) -> None:
    plan = read_plan(compiled(Recipe()))
    parts = sub_layer_bytes(plan.tensors)
    layers = sum(aligned(part.bytes) for part in parts.values())
    assert flash.budget_bytes(plan, 1) == plan.memory.total_bytes
    none, half = flash.budget_bytes(plan, 0), flash.budget_bytes(plan, 0.5)
    assert half - none == pytest.approx(layers / 2, abs=1)
    ring = 2 * max(aligned(parts[SubLayerId(0)].bytes) + aligned(parts[SubLayerId(1)].bytes), 0)
    assert none == plan.memory.total_bytes - layers + ring


def test_a_rival_of_the_same_share_has_no_draft_model_to_hold(flash: Any) -> None:
    plan = tree_plan(FORKED)
    memory = msgspec.structs.replace(plan.memory, draft_bytes=10**6)
    plan = msgspec.structs.replace(plan, memory=memory)
    expected = memory.total_bytes - 10**6 - 1024 * plan.context
    assert flash.without_draft_bytes(plan) == expected
    plain = varied_plan()
    assert flash.without_draft_bytes(plain) == plain.memory.total_bytes


def test_modes_are_those_that_the_plan_carries(flash: Any) -> None:
    assert flash.modes(tree_plan(FORKED)).endswith("chain12,tree,online,spec")
    assert flash.modes(varied_plan(cycles=(OFF,))).endswith("chain12,spec")


def test_a_sweep_shows_what_streams_beside_what_is_simulated(
    flash: Any, compiled: Compiled
) -> None:
    plan = read_plan(compiled(Recipe()))
    every = tuple(sub_layer_bytes(plan.tensors))
    assert flash.streamed_share(plan) == 0
    plan = msgspec.structs.replace(plan, residency=Residency(every, 2, 1 << 20))
    text = flash.sweep_table([(plan, measured(["ar"], []))])
    assert "| 0 % |" in text
    assert "| 64.0 tok/s | 58.2 tok/s | 1.10" in text


def test_goals_stand_beside_what_was_found(flash: Any, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "pair.json"
    file.write_text(json.dumps(measured(["ar", "chain4", "chain8", "spec"], ["x.plan:ar"])))
    assert flash.main(["pair", str(file), "code"]) == 0
    out = capsys.readouterr().out
    assert "vs x.plan:ar" in out
    assert "| over plain decoding, x.plan:ar | 6.0x | 1.00" in out
    assert "| over a chain of 8 | 1.3x | 1.00" in out
    assert "| token-exact | yes | yes |" in out


def test_budgets_are_printed_a_line_each(flash: Any, compiled: Compiled, capsys: Any) -> None:
    folder = compiled(Recipe())
    assert flash.main(["budgets", str(folder), "0", "100"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["0", "100"]
    assert flash.main(["modes", str(folder / "none")]) == 2


def test_the_script_says_how_it_is_called() -> None:
    done = subprocess.run(
        ["bash", str(FOLDER / "flash.sh")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert subprocess.run(["bash", "-n", str(FOLDER / "flash.sh")], check=False).returncode == 0
