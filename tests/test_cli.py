"""The command line: results, exit codes, one-line errors, and nothing half written."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import documented
import msgspec
import pytest
import typer
from compiled_models import Recipe
from sample_plans import write_sample_folder
from tiny_models import write_hf_folder

from planner import cli
from planner.app import app
from planner.commands.compile import default_output
from planner.sizes import parse_size
from planner.terminal import write_file
from profiles.errors import InputError
from profiles.profile import DeviceProfile, load_profile, shipped_profiles
from runtime.plan_cycles import Cycle, DraftSource
from runtime.plan_folder import read_plan
from runtime.session import load

SKIPPING = Recipe(masks=((2, 5),), faint=(2, 5), cycles=((0, Cycle(DraftSource.SKIP, 3, mask=1)),))
ELSEWHERE = msgspec.structs.replace(SKIPPING, soc="a chip that nobody has")
PLAN_COMMAND = Path(sys.executable).parent / "plan"
COMMANDS = (
    *("devices", "profile", "compile", "inspect", "explain", "simulate"),
    *("run", "verify", "bench"),
)
HEAVY = {"torch", "onnx", "onnxruntime", "ortools", "networkx", "transformers", "rich"}

Compiled = Callable[[Recipe], Path]


class Outcome(msgspec.Struct):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The JSON document on stdout."""
        return json.loads(self.out)


