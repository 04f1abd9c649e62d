"""Writing plan folders: equal bytes, nothing half written, nothing foreign touched."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sample_plans import (
    HEAD_GRAPH,
    sample_plan,
    sample_tensors,
    write_sample_files,
    write_sample_folder,
)

from profiles.errors import FulcrumError, InputError
from runtime.plan import ALIGNMENT_BYTES, Artefact, ExecutionPlan, Forecast, TensorRef, TensorType
from runtime.plan_document import encode_plan
from runtime.plan_folder import check_artefact, load_plan, read_plan
from runtime.plan_writer import PlanWriter, WeightsWriter

ROOT = Path(__file__).parents[1]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below ``folder`` with its bytes, every folder with None."""
    return {
        entry.relative_to(folder).as_posix(): entry.read_bytes() if entry.is_file() else None
        for entry in sorted(folder.rglob("*"))
    }


def renamed_plan(name: str) -> ExecutionPlan:
    plan = sample_plan()
    return msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, name=name))


def write_plan(target: Path, plan: ExecutionPlan) -> None:
    with PlanWriter(target) as writer:
        write_sample_files(writer)
        writer.commit(plan)


@pytest.fixture(scope="module")
def dead_process() -> int:
    """A process number that nobody has."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_equal_plans_give_equal_bytes_wherever_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    write_sample_folder(tmp_path / "a.plan")
    write_sample_folder(tmp_path / "deeper" / "b.plan")
    found = contents(tmp_path / "a.plan")
    assert found == contents(tmp_path / "deeper" / "b.plan")
    assert not any(str(tmp_path).encode() in data for data in found.values() if data)


def test_the_document_is_sorted_indented_and_ends_in_a_newline() -> None:
    def sorted_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert [name for name, _ in pairs] == sorted(name for name, _ in pairs)
        return dict(pairs)

    text = encode_plan(sample_plan()).decode()
    document = json.loads(text, object_pairs_hook=sorted_keys)
    assert text.startswith('{\n "assumptions": [\n  "')
    assert text.endswith("\n}\n")
    assert document.keys() == set(ExecutionPlan.__struct_fields__)


def test_commit_returns_the_folder_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    with PlanWriter(tmp_path / "x.plan") as writer:
        write_sample_files(writer)
        folder = writer.commit(sample_plan())
    assert folder == tmp_path / "x.plan"
    assert load_plan(folder)[1] == sample_plan()
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.plan"]


def test_a_plan_from_before_there_were_seals_can_be_replaced(tmp_path: Path) -> None:
    write_sample_folder(tmp_path / "x.plan")
    (tmp_path / "x.plan" / "plan.sha256").unlink()
    write_sample_folder(tmp_path / "x.plan")
    assert load_plan(tmp_path / "x.plan")[1] == sample_plan()


def test_a_plan_is_replaced_by_the_next(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        write_plan(tmp_path / "x.plan", renamed_plan(name))
        assert read_plan(tmp_path / "x.plan").model.name == name
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.plan"]


def test_the_plan_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    write_sample_folder(tmp_path / "store" / "x.plan")
    (tmp_path / "link.plan").symlink_to(Path("store") / "x.plan")
    write_plan(tmp_path / "link.plan", renamed_plan("two"))
    assert (tmp_path / "link.plan").is_symlink()
    assert read_plan(tmp_path / "store" / "x.plan").model.name == "two"


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_on_the_way_leaves_nothing(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    def fail() -> None:
        with PlanWriter(tmp_path / "x.plan") as writer:
            writer.write(HEAD_GRAPH, b"half")
            raise failure

    with pytest.raises(failure):
        fail()
    assert contents(tmp_path) == {}


def test_leaving_without_commit_leaves_the_earlier_plan(tmp_path: Path) -> None:
    write_sample_folder(tmp_path / "x.plan")
    before = contents(tmp_path)
    with PlanWriter(tmp_path / "x.plan") as writer:
        write_sample_files(writer)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 1])
def test_a_replacement_that_fails_at_either_rename_keeps_the_earlier_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, at: int
) -> None:
    write_plan(tmp_path / "x.plan", renamed_plan("earlier"))
    before = contents(tmp_path)
    rename = Path.rename
    calls: list[Path] = []

    def failing(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == at + 1:
            raise failure
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    expected = InputError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_plan(tmp_path / "x.plan", renamed_plan("later"))
    assert contents(tmp_path) == before


def test_an_interrupt_right_after_the_replacement_leaves_the_new_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(tmp_path / "x.plan", renamed_plan("earlier"))
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        result = rename(path, target)
        if ".partial-" in path.name:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_plan(tmp_path / "x.plan", renamed_plan("later"))
    assert read_plan(tmp_path / "x.plan").model.name == "later"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.plan"]


def test_what_a_killed_writer_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys; from runtime.plan_writer import PlanWriter\n"
        "writer = PlanWriter(sys.argv[1]).__enter__()\n"
        "writer.write('head.onnx', b'half'); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.plan")]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".x.plan.partial-")
    write_sample_folder(tmp_path / "x.plan")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.plan"]


def test_a_plan_that_a_killed_writer_moved_away_comes_back(
    tmp_path: Path, dead_process: int
) -> None:
    write_plan(tmp_path / "x.plan", renamed_plan("earlier"))
    (tmp_path / "x.plan").rename(tmp_path / f".x.plan.old-{dead_process}-0")
    with PlanWriter(tmp_path / "x.plan"):
        assert read_plan(tmp_path / "x.plan").model.name == "earlier"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.plan"]


def test_what_others_have_beside_the_target_is_left_alone(
    tmp_path: Path, dead_process: int
) -> None:
    names = {
        f".x.plan.partial-{os.getppid()}-0",
        f".x.plan.partial-{os.getpid()}-1000000",
        f".y.plan.partial-{dead_process}-0",
        f".x.plan.partial-{dead_process}",
        ".x.plan.partial-0-0",
        ".x.plan.partial-99999999999999999999-0",
        f"x.plan.partial-{dead_process}-0",
    }
    for name in names:
        (tmp_path / name).mkdir()
    write_sample_folder(tmp_path / "x.plan")
    assert {entry.name for entry in tmp_path.iterdir()} == {*names, "x.plan"}


def test_of_two_writers_at_once_the_last_to_commit_wins(tmp_path: Path) -> None:
    with PlanWriter(tmp_path / "x.plan") as one, PlanWriter(tmp_path / "x.plan") as other:
        assert one.folder != other.folder
        write_sample_files(one)
        write_sample_files(other)
        one.commit(renamed_plan("one"))
        other.commit(renamed_plan("other"))
    assert read_plan(tmp_path / "x.plan").model.name == "other"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.plan"]


def a_file(target: Path) -> None:
    target.write_text("mine")


def an_empty_folder(target: Path) -> None:
    target.mkdir()


def a_folder_of_notes(target: Path) -> None:
    target.mkdir()
    (target / "notes.txt").write_text("mine")


def a_folder_with_another_programs_plan(target: Path) -> None:
    target.mkdir()
    (target / "plan.json").write_text('{"format": "1.0", "resources": []}')


def a_plan_with_notes(target: Path) -> None:
    write_sample_folder(target)
    (target / "notes.txt").write_text("mine")


def a_cut_off_plan(target: Path) -> None:
    write_sample_folder(target)
    os.truncate(target / "plan.json", 100)


FOREIGN = [
    a_file,
    an_empty_folder,
    a_folder_of_notes,
    a_folder_with_another_programs_plan,
    a_plan_with_notes,
    a_cut_off_plan,
]


@pytest.mark.parametrize("make", FOREIGN)
def test_what_is_no_plan_is_refused_and_not_touched(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "out")
    before = contents(tmp_path)
    with pytest.raises(InputError, match="will not replace") as caught:
        write_sample_folder(tmp_path / "out")
    assert caught.value.where == tmp_path / "out"
    assert contents(tmp_path) == before


def test_a_plan_is_not_written_into_another(tmp_path: Path) -> None:
    write_sample_folder(tmp_path / "one.plan")
    before = sorted((tmp_path / "one.plan").rglob("*"))
    for target in ("one.plan/two.plan", "one.plan/npu/two.plan"):
        with pytest.raises(InputError, match="into a plan"), PlanWriter(tmp_path / target):
            pass
    assert sorted((tmp_path / "one.plan").rglob("*")) == before


def test_what_appears_at_the_target_meanwhile_is_not_touched(tmp_path: Path) -> None:
    with PlanWriter(tmp_path / "out") as writer:
        write_sample_files(writer)
        a_folder_of_notes(tmp_path / "out")
        with pytest.raises(InputError, match=r"'notes\.txt', which no plan has"):
            writer.commit(sample_plan())
    assert contents(tmp_path) == {"out": None, "out/notes.txt": b"mine"}


def test_an_inconsistent_plan_of_an_older_version_can_be_replaced(tmp_path: Path) -> None:
    write_sample_folder(tmp_path / "x.plan")
    old = {"format": "0.3", "model": 1, "buckets": 2}
    (tmp_path / "x.plan" / "plan.json").write_text(json.dumps(old))
    write_sample_folder(tmp_path / "x.plan")
    assert load_plan(tmp_path / "x.plan")[1] == sample_plan()


def test_a_place_that_cannot_be_written_is_an_input_error_with_the_systems_reason(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("mine")
    for target, reason in [
        (tmp_path / "absent" / "x.plan", "No such file or directory"),
        (tmp_path / "file" / "x.plan", "Not a directory"),
        (tmp_path / ("x" * 250), "File name too long"),
        (tmp_path / "nul\0.plan", "null byte"),
        (Path("/"), "will not replace"),
    ]:
        with pytest.raises(InputError, match=reason), PlanWriter(target):
            pass
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_read_only_place_is_an_input_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match="Read-only file system"):
        write_sample_folder(tmp_path / "x.plan")


def test_a_full_disk_under_the_weights_is_an_input_error() -> None:
    with (
        pytest.raises(InputError, match="No space left on device"),
        WeightsWriter(Path("/dev/full")) as weights,
    ):
        weights.add("embed", np.zeros(100_000, np.uint8))


def test_a_full_disk_under_anything_else_is_an_input_error(tmp_path: Path) -> None:
    def write() -> None:
        with PlanWriter(tmp_path / "x.plan") as writer:
            writer.write(HEAD_GRAPH, b"half")
            with Path("/dev/full").open("wb", buffering=0) as stream:
                stream.write(b"x")

    with pytest.raises(InputError, match="No space left on device"):
        write()
    assert contents(tmp_path) == {}


def test_a_full_disk_at_the_last_moment_keeps_the_earlier_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_sample_folder(tmp_path / "x.plan")
    before = contents(tmp_path)
    with PlanWriter(tmp_path / "x.plan") as writer:
        write_sample_files(writer)
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(InputError, match="No space left on device"):
            writer.commit(renamed_plan("later"))
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "relative", ["../x", "/etc/x", "npu/../../x", "", ".x", "npu\\x", "notes.txt", "C:x"]
)
def test_a_file_can_be_written_only_where_a_plan_has_files(tmp_path: Path, relative: str) -> None:
    with (
        PlanWriter(tmp_path / "x.plan") as writer,
        pytest.raises(FulcrumError, match="not a place"),
    ):
        writer.path(relative)
    assert contents(tmp_path) == {}


def test_an_artefacts_entry_matches_its_file(tmp_path: Path) -> None:
    with PlanWriter(tmp_path / "x.plan") as writer:
        writer.path("npu/context.bin").write_bytes(b"x" * 100_000)
        entry = writer.artefact("npu/context.bin")
        assert (entry.path, entry.bytes) == ("npu/context.bin", 100_000)
        check_artefact(writer.folder, entry)
        assert writer.write(HEAD_GRAPH, b"abc") == writer.artefact(HEAD_GRAPH)
        with pytest.raises(InputError, match="No such file"):
            writer.artefact("npu/absent.bin")


def test_a_written_plan_cannot_be_written_to(tmp_path: Path) -> None:
    with PlanWriter(tmp_path / "x.plan") as writer:
        write_sample_files(writer)
        writer.commit(sample_plan())
        for call in (lambda: writer.commit(sample_plan()), lambda: writer.path(HEAD_GRAPH)):
            with pytest.raises(FulcrumError, match="written already"):
                call()


def test_a_plan_that_could_not_be_read_back_is_never_committed(tmp_path: Path) -> None:
    sample = sample_plan()
    bad_forecast = Forecast(1.0, float("nan"), 1.0, 1.0, ())
    bucket = msgspec.structs.replace(sample.buckets[0], forecast=bad_forecast)
    for plan, where in [
        (msgspec.structs.replace(sample, energy_j_per_token=float("inf")), "energy_j_per_token"),
        (
            msgspec.structs.replace(sample, buckets=(bucket, *sample.buckets[1:])),
            "buckets[0].forecast.drafted_per_cycle",
        ),
        (msgspec.structs.replace(sample, masks=()), "masks"),
        (msgspec.structs.replace(sample, format="2.0"), "format"),
    ]:
        with PlanWriter(tmp_path / "x.plan") as writer:
            write_sample_files(writer)
            with pytest.raises(FulcrumError, match="bug in the compiler") as caught:
                writer.commit(plan)
        assert str(caught.value.where).endswith(f"$.{where}")
        assert caught.value.exit_code == 1
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("difference", ["more", "less", "longer"])
def test_a_plan_lists_exactly_the_files_written(tmp_path: Path, difference: str) -> None:
    with PlanWriter(tmp_path / "x.plan") as writer:
        write_sample_files(writer)
        match difference:
            case "more":
                writer.write("npu/context.bin", b"x")
            case "less":
                writer.path(HEAD_GRAPH).unlink()
            case _:
                writer.write(HEAD_GRAPH, b"x" * 1000)
        with pytest.raises(FulcrumError, match="does not list the files"):
            writer.commit(sample_plan())
    assert contents(tmp_path) == {}


def test_tensors_lie_aligned_in_the_order_of_writing_with_zeros_between(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    with WeightsWriter(file) as weights:
        refs = [weights.add(name, array) for name, array in sample_tensors().items()]
    assert tuple(refs) == sample_plan().tensors
    assert weights.artefact() == sample_plan().weights
    check_artefact(tmp_path, weights.artefact())
    used = np.zeros(file.stat().st_size, bool)
    for ref, array in zip(refs, sample_tensors().values(), strict=True):
        used[ref.offset_bytes : ref.offset_bytes + array.nbytes] = True
    assert not np.frombuffer(file.read_bytes(), np.uint8)[~used].any()


def test_tensors_of_any_layout_are_stored_row_by_row(tmp_path: Path) -> None:
    whole = np.arange(6000, dtype=np.float32).reshape(60, 100)
    with WeightsWriter(tmp_path / "weights.bin") as weights:
        refs = [weights.add("t", whole.T), weights.add("s", np.float32(7) + np.zeros((), "f4"))]
        refs.append(weights.add("v", whole[::7, 3:5]))
    assert refs[0] == TensorRef("t", TensorType.F32, (100, 60), 0)
    assert refs[1] == TensorRef("s", TensorType.F32, (), 6 * ALIGNMENT_BYTES)
    data = (tmp_path / "weights.bin").read_bytes()
    assert len(data) == 8 * ALIGNMENT_BYTES
    assert data.startswith(whole.T.tobytes())
    assert data[refs[2].offset_bytes :].startswith(whole[::7, 3:5].tobytes())


@pytest.mark.parametrize(
    "array", [np.zeros(3), np.zeros(3, ">f4"), np.zeros(3, np.int8), np.zeros((3, 0), np.uint8)]
)
def test_tensors_that_a_plan_cannot_hold_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    with WeightsWriter(tmp_path / "weights.bin") as weights:
        with pytest.raises(FulcrumError, match="cannot store tensor"):
            weights.add("x", array)
        assert weights.artefact() == Artefact(
            "weights.bin", 0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        )
