"""``benchmarks/memory_limit.py`` with folders that stand for control groups, and with real ones."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("memory_limit")
    del sys.modules["memory_limit"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "memory_limit.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_controller_it_says_what_is_missing(
    limits: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("V1", "V2"):
        names = getattr(limits, name)._replace(root=tmp_path / "nothing")
        monkeypatch.setattr(limits, name, names)
    assert limits.main(["1GiB", "--", "true"]) == 2
    assert "controls no memory" in capsys.readouterr().err


def test_without_the_right_it_says_so(
    limits: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # a group cannot be made inside a file, whoever one is
    (tmp_path / "root").touch()
    refused = limits.V1._replace(root=tmp_path / "root")
    monkeypatch.setattr(limits, "interface", lambda: refused)
    assert limits.main(["1GiB", "--", "true"]) == 2
    assert "cannot limit memory" in capsys.readouterr().err


def test_the_group_holds_the_limit_while_the_command_runs_and_is_gone_after(
    limits: ModuleType, tmp_path: Path
) -> None:
    names = limits.V2._replace(root=tmp_path)
    with limits.group(names, 123456) as folder:
        assert (folder / names.limit).read_text() == "123456"
        for file in folder.iterdir():
            file.unlink()
    assert list(tmp_path.glob("fulcrum-*")) == []


@pytest.mark.parametrize("arguments", [("1GiB",), ("1GiB", "--"), ("much", "--", "true")])
def test_a_senseless_call_is_refused(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_a_command_that_needs_more_is_killed_and_one_that_fits_is_told_of() -> None:
    fits = run("256MiB", "--", sys.executable, "-c", "raise SystemExit(7)")
    if fits.returncode == 2:
        pytest.skip("no control groups here")
    assert fits.returncode == 7
    assert "peak" in fits.stderr
    much = run("64MiB", "--", sys.executable, "-c", "len(b'1' * (128 << 20))")
    assert much.returncode == 137
    assert "needs more memory" in much.stderr
