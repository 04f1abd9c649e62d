"""``plan run``: where prompts come from, stop texts, conversations on a terminal."""

import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from compiled_models import Recipe
from test_cli import SKIPPING, Compiled, Plan, check_refusal, plan, prompt_file  # noqa: F401
from tiny_models import GQA, write_hf_folder

from planner.commands.run import statistics
from runtime.plan_folder import read_plan
from runtime.plan_types import WIDEST_PASS
from runtime.session import Session, load

PLAN_COMMAND = Path(sys.executable).parent / "plan"


class Keyboard(io.StringIO):
    """A terminal on which lines are typed."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(compiled: Compiled) -> Path:
    return compiled(SKIPPING)


def test_what_came_from_flash_is_told_where_weights_stream(folder: Path) -> None:
    with load(folder) as session:
        done = session.generate("for the end", max_new_tokens=4)
        assert "flash" not in statistics(session, done, emulate=False)
        done.stats.flash_bytes, done.stats.stalled_us = 8_000_000, 2500.0
        told = statistics(session, done, emulate=False)
    assert "from flash: 2.00 MB a token; passes waited 2.50 ms for it" in told


def test_a_stop_text_ends_the_answer_and_says_so(plan: Plan, folder: Path) -> None:  # noqa: F811
    request = ("run", folder, "--prompt", "for the end", "--max-new-tokens", 20)
    whole = plan(*request, "-q").out.removesuffix("\n")
    stop = whole[9:11]
    outcome = plan(*request, "--stop", "\x00never", "--stop", stop)
    assert outcome.out == whole[: whole.index(stop)] + "\n"
    assert "finished: a --stop text came" in outcome.err
    data = plan(*request, "--stop", stop, "--json").data
    assert data["finish_reason"] == "stop"
    assert data["text"] == whole[: whole.index(stop)]
    check_refusal(plan(*request, "--stop", ""), 2, "not a stop string")


def test_every_finish_reason_is_told(compiled: Compiled, plan: Plan) -> None:  # noqa: F811
    with load(compiled(SKIPPING)) as session:
        token = session.generate("the", max_new_tokens=5, chat=True).token_ids[2]
    ending = compiled(Recipe(eos_ids=(token,), masks=SKIPPING.masks, faint=SKIPPING.faint))
    request = ("run", ending, "--prompt", "the", "--json", "--max-new-tokens")
    assert plan(*request, 50).data["finish_reason"] == "eos"
    assert plan(*request, 5, "--ignore-eos").data["finish_reason"] == "length"
    data = plan(*request, 500, "--ignore-eos").data
    assert data["finish_reason"] == "context"
    assert data["prompt_tokens"] + data["new_tokens"] == 256


def test_a_plan_for_the_models_whole_context_serves_it_and_counts_its_memory(
    plan: Plan,  # noqa: F811
    tmp_path: Path,
) -> None:
    model, prompts = write_hf_folder(tmp_path / "tiny"), prompt_file(tmp_path / "six.jsonl", 6)
    request = ("compile", model, "--device", "oneplus12", "--prompts", prompts, "--context")
    most = GQA.max_context
    check_refusal(plan(*request, most + 1), 2, str(most))
    assert plan(*request, most, "-o", "long.plan").code == 0
    long = read_plan(Path("long.plan"))
    # Behind the context there is room for the widest pass
    assert long.memory.kv_bytes == (most + WIDEST_PASS) * long.kv.bytes_per_token
    answer = ("--emulate", "--json", "--ignore-eos", "--max-new-tokens", most)
    data = plan("run", "long.plan", "--no-chat", "--prompt", "for " * 400, *answer).data
    assert data["prompt_tokens"] > 300
    assert data["finish_reason"] == "context"
    assert data["prompt_tokens"] + data["new_tokens"] == most


def test_a_prompt_that_is_not_given_is_read_from_a_pipe(
    plan: Plan,  # noqa: F811
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ("run", folder, "--max-new-tokens", 6, "-q")
    expected = plan(*request, "--prompt", "for\nthe").out
    monkeypatch.setattr("sys.stdin", io.StringIO("for\nthe\n"))
    assert plan(*request).out == expected


def test_a_conversation_remembers_its_turns(
    plan: Plan,  # noqa: F811
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", Keyboard("the cat\n\nand?\n/new\nand?\n"))
    outcome = plan("run", folder, "--max-new-tokens", 8, "--system", "Be brief")
    options = {"system": "Be brief", "max_new_tokens": 8}
    turns = [{"role": "user", "content": "the cat"}]
    with load(folder) as session:
        texts = [session.generate(turns, **options).text]
        turns += [{"role": "assistant", "content": texts[0]}, {"role": "user", "content": "and?"}]
        texts.append(session.generate(turns, **options).text)
        texts.append(session.generate(turns[2:], **options).text)
    assert len(set(texts)) == 3
    assert outcome.out == "".join(text + "\n" for text in texts)
    assert outcome.code == 0
    assert outcome.err.count("(8 tokens, ") == 3
    assert "/new forgets" in outcome.err


def test_an_interrupt_stops_the_answer_and_not_the_conversation(
    plan: Plan,  # noqa: F811
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, asked = Session.stream, list[Any]()

    def interrupted(self: Session, prompt: Any, **options: Any) -> Iterator[str]:
        asked.append(list(prompt))
        for number, piece in enumerate(honest(self, prompt, **options)):
            if len(asked) == 1 and number == 1:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(Session, "stream", interrupted)
    monkeypatch.setattr("sys.stdin", Keyboard("the cat\nand?\n"))
    outcome = plan("run", folder, "--max-new-tokens", 8)
    assert outcome.code == 0
    assert "(stopped)" in outcome.err
    assert "(8 tokens, " in outcome.err
    said = outcome.out.split("\n")[0]
    assert asked[1][1] == {"role": "assistant", "content": said}


def test_a_conversation_that_outgrows_the_context_says_what_to_do(
    plan: Plan,  # noqa: F811
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = "xyz " * 100
    monkeypatch.setattr("sys.stdin", Keyboard(f"hi\n{long}\nhi\n/new\nhi\n"))
    outcome = plan("run", folder, "--max-new-tokens", 4)
    assert outcome.code == 0
    assert "does not fit" in outcome.err
    assert "/new forgets the conversation" in outcome.err
    assert outcome.err.count("(4 tokens, ") == 3
    monkeypatch.setattr("sys.stdin", Keyboard("hi\n"))
    assert "the plan's context is full, /new forgets" in plan("run", folder).err


@pytest.mark.parametrize("option", ["--json", "--no-chat"])
def test_a_conversation_has_neither_json_nor_plain_text(
    plan: Plan,  # noqa: F811
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
) -> None:
    monkeypatch.setattr("sys.stdin", Keyboard("hi\n"))
    check_refusal(plan("run", folder, option), 2, "--prompt")


def test_on_a_real_terminal_ctrl_c_and_ctrl_d_do_as_they_should(folder: Path) -> None:
    ours, theirs = pty.openpty()
    command = [str(PLAN_COMMAND), "run", str(folder), "--max-new-tokens", "4", "--ignore-eos"]
    shell: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=_own_terminal, **shell)
    os.close(theirs)
    seen = wait_for(ours, lambda text: text.endswith("> "))
    assert "Ctrl-D ends it" in seen
    os.write(ours, b"the ca")
    # One that comes just before the program waits for the line is heard with the next
    wait_for(ours, lambda text: text.endswith("> "), typing=b"\x03")
    os.write(ours, b"the cat\n")
    wait_for(ours, lambda text: "(4 tokens, " in text and text.endswith("> "))
    os.write(ours, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(ours)


def _own_terminal() -> None:
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def wait_for(terminal: int, done: Callable[[str], bool], typing: bytes = b"") -> str:
    """What a terminal shows until ``done``; ``typing`` again each second; fails after a minute."""
    seen, deadline = b"", time.monotonic() + 60
    os.write(terminal, typing)
    while not done(plain := seen.decode(errors="replace").replace("\x1b[?2004h", "")):
        assert time.monotonic() < deadline, plain
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 4096)
        else:
            os.write(terminal, typing)
    return plain