Plan = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: what starts the tests in the background may have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Plan:
    """Runs the command in an empty folder with an empty cache."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path / "cache"))

    def call(*arguments: object) -> Outcome:
        code = cli.main([str(argument) for argument in arguments])
        written = capsys.readouterr()
        return Outcome(code, written.out, written.err)

    return call


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "tiny")


def prompt_file(path: Path, count: int) -> Path:
    lines = [
        {"id": f"p{i}", "category": ("code", "chat")[i % 2], "prompt": "for the end of " * (i + 2)}
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return prompt_file(tmp_path / "six.jsonl", 6)


def check_refusal(outcome: Outcome, code: int, *words: str) -> None:
    """One line on stderr that holds ``words``, nothing on stdout."""
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    for word in words:
        assert word in outcome.err


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_loads_nothing_heavy_and_shows_an_example(command: str | None) -> None:
    arguments = [PLAN_COMMAND, *([command] if command else []), "--help"]
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0
    assert "plan " + (command or "compile") in result.stdout
    imports = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in imports}
    assert "planner" in loaded
    assert loaded & HEAVY == set()


def test_help_lists_every_command_in_full(plan: Plan) -> None:
    text = plan("--help").out
    assert set(re.findall(r"^  ([a-z]+)  ", text, re.MULTILINE)) == set(COMMANDS)
    assert "..." not in text.replace("[ARGS]...", "")


def test_no_arguments_show_the_help(plan: Plan) -> None:
    assert plan() == plan("--help")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["complie"], ["compile"]),
        (["compile", "x"], ["--device"]),
        (["compile", "x", "--device", "oneplsu12"], ["oneplsu12", "oneplus12"]),
        (["compile", "x", "--device", "hots"], ["'host'"]),
        (["compile", "x", "--device", "gone/far.toml"], ["gone/far.toml"]),
        (["compile", "smollm2-136m", "--device", "oneplus12"], ["smollm2-135m"]),
        (["compile", "gone/model.gguf", "--device", "oneplus12"], ["gone/model.gguf"]),
        (["compile", "x", "--device", "oneplus12", "--target-format", "w8a15"], ["w8a16"]),
        (["compile", "x", "--device", "oneplus12", "--target-format", "mpl=w4"], ["mlp"]),
        (["compile", "x", "--device", "oneplus12", "--dram-budget", "2XB"], ["2GiB"]),
        (["compile", "x", "--device", "oneplus12", "--prompts", "none.jsonl"], ["none.jsonl"]),
        (["profile", "onplus12"], ["oneplus12"]),
        (["profile", "oneplus12", "--refresh"], ["host"]),
        (["inspect", "none.plan"], ["none.plan", "plan compile"]),
        (["explain", "none.plan"], ["none.plan"]),
        (["simulate", "none.plan"], ["none.plan"]),
        (["simulate", "none.plan", "--flash-rate", "fast"], ["1.5G"]),
        (["run", "none.plan", "--prompt", "x"], ["none.plan"]),
        (["run", "none.plan", "--prompt", "@none.txt"], ["none.txt"]),
        (["run", "none.plan", "--prompt", "x", "--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["run", "none.plan", "--prompt", "x", "--top-p", "2"], ["top_p"]),
        (["verify", "none.plan"], ["none.plan"]),
        (["verify", "none.plan", "--temperature", "0"], ["temperature"]),
        (["bench", "none.plan", "--no-such"], ["--no-such"]),
        (["devices", "-q", "-v"], ["-q"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    plan: Plan, arguments: list[str], words: list[str]
) -> None:
    check_refusal(plan(*arguments), 2, *words)


def test_unknown_views_and_modes_offer_the_nearest(plan: Plan, compiled: Compiled) -> None:
    folder = compiled(SKIPPING)
    check_refusal(plan("inspect", folder, "--format", "sgv"), 2, "'svg'")
    check_refusal(plan("run", folder, "--prompt", "x", "--draft", "chian8"), 2, "'chain8'")
    check_refusal(plan("bench", folder, "--modes", "ar,spek"), 2, "'spec'")
    check_refusal(plan("bench", folder, "--modes", "chain64"), 2, "63")


def test_a_chain_without_a_mask_is_refused(plan: Plan, compiled: Compiled) -> None:
    check_refusal(plan("bench", compiled(Recipe()), "--modes", "chain4"), 2, "ngramN")


def test_a_changed_byte_is_incompatible(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "sample.plan"
    write_sample_folder(folder)
    weights = folder / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[5000] ^= 1
    weights.write_bytes(data)
    check_refusal(plan("run", folder, "--prompt", "x"), 3, "weights.bin")


def test_a_plan_of_another_device_needs_emulation(plan: Plan, compiled: Compiled) -> None:
    folder = compiled(ELSEWHERE)
    check_refusal(plan("run", folder, "--prompt", "the"), 3, "--emulate", "nobody has")
    emulated = plan("run", folder, "--prompt", "the", "--emulate", "--max-new-tokens", 4)
    assert emulated.code == 0
    assert "tiny-device, predicted, not measured: " in emulated.err


def test_devices_counts_where_numbers_come_from(plan: Plan) -> None:
    listed = plan("devices", "--json").data["devices"]
    assert [device["name"] for device in listed] == shipped_profiles()
    for device in listed:
        keys = {
            *("name", "description", "soc", "os", "processors", "flash_bytes_per_s"),
            *("memory_bytes", "default_budget_bytes", "numbers"),
        }
        documented.check_keys("devices", device, keys)
        sources = {"measured", "paper", "derived", "assumed"}
        documented.check_keys("devices", device["numbers"], sources)
    text = plan("devices").out
    assert all(name in text for name in shipped_profiles())
    assert "plan profile host" in text


def test_host_is_measured_on_demand_and_listed_from_then_on(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = msgspec.structs.replace(load_profile("oneplus12"), name="host")
    asked: list[tuple[bool, int | None]] = []

    def measure(
        *, refresh: bool = False, progress: Any = None, threads: int | None = None, **_: object
    ) -> DeviceProfile:
        if progress is not None:
            progress(1, 2)
            asked.append((refresh, threads))
        return host

    monkeypatch.setattr("planner.host_profile.host_profile", measure)
    monkeypatch.setattr("planner.host_profile.cached_host_profile", lambda: host)
    written = plan("profile", "host", "-o", tmp_path / "host.toml", "--refresh", "--threads", 2)
    assert (written.code, written.err, asked) == (0, "", [(True, 2)])
    assert load_profile(tmp_path / "host.toml") == host
    assert plan("profile", "host", "--json").data["name"] == "host"
    names = [device["name"] for device in plan("devices", "--json").data["devices"]]
    assert names == [*shipped_profiles(), "host"]
    assert "not measured yet" not in plan("devices").out


def test_a_printed_profile_loads_as_the_same(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "copy.toml"
    file.write_text(plan("profile", "oneplus12").out)
    assert load_profile(file) == load_profile("oneplus12")
    other = tmp_path / "written.toml"
    assert "22 paper" in plan("profile", "oneplus12", "-o", other).out
    assert load_profile(other) == load_profile("oneplus12")


def test_compile_run_verify_inspect_and_explain_a_folder(
    plan: Plan, tiny_model: Path, prompts: Path
) -> None:
    compiled = plan(
        *("compile", tiny_model, "--device", "oneplus12", "--context", 256, "--prompts", prompts)
    )
    assert compiled.code == 0, compiled.err
    assert compiled.err == ""
    assert compiled.out.startswith("tiny-oneplus12.plan: tiny for oneplus12, w8a16, ")
    assert "perplexity" in compiled.out
    assert "plan run tiny-oneplus12.plan --emulate" in compiled.out
    folder = Path("tiny-oneplus12.plan")
    assert read_plan(folder).context == 256
    assert [entry.name for entry in Path().iterdir()] == [folder.name]

    assert plan("inspect", folder, "--json").data["plan"]["target_format"] == "w8a16"
    assert plan("explain", folder).out.startswith("Why this plan: tiny on oneplus12")
    assert plan("explain", folder, "--json").data["decisions"]
    verified = plan("verify", folder, "--emulate", "--prompts", prompts, "--max-new-tokens", 12)
    assert verified.code == 0
    assert verified.out.startswith("token-exact: yes (6 prompts, ")


def test_compile_json_has_the_documented_keys(plan: Plan, tiny_model: Path, prompts: Path) -> None:
    arguments = ("--device", "oneplus12", "--prompts", prompts, "--dram-budget", "1GiB")
    data = plan("compile", tiny_model, *arguments, "-o", "my.plan", "--json").data
    keys = {
        *("output", "model", "device", "target_format", "context", "bytes", "memory_bytes"),
        *("memory_budget_bytes", "quality", "speculates", "buckets"),
    }
    documented.check_keys("compile", data, keys)
    assert data["output"] == "my.plan"
    assert data["memory_budget_bytes"] == 2**30
    assert data["buckets"][0]["context_from"] == 0
    assert data["bytes"] == sum(
        file.stat().st_size for file in Path("my.plan").iterdir() if file.stem != "plan"
    )


def test_too_small_a_budget_is_infeasible_and_leaves_nothing(plan: Plan, tiny_model: Path) -> None:
    arguments = ("compile", tiny_model, "--device", "oneplus12", "--dram-budget", "1MB")
    check_refusal(plan(*arguments), 4, "smallest")
    assert list(Path().iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_an_interrupted_compile_leaves_nothing(
    tiny_model: Path, prompts: Path, tmp_path: Path
) -> None:
    work = tmp_path / "interrupted"
    work.mkdir()
    for _ in range(3):
        outcome = interrupted(work, tmp_path / "cache", tiny_model, prompts)
        if outcome[0]:
            break
        # Finished before it was told, which a busy machine may bring about: once more
        shutil.rmtree(work / "tiny-oneplus12.plan")
    assert outcome == (130, "", "interrupted\n")
    assert list(work.iterdir()) == []


def interrupted(work: Path, cache: Path, model: Path, prompts: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a compile that is interrupted once its folder is there."""
    process = subprocess.Popen(
        [PLAN_COMMAND, "compile", model, "--device", "oneplus12", "--prompts", prompts],
        cwd=work,
        env={
            "FULCRUM_CACHE": str(cache),
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 120
    while not list(work.glob(".*.partial-*")) and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_a_closed_pipe_is_no_error(compiled: Compiled) -> None:
    # Another process reads one byte and goes; the output is larger than a pipe holds
    command = [
        PLAN_COMMAND,
        "run",
        compiled(SKIPPING),
        "--prompt",
        "the",
        "--max-new-tokens",
        "200",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


def test_run_streams_what_the_session_generates(plan: Plan, compiled: Compiled) -> None:
    folder = compiled(SKIPPING)
    with load(folder) as session:
        text = session.generate("for the end", max_new_tokens=20, chat=True).text
    outcome = plan("run", folder, "--prompt", "for the end", "--max-new-tokens", 20)
    assert outcome.code == 0
    assert outcome.out == text + "\n"
    assert "20 tokens in " in outcome.err
    assert "accepted of " in outcome.err
    assert "predicted" not in outcome.err
    assert plan("run", folder, "--prompt", "for", "--max-new-tokens", 4, "-q").err == ""


def test_every_draft_gives_the_same_text(plan: Plan, compiled: Compiled) -> None:
    request = ("run", compiled(SKIPPING), "--prompt", "for the end", "--no-chat", "-q")
    request = (*request, "--temperature", 1, "--seed", 7, "--max-new-tokens", 16, "--draft")
    texts = {plan(*request, draft).out for draft in ("plan", "off", "chain2", "ngram5", "ar")}
    assert len(texts) == 1


def test_run_json_has_the_documented_keys(plan: Plan, compiled: Compiled) -> None:
    data = plan(
        *("run", compiled(SKIPPING), "--prompt", "the", "--max-new-tokens", 5, "--json")
    ).data
    keys = {
        *("text", "token_ids", "finish_reason", "device", "emulated", "prompt_tokens"),
        "reused_tokens",
        *("new_tokens", "cycles", "speculating_cycles", "drafted", "accepted", "prefill_us"),
        *("draft_us", "verify_us", "decode_us", "simulated_us", "tokens_per_s", "mean_accepted"),
        *("mean_drafted", "predicted_tokens_per_s"),
        *("draft_passes", "nodes_by_depth", "tried_by_depth", "accepted_by_depth"),
        *("flash_bytes", "ahead_bytes", "read_us", "exposed_io_us", "stalled_us"),
    }
    documented.check_keys("run", data, keys)
    assert data["finish_reason"] == "length"
    assert len(data["token_ids"]) == data["new_tokens"] == 5


def test_a_prompt_comes_from_a_file_or_from_stdin(
    plan: Plan, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ("run", compiled(SKIPPING), "--max-new-tokens", 6, "-q", "--prompt")
    expected = plan(*request, "for the").out
    Path("letter.txt").write_text("for the\n")
    assert plan(*request, "@letter.txt").out == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("for the\n"))
    assert plan(*request, "-").out == expected


def test_a_written_view_is_the_printed_one(plan: Plan, compiled: Compiled) -> None:
    folder = compiled(SKIPPING)
    for view in ("text", "json", "dot", "svg"):
        printed = plan("inspect", folder, "--format", view)
        assert printed.code == 0
        assert plan("inspect", folder, "--format", view, "-o", "view").err == "wrote view\n"
        assert Path("view").read_text() == printed.out
    check_refusal(plan("inspect", folder, "-o", "none/view"), 2, "none/view")


def test_nothing_is_written_into_a_plan(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "sample.plan"
    write_sample_folder(folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (tmp_path / "link").symlink_to(folder)
    for place in (folder / "plan.json", folder / "new.svg", tmp_path / "link" / "weights.bin"):
        check_refusal(plan("inspect", folder, "-o", place), 2, "into a plan", "-o")
        check_refusal(plan("explain", folder, "-o", place), 2, "into a plan")
        check_refusal(plan("profile", "oneplus12", "-o", place), 2, "into a plan")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_pipe_gets_every_column_of_the_devices(plan: Plan, monkeypatch: Any) -> None:
    long = msgspec.structs.replace(load_profile("oneplus12"), soc="x" * 36, name="y" * 80)
    monkeypatch.setattr("planner.host_profile.cached_host_profile", lambda: long)
    lines = plan("devices").out.splitlines()
    assert lines[0].split()[-1] == "assumed"
    assert next(line for line in lines if line.startswith("y")).split()[-1] == "9"


def test_the_version_is_told(plan: Plan) -> None:
    outcome = plan("--version")
    assert (outcome.code, outcome.err) == (0, "")
    assert re.fullmatch(r"plan \S+, plan format 1\.\d+\n", outcome.out)


def test_a_home_that_nobody_has_is_a_missing_file(plan: Plan) -> None:
    check_refusal(plan("compile", "~nobody-has-this/m", "--device", "oneplus12"), 2, "no such")
    check_refusal(plan("run", "x.plan", "--prompt", "@~nobody-has-this/p"), 2, "~nobody-has-this")


def test_a_bug_is_one_line_and_a_traceback_on_demand(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("planner.commands.devices.list_devices", fail)
    check_refusal(plan("devices"), 1, "ZeroDivisionError: two lines", "bug", "-v")
    verbose = plan("devices", "-v")
    assert verbose.code == 1
    assert "Traceback" in verbose.err
    assert "bug" in verbose.err.splitlines()[-1]


def test_an_interrupt_that_comes_as_another_error_is_an_interrupt(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None

    monkeypatch.setattr("planner.commands.devices.list_devices", fail)
    before = signal.getsignal(signal.SIGINT)
    assert plan("devices") == Outcome(130, "", "interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before


def test_verbose_logs_plain_lines(plan: Plan, compiled: Compiled, prompts: Path) -> None:
    request = ("verify", compiled(SKIPPING), "--prompts", prompts, "--max-new-tokens", 2)
    lines = plan(*request, "--limit", 1, "-v").err.splitlines()
    assert lines
    assert all(line.startswith("INFO planner") for line in lines)
    assert plan(*request, "--limit", 1).err == ""


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("512MB", 512 * 10**6),
        ("2GiB", 2 * 2**30),
        ("1.5g", 3 * 2**29),
        ("4 KiB", 4096),
        ("7kb", 7000),
        ("1TB", 10**12),
    ],
)
def test_sizes_have_decimal_and_binary_units(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1MB", "2XB", "GiB", "1e9", "nan", "9999TB", "1.2.3G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("model", "device", "name"),
    [
        ("smollm2-135m", "host", "smollm2-135m-host.plan"),
        ("models/Phi 3.Q4_1.gguf", "lab/phone.toml", "Phi-3.Q4_1-phone.plan"),
        ("/", "host", "model-host.plan"),
    ],
)
def test_the_default_output_is_named_after_model_and_device(
    model: str, device: str, name: str
) -> None:
    assert default_output(model, device) == Path(name)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "out"
    write_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(file, "\ud800")
    assert file.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_documentation_names_every_option(name: str) -> None:
    command = typer.main.get_command(app).commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    long_ones = {option for option in options if option.startswith("--")} - {"--quiet", "--verbose"}
    assert long_ones
    text = documented.section(name) + documented.general()
    assert {option for option in long_ones if not re.search(rf"[` ]{option}[` ]", text)} == set()
