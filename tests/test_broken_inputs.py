"""More than 1500 broken inputs: each ends in a clear error, in little time and little memory.

They are read in a process of their own (``broken_runner``), so that one that kills it is named.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from broken_files import Case, Corpus, replace
from broken_models import folder_corpus, gguf_corpus
from broken_plans import plan_corpus, profile_corpus, prompt_corpus, seal
from broken_runner import LIMIT_BYTES, LIMIT_S
from broken_streams import streamed_corpus
from compiled_models import Recipe

from profiles.errors import FulcrumError
from runtime.plan_folder import read_plan
from runtime.session import load

RUNNER = Path(__file__).with_name("broken_runner.py")
CORPORA: dict[Callable[[Path], Corpus], int] = {
    gguf_corpus: 270,
    folder_corpus: 380,
    plan_corpus: 600,
    streamed_corpus: 105,
    profile_corpus: 220,
    prompt_corpus: 110,
}
"""With the least number of cases that each makes."""


def outcomes(cases: Sequence[Case], work: Path) -> list[dict[str, Any]]:
    """What became of each case; a process that dies is started again behind the case."""
    found: list[dict[str, Any]] = []
    while len(found) < len(cases):
        todo = work / "cases.json"
        rest = [[case.kind, str(case.path)] for case in cases[len(found) :]]
        todo.write_text(json.dumps(rest))
        done = subprocess.run([sys.executable, RUNNER, todo], capture_output=True, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        if len(lines) < len(rest):
            said = done.stderr[-400:]
            lines.append({"code": 1, "error": f"died with {done.returncode}: {said}", "left": []})
        found += lines
    return found


def is_right(case: Case, outcome: dict[str, Any]) -> bool:
    """An error of the user's, or none where the change may be harmless; nothing left behind."""
    codes = (2, 3) if case.certain else (0, 2, 3)
    return outcome["code"] in codes and not outcome["left"] and "\n" not in outcome["error"]


@pytest.mark.parametrize("make", CORPORA)
def test_a_broken_input_ends_in_a_clear_error(
    make: Callable[[Path], Corpus], tmp_path: Path
) -> None:
    cases = make(tmp_path).cases
    assert len(cases) >= CORPORA[make]
    found = outcomes(cases, tmp_path)
    wrong = [
        (case.name, had) for case, had in zip(cases, found, strict=True) if not is_right(case, had)
    ]
    assert wrong == []
    # That most are refused shows that the corpus is not harmless as a whole
    assert Counter(had["code"] for had in found)[0] < len(cases) / 4


def test_the_runner_notices_what_hangs_and_what_eats_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (LIMIT_S, LIMIT_BYTES) == (10, 2 * 2**30)
    monkeypatch.setenv("BROKEN_LIMIT_S", "2")
    source = tmp_path / "x.jsonl"
    source.write_text("")
    cases = [Case(kind, kind, source, True) for kind in ("_hangs", "_eats", "_dies", "prompts")]
    found = outcomes(cases, tmp_path)
    assert [had["code"] for had in found] == [1, 1, 1, 2]
    assert "0:00:02" in found[0]["error"]
    assert "MemoryError" in found[1]["error"]
    assert not any(is_right(case, had) for case, had in zip(cases[:3], found, strict=False))


def test_every_damaged_model_says_what_to_do_next(tmp_path: Path) -> None:
    for make in (gguf_corpus, folder_corpus):
        root = tmp_path / make.__name__
        root.mkdir()
        cases = [case for case in make(root).cases if "cut at" in case.name]
        hints = [had["hint"] for had in outcomes(cases, tmp_path)]
        assert len(hints) > 30
        assert all(hints)


def test_a_graph_is_looked_at_although_its_digest_is_right(
    compiled: Callable[[Recipe], Path], tmp_path: Path
) -> None:
    corpus = Corpus("plan", tmp_path, compiled(Recipe()))
    corpus.add("graph", lambda path: replace(path / "head.onnx", b"\x0a\x03abc"))
    path = corpus.cases[0].path
    seal(path)
    read_plan(path)
    with pytest.raises(FulcrumError, match=r"head\.onnx: not a graph that a plan has"):
        load(path)


def test_an_error_cannot_command_the_terminal() -> None:
    error = FulcrumError("bad\nname", where="a\x1b[2Jb", found="c\rd\u202ee", hint="\x07")
    assert str(error) == "a?[2Jb: bad name (found c d?e); ?"


SAMPLE = 3


@pytest.mark.slow
@pytest.mark.parametrize("make", CORPORA)
def test_the_command_itself_ends_with_the_same_code(
    make: Callable[[Path], Corpus], tmp_path: Path
) -> None:
    check_commands(make, tmp_path, SAMPLE)


def test_a_broken_plan_ends_the_command_with_one_line(tmp_path: Path) -> None:
    check_commands(plan_corpus, tmp_path, 2)


def check_commands(make: Callable[[Path], Corpus], root: Path, count: int) -> None:
    """Some of a corpus's certain cases, evenly spaced, through the real command."""
    cases = [case for case in make(root).cases if case.certain]
    for case in cases[:: len(cases) // count][:count]:
        commands = {
            "plan": ["run", case.path, "--emulate", "--prompt", "the end"],
            "gguf": ["compile", case.path, "--device", "oneplus12"],
            "folder": ["compile", case.path, "--device", "oneplus12"],
            "profile": ["profile", case.path],
            "prompts": ["compile", "x", "--device", "oneplus12", "--prompts", case.path],
        }
        work = root / "work"
        work.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "planner", *map(str, commands[case.kind])]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=60)
        assert done.returncode in (2, 3), (case.name, done.stderr)
        assert (done.stdout, done.stderr.count("\n")) == ("", 1), case.name
        assert list(work.iterdir()) == []
