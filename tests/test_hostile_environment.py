"""Full disks, signals, odd paths and missing homes: the command says one line or does its work."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compiled_models import Recipe
from sample_plans import write_sample_folder
from test_host_profile import FakeMeasure
from tiny_models import TinyShape, write_gguf, write_hf_folder

from planner import cli
from planner.agreement import DepthCounts
from planner.calibrate import Draft, Store, read_store, write_store
from planner.host_profile import host_profile
from planner.prompt_file import Split
from profiles.words import SubLayerId
from runtime.plan_folder import load_plan, read_plan
from runtime.session import load

ROOT = Path(__file__).parent.parent
SHAPE = TinyShape(layers=1)
NEVER_WRITABLE = Path("/proc/fulcrum")
"""Not even the administrator can make files there."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "tiny", SHAPE)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": str(i), "category": "chat", "prompt": "for the end " * 3} for i in range(3)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and an empty cache."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path / "cache"))
    return folder


def environment(**changes: str | None) -> dict[str, str]:
    """This one with changes; None removes a variable."""
    made = {**os.environ, "PYTHONPATH": str(ROOT), **changes}
    return {name: value for name, value in made.items() if value is not None}


def started(*arguments: object, **options: Any) -> "subprocess.Popen[str]":
    """The command in a process of its own, with signals as in a terminal."""

    def reset() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    command = [sys.executable, "-m", "planner", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    given = {"env": environment(), "preexec_fn": reset, **pipes, **options}
    return subprocess.Popen(command, **given)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def compiling(model: Path, prompts: Path, *more: object) -> tuple[object, ...]:
    return ("compile", model, "--device", "oneplus12", "--prompts", prompts, *more)


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def wait_for(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 120
    while not condition() and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_disk_that_fills_up_while_compiling_leaves_nothing(
    work: Path, model: Path, prompts: Path
) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    code, out, err = ended(started(*compiling(model, prompts), preexec_fn=small_files))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "cannot write the plan" in err
    assert list(work.iterdir()) == []


def test_a_full_disk_behind_a_result_is_one_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    with open("/dev/full", "w") as full:
        code, _, err = ended(started("devices", stdout=full))
    assert (code, err) == (2, "error: cannot write the result: No space left on device\n")


def test_a_place_that_nobody_can_write_is_one_line(
    work: Path, model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sample_folder(work / "sample.plan")
    for arguments in (
        compiling(model, prompts, "-o", NEVER_WRITABLE / "x.plan"),
        compiling(model, prompts, "-o", "/proc/x.plan"),
        ("inspect", "sample.plan", "-o", NEVER_WRITABLE / "x.svg"),
        ("explain", "sample.plan", "-o", "/proc/x.txt"),
        ("profile", "oneplus12", "-o", "/proc/x.toml"),
    ):
        assert run(*arguments) == 2
        written = capsys.readouterr()
        assert (written.out, written.err.count("\n")) == ("", 1)
        assert "/proc/" in written.err


def test_a_compile_renames_within_one_folder_only(
    work: Path, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that it does not matter on which file system the output lies
    moved: list[tuple[Path, Path]] = []
    real = os.rename

    def rename(source: Any, target: Any, **_: object) -> None:
        moved.append((Path(source).absolute(), Path(target).absolute()))
        if moved[-1][0].parent != moved[-1][1].parent:
            raise OSError(18, "Invalid cross-device link")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", rename)
    (work / "elsewhere").mkdir()
    (work / "link").symlink_to("elsewhere")
    assert run(*compiling(model, prompts, "-o", "link/x.plan")) == 0
    assert any(target.name == "x.plan" for _, target in moved)
    assert read_plan(work / "elsewhere" / "x.plan").model.layers == 1


def test_output_goes_to_another_file_system(work: Path, model: Path, prompts: Path) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shared.stat().st_dev == work.stat().st_dev:
        pytest.skip("no second file system to write to")
    target = shared / f"fulcrum-test-{os.getpid()}.plan"
    (work / "x.plan").symlink_to(target)
    try:
        for _ in range(2):
            assert run(*compiling(model, prompts, "-o", "x.plan", "-q")) == 0
            load_plan(target)
        assert (work / "x.plan").is_symlink()
        assert not list(shared.glob(f".{target.name}*"))
    finally:
        subprocess.run(["rm", "-rf", target], check=True)


def test_two_compiles_to_one_output_both_end_well(work: Path, model: Path, prompts: Path) -> None:
    both = [started(*compiling(model, prompts, "-o", "x.plan"), cwd=work) for _ in range(2)]
    for process in both:
        code, _, err = ended(process)
        assert code == 0
        # One may say that it waits for the other
        assert all(line.startswith("WARNING planner.locks") for line in err.splitlines())
    load_plan(work / "x.plan")
    assert [entry.name for entry in work.iterdir()] == ["x.plan"]


def test_a_killed_compile_is_cleared_away_by_the_next(
    work: Path, model: Path, prompts: Path
) -> None:
    process = started(*compiling(model, prompts), cwd=work)
    wait_for(lambda: list(work.glob(".*.partial-*/weights.bin")), process)
    process.kill()
    assert ended(process)[0] == -signal.SIGKILL
    assert list(work.glob(".*.partial-*"))
    assert run(*compiling(model, prompts)) == 0
    assert [entry.name for entry in work.iterdir()] == ["tiny-oneplus12.plan"]
    load_plan(work / "tiny-oneplus12.plan")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_compile_that_is_told_to_end_leaves_nothing(
    work: Path, model: Path, prompts: Path, number: signal.Signals
) -> None:
    process = started(*compiling(model, prompts), cwd=work)
    wait_for(lambda: list(work.glob(".*.partial-*")), process)
    process.send_signal(number)
    assert ended(process) == (128 + number, "", "ended by a signal\n")
    assert list(work.iterdir()) == []


def test_a_signal_that_was_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    # As under nohup
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(
            "planner.commands.devices.list_devices",
            lambda *_: signal.raise_signal(signal.SIGHUP),
        )
        assert run("devices") == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


INTERRUPT_WHEN_LOADING = """
import sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from planner.cli import main
sys.exit(main(["devices"]))
"""


@pytest.mark.parametrize(
    "name", ["planner.signals", "planner.terminal", "profiles.errors", "planner.app", "typer"]
)
def test_an_interrupt_while_the_command_loads_is_told_in_one_word(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT_WHEN_LOADING, name],
        **{"env": environment(), "capture_output": True, "text": True},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_without_a_writable_cache_a_compile_works_and_says_so(
    work: Path, model: Path, prompts: Path
) -> None:
    changed = environment(FULCRUM_CACHE=str(NEVER_WRITABLE), TMPDIR=str(work.parent))
    code, _, err = ended(started(*compiling(model, prompts), cwd=work, env=changed))
    assert (code, err.count("\n")) == (0, 1), err
    assert str(NEVER_WRITABLE) in err
    load_plan(work / "tiny-oneplus12.plan")


@pytest.mark.parametrize("home", [None, "", "relative", "/proc/none"])
def test_a_home_that_is_missing_or_odd_does_no_harm(work: Path, home: str | None) -> None:
    changed = environment(HOME=home, FULCRUM_CACHE=None, XDG_CACHE_HOME=None, TMPDIR=str(work))
    code, out, _ = ended(started("devices", env=changed, cwd=work))
    assert code == 0
    assert "oneplus12" in out


C_LOCALE = {
    **{"LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "PYTHONIOENCODING": None,
}


@pytest.mark.parametrize("name", ["my plan ü 模型.plan", 'it\'s "quoted" $HOME.plan'])
@pytest.mark.parametrize("locale", [{}, C_LOCALE], ids=["utf-8", "C"])
def test_any_path_and_locale_will_do(
    compiled: Callable[[Recipe], Path], work: Path, name: str, locale: dict[str, str | None]
) -> None:
    (work / name).symlink_to(compiled(Recipe(shape=SHAPE)))
    changed = environment(**locale)
    request = ("run", name, "--prompt", "naïve 模型", "--max-new-tokens", "3", "--json")
    with load(name) as session:
        expected = session.generate("naïve 模型", max_new_tokens=3, chat=True)
    code, out, err = ended(started(*request, cwd=work, env=changed))
    assert (code, err) == (0, "")
    assert json.loads(out)["token_ids"] == list(expected.token_ids)
    code, out, err = ended(started("inspect", name, cwd=work, env=changed))
    assert (code, err) == (0, "")
    for view in ("svg", "text"):
        arguments = ("inspect", name, "--format", view, "-o", f"ü {view}")
        assert ended(started(*arguments, cwd=work, env=changed))[0] == 0
        assert (work / f"ü {view}").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_model_compiles_from_and_to_any_path(
    tmp_path: Path, work: Path, prompts: Path, kind: str
) -> None:
    place = tmp_path / "mo del ü" / "模型 x.gguf"
    place.parent.mkdir()
    (write_hf_folder if kind == "folder" else write_gguf)(place, SHAPE)
    assert run(*compiling(place, prompts, "-o", "out put é/p 模.plan")) == 2
    (work / "out put é").mkdir()
    assert run(*compiling(place, prompts, "-o", "out put é/p 模.plan")) == 0
    load_plan("out put é/p 模.plan")


def test_of_two_first_measurements_one_waits_for_the_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeMeasure()
    began, go_on = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        began.set()
        assert go_on.wait(60)
        return fake(*given)

    found: list[object] = []

    def measure() -> None:
        found.append(host_profile(tmp_path / "h.toml", threads=2, measure=slow))

    threads = [threading.Thread(target=measure) for _ in range(2)]
    threads[0].start()
    assert began.wait(60)
    threads[1].start()
    end = time.monotonic() + 60
    while "waiting for another process" not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert fake.calls == 1
    assert len(found) == 2
    assert found[0] == found[1]
    assert [file.name for file in tmp_path.iterdir()] == ["h.toml"]


def test_calibrations_at_once_keep_what_both_measured(tmp_path: Path) -> None:
    def draft(*skipped: int, depth: int = 1) -> Draft:
        ids = tuple(map(SubLayerId, skipped))
        return Draft(ids, Split.SEARCH, DepthCounts((9,) * depth, (5,) * depth))

    file = tmp_path / "c.json"
    write_store(file, Store(texts={Split.SEARCH: []}, drafts=[draft(1), draft(2, depth=3)]))
    write_store(file, Store(texts={Split.REPORT: []}, losses=[[]], drafts=[draft(2), draft(4)]))
    kept = read_store(file)
    assert set(kept.texts) == {Split.SEARCH, Split.REPORT}
    assert len(kept.losses) == 1
    depths = {entry.skipped: len(entry.counts.tried) for entry in kept.drafts}
    assert depths == {(1,): 1, (2,): 3, (4,): 1}


def test_too_little_memory_is_infeasible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def take(*_: object) -> None:
        raise MemoryError("Unable to allocate 2.00 TiB")

    monkeypatch.setattr("planner.commands.devices.list_devices", take)
    assert run("devices") == 4
    err = capsys.readouterr().err
    assert "2.00 TiB" in err
    assert err.count("\n") == 1
