"""``plan simulate``: plans as work on lanes, their pictures, and other devices and budgets."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import documented
import msgspec
import pytest
from compiled_models import Recipe
from test_cli import Outcome, check_refusal
from tree_plans import FORK, FORKED, GROWN, LONG, tree_plan
from varied_plans import CYCLE_US, HEAD_US, NGRAM, NGRAM_US, OFF, SKIP, varied_plan

from planner import cli
from planner.cycle_work import cycle_shape, planned_flash, planned_work, streamed_bytes
from planner.inspect.figures import bucket_figures, layers_us
from planner.inspect.gantt import MARKS, WIDTH, gantt
from planner.inspect.text import plan_text
from planner.lanes import CycleWork, Flash, Role, Stage, Task
from planner.memory import Model, head_bytes, sub_layer_bytes
from planner.simulate import simulate, stream_table
from planner.what_if import (
    outcomes,
    pass_times,
    setting_of,
    speeds,
    timelines,
    with_budget,
    with_flash,
    works,
)
from profiles.errors import IncompatibleError, InfeasibleError
from profiles.profile import load_profile
from profiles.words import AttentionKernel, Format, SubLayerId
from runtime.plan import ExecutionPlan, Residency
from runtime.plan_cycles import Cycle, DraftSource
from runtime.plan_folder import read_plan
from runtime.plan_tables import PassKind, Placement, Span
from runtime.pricing import interpolate

RATE = 2e9
CHAIN = Cycle(DraftSource.NGRAM, 3, ngram_min=1, ngram_max=2)
RECIPE = Recipe(attention=AttentionKernel.EXACT, cycles=((0, CHAIN),))

Compiled = Callable[[Recipe], Path]
Simulate = Callable[..., Outcome]


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Simulate:
    """Runs ``plan simulate`` on a machine that was never measured."""
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))

    def call(*arguments: object) -> Outcome:
        code = cli.main(["simulate", *map(str, arguments)])
        written = capsys.readouterr()
        return Outcome(code, written.out, written.err)

    return call


def streamed_plan(folder: Path, streamed: tuple[int, ...] = (2, 3, 5), slots: int = 1) -> Any:
    """The plan of a folder with placements, residency and stream tables put in by hand."""
    found = read_plan(folder)
    every = SubLayerId(found.model.sub_layers)
    span = Span(SubLayerId(0), every, "cpu", 120.0, 0.0)
    placement = Placement(0, PassKind.VERIFY, 4, 64, (span,), "cpu", 4, 25.0, 0)
    residency = Residency(tuple(map(SubLayerId, streamed)), slots, 4096)
    change = msgspec.structs.replace
    planned = change(found, placements=(placement,), residency=residency)
    stages = planned_work(planned, 0).stages
    table = stream_table({1: stages, 4: stages}, slots, Flash(RATE))
    return change(planned, tables=change(planned.tables, streams=(table,)))


def test_a_resident_plan_takes_what_its_passes_add_up_to() -> None:
    planned = varied_plan(cuts=(20,), cycles=(SKIP, NGRAM, OFF))
    figures = bucket_figures(planned)
    for index, passes in enumerate((5, 1, 1)):
        work = planned_work(planned, index)
        expected = sum(
            layers_us(placed) * (SKIP.length if placed.kind is PassKind.DRAFT else 1)
            for placed in figures[index].cycle_passes
        )
        expected += HEAD_US * passes + CYCLE_US * passes + NGRAM_US * (index == 1)
        assert work.compute_us == pytest.approx(expected)
        assert simulate(work, 1, Flash(1.0)).cycle_us == pytest.approx(expected)


def test_each_lane_is_a_processor_of_the_placement() -> None:
    work = planned_work(varied_plan(layers=4, cuts=(3,)), 0)
    assert [stage.processor for stage in work.stages] == ["npu"] * 3 + ["cpu"] * 5
    assert [stage.sub_layer for stage in work.stages] == list(range(8))
    assert sum(stage.transfer_us > 0 for stage in work.stages) == 1


def test_a_plan_without_placements_names_the_way_out() -> None:
    bare = msgspec.structs.replace(varied_plan(), placements=())
    with pytest.raises(IncompatibleError, match="--device"):
        planned_work(bare, 0)


def test_trees_are_drafted_level_by_level() -> None:
    grown, forked = tree_plan(GROWN, FORKED), tree_plan(FORKED)
    assert (FORK.parents, LONG.parents) == ((0, 0, 1), (0, 0, 1, 3, 4))
    assert cycle_shape(forked, 0).levels == (1, 1)
    assert cycle_shape(forked, 0).rows == 4
    long = tree_plan(msgspec.structs.replace(FORKED, tree=1, length=5))
    assert cycle_shape(long, 0).levels == (1, 1, 1, 1)
    shape = cycle_shape(grown, 0)
    assert shape.levels == (4,) * 5
    assert shape.rows == 17
    assert shape.head_passes > 1


def test_the_flash_of_a_plan_is_read_off_its_stream_table(compiled: Compiled) -> None:
    streamed = streamed_plan(compiled(RECIPE))
    flash = planned_flash(streamed)
    assert flash is not None
    assert flash.bytes_per_s == pytest.approx(RATE)
    assert planned_flash(read_plan(compiled(RECIPE))) is None


def test_a_streamed_plan_reads_its_sub_layers_and_agrees_with_its_table(
    compiled: Compiled,
) -> None:
    streamed = streamed_plan(compiled(RECIPE))
    setting = setting_of(streamed, None, None)
    cycles = works(setting)
    (line,) = timelines(setting, cycles)
    sizes = streamed_bytes(streamed)
    assert cycles[0].stream_bytes == sum(sizes[s] for s in streamed.residency.streamed)
    assert line.read_bytes == pytest.approx(cycles[0].stream_bytes)
    rest = sum(task.us for task in (*cycles[0].before, *cycles[0].after))
    table = streamed.tables.streams[0]
    expected = interpolate(table.ahead_us, table.us[1], rest)
    assert line.verify_us == pytest.approx(expected, rel=0.02)
    assert speeds(setting, [line])[0] == pytest.approx(
        1e6 * streamed.buckets[0].forecast.tokens_per_cycle / line.cycle_us
    )


def test_faster_flash_is_never_slower(compiled: Compiled) -> None:
    setting = setting_of(streamed_plan(compiled(RECIPE)), None, None)
    slow, fast = (with_flash(setting, rate) for rate in (1e7, 1e9))
    slow_us, fast_us = (timelines(each, works(each))[0].cycle_us for each in (slow, fast))
    assert fast_us < slow_us


def test_a_budget_chooses_the_residency_anew_and_is_kept(compiled: Compiled) -> None:
    planned, phone = read_plan(compiled(RECIPE)), load_profile("oneplus12")
    model = Model(planned.model, planned.tensors)
    sizes = sub_layer_bytes(model)
    layers = sum(size.resident for size in sizes)
    least = sizes[0].streamed + sizes[1].streamed
    assert least < layers
    fixed = head_bytes(model) + planned.memory.kv_bytes
    fixed += planned.memory.interpreter_bytes
    setting = setting_of(planned, phone, phone)
    assert with_budget(setting, phone, fixed + layers).residency is None
    tight = with_budget(setting, phone, fixed + least)
    assert tight.residency is not None
    assert tight.need.total_bytes <= fixed + least
    assert timelines(tight, works(tight))[0].read_bytes > 0
    with pytest.raises(InfeasibleError, match="--dram-budget"):
        with_budget(setting, phone, fixed)


def test_formats_that_cannot_stream_stay_whole_or_are_infeasible(compiled: Compiled) -> None:
    phone = load_profile("oneplus12")
    recipe = msgspec.structs.replace(RECIPE, format=Format.F32)
    setting = setting_of(read_plan(compiled(recipe)), phone, phone)
    with pytest.raises(InfeasibleError, match="w8a16"):
        with_budget(setting, phone, 1 << 10)


def test_other_settings_are_told_beside_the_plan(compiled: Compiled) -> None:
    setting = setting_of(streamed_plan(compiled(RECIPE)), None, load_profile("oneplus12"))
    found = outcomes(setting, None)
    names = [each.name for each in found]
    assert names[:2] == ["flash at 0.5x its rate", "flash at 2x its rate"]
    assert all("budget" in name for name in names[2:])
    assert names[2:]


def test_a_device_prices_what_streams_dearer(compiled: Compiled) -> None:
    streamed, phone = streamed_plan(compiled(RECIPE)), load_profile("oneplus12")
    times = pass_times(streamed, phone, streamed.residency, Flash(RATE))
    plain = pass_times(streamed, phone, None, None)
    assert sum(s.compute_us for s in times.stages(4, 64)) >= sum(
        s.compute_us for s in plain.stages(4, 64)
    )
    assert [s.sub_layer for s in times.stages(4, 64) if s.stream_bytes] == [2, 3, 5]


def test_a_picture_has_a_line_of_equal_length_for_each_lane() -> None:
    stages = tuple(Stage(SubLayerId(i), "npu", 30.0, 0.0, 100) for i in range(6))
    before = (Task("cpu", 200.0, Role.DRAFT),)
    work = CycleWork(before, stages, (Task("cpu", 90.0, Role.HEAD),))
    lines = gantt(simulate(work, 2, Flash(1e6)))
    assert [line.split()[0] for line in lines] == ["cpu", "npu", "flash", "ring"]
    rows = [line.partition("|")[2].rstrip("|") for line in lines]
    assert {len(row) for row in rows} == {WIDTH}
    assert set("".join(rows[:3])) <= {*MARKS.values()}
    assert rows[0].startswith("dd")
    assert rows[0].endswith("hh")
    assert ("." in rows[1], "r" in rows[2]) == (True, True)
    assert set(rows[3]) <= set("0123456789")


def test_a_lane_that_does_nothing_visible_is_left_out() -> None:
    work = CycleWork((Task("dsp", 1e-3, Role.DRAFT),), (), (Task("cpu", 90.0, Role.HEAD),))
    assert [line.split()[0] for line in gantt(simulate(work, 1, Flash(1.0)))] == ["cpu"]
    assert gantt(simulate(CycleWork((), (), ()), 1, Flash(1.0))) == []


def test_inspect_shows_residency_and_ring_only_where_there_is_one(compiled: Compiled) -> None:
    resident = read_plan(compiled(RECIPE))
    streamed: ExecutionPlan = streamed_plan(compiled(RECIPE))
    assert "Residency" not in plan_text(resident)
    text = plan_text(streamed)
    flowing = " ".join(text.split())
    assert re.search(r"flash 3 of \d+ sub-layers \(1 attention, 2 MLP\) stream, .* a pass", flowing)
    assert "ring of 1 slot a kind, reads of 4.10 KB" in flowing
    attention, mlp = re.findall(r"(?:attention|mlp) +([■□]+)\n", text)[-2:]
    assert (attention.index("□"), mlp.index("□"), mlp.count("□")) == (1, 1, 2)
    assert "draft model" in plan_text(tree_plan(FORKED))


def test_the_command_shows_every_bucket_and_writes_documented_keys(
    command: Simulate, compiled: Compiled
) -> None:
    folder = compiled(RECIPE)
    shown = command(folder, "--device", "oneplus12")
    assert shown.code == 0
    assert "context 0-" in shown.out
    assert "What if" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 100
    data = command(folder, "--device", "oneplus12", "--json").data
    keys = {
        *("model", "device", "memory", "residency", "flash_bytes_per_s", "buckets", "what_if"),
    }
    documented.check_keys("simulate", data, keys)
    assert data["device"] == "oneplus12"
    assert data["buckets"][0]["predicted_tokens_per_s"] > 0
    bucket_keys = {
        *("context_from", "context_to", "cycle", "tokens_per_cycle", "predicted_tokens_per_s"),
        *("compute_us", "cycle_us", "verify_us", "exposed_io_us", "stalled_us", "read_bytes"),
        *("steady", "events", "ring"),
    }
    documented.check_keys("simulate", data["buckets"][0], bucket_keys)


def test_the_command_refuses_what_it_cannot_price(command: Simulate, compiled: Compiled) -> None:
    folder = compiled(RECIPE)
    check_refusal(command(folder, "--dram-budget", "1GB"), 2, "--device")
    check_refusal(command(folder), 3, "--device")
    check_refusal(command(folder, "--device", "oneplsu12"), 2, "oneplus12")
    phone = ("--device", "oneplus12", "--dram-budget", "1KB")
    check_refusal(command(folder, *phone), 4, "--dram-budget")
