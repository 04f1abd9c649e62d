"""Where the time of a plain decoding step goes, and how long a session takes to load.

    python benchmarks/session_overhead.py smollm2-w4.plan smollm2-w8a16.plan --threads 1,2

A step runs from one token to the next as a user of ``Session.stream_ids`` sees it. Time within
ONNX Runtime is that of its calls for the layers and for the head; all the rest is ours: looking
up embeddings, filling the bound inputs, choosing the token, the text, the bookkeeping. Loading is
timed in new processes, from before ``import runtime`` and from the start of the interpreter, with
the plan's files in the page cache and after the system was asked to drop them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from markdown_table import table

import runtime.cycle
import runtime.session
from planner.modes import plain
from profiles.errors import FulcrumError
from runtime.plan_folder import read_plan
from runtime.session import Session

PARTS = ("layers", "head", "embed", "choose", "text")
"""Timed parts; the first two are ONNX Runtime's."""
_SKIPPED_STEPS = 4
_LOAD = """
import json, sys, time
began = time.perf_counter()
from runtime import load
imported = time.perf_counter()
session = load(sys.argv[1], threads=int(sys.argv[2]))
loaded = time.perf_counter()
session.generate("Hello", max_new_tokens=1)
told = time.perf_counter()
print(json.dumps([imported - began, loaded - imported, told - loaded]))
"""


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over steps, microseconds."""

    plan: str
    format: str
    threads: int
    context: int
    step_us: float
    parts_us: dict[str, float]
    ours_us: float
    """Of the step, outside ONNX Runtime."""
    ours_share: float
    """Median over steps."""


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over processes, seconds."""

    plan: str
    format: str
    threads: int
    page_cache: bool
    """False: the plan's files came from the disk."""
    import_s: float
    load_s: float
    first_token_s: float
    """A prompt of a token or two, after loading."""
    process_s: float
    """From starting the interpreter until the first token is there and the process is gone."""


class Clock:
    """Adds up the time of calls by part."""

    def __init__(self) -> None:
        self.spent_s = dict.fromkeys(PARTS, 0.0)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, its time added to ``part``."""

        def run(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = call(*args, **named)
            self.spent_s[part] += time.perf_counter() - began
            return result

        return run


class TimedOrt:
    """An ONNX Runtime session, its runs timed."""

    def __init__(self, session: Any, part: str, clock: Clock) -> None:
        self.io_binding = session.io_binding
        self.run = clock.timed(part, session.run)
        self.run_with_iobinding = clock.timed(part, session.run_with_iobinding)


def watch(session: Session, clock: Clock) -> None:
    """Time the parts of every later step of ``session``."""
    target = session._target
    for part in (target._layers, target._head):
        name = "head" if part is target._head else "layers"
        part._session = TimedOrt(part._session, name, clock)
    target.embed = clock.timed("embed", target.embed)


def profile(path: Path, threads: int, context: int, steps: int) -> StepFigures:
    """Plain decoding of ``steps`` tokens, at ``context`` in the middle."""
    clock = Clock()
    choose, ending = runtime.cycle.choose, runtime.session.Ending
    read = ending.read
    with Session(path, threads=threads) as session:
        watch(session, clock)
        runtime.cycle.choose = clock.timed("choose", choose)
        ending.read = clock.timed("text", read)
        try:
            walls, parts = _steps(session, clock, context, steps)
        finally:
            runtime.cycle.choose, ending.read = choose, read
        ours = [
            wall - taken["layers"] - taken["head"] for wall, taken in zip(walls, parts, strict=True)
        ]
        return StepFigures(
            plan=path.name,
            format=str(session.plan.part_formats),
            threads=threads,
            context=context,
            step_us=1e6 * statistics.median(walls),
            parts_us={p: 1e6 * statistics.median(taken[p] for taken in parts) for p in PARTS},
            ours_us=1e6 * statistics.median(ours),
            ours_share=statistics.median(o / w for o, w in zip(ours, walls, strict=True)),
        )


def _steps(
    session: Session, clock: Clock, context: int, steps: int
) -> tuple[list[float], list[dict[str, float]]]:
    """Wall time of each step and of its parts, seconds."""
    text = session.tokens.encode_prompt("The lighthouse keeper counted ships. " * context)
    prompt = text[: context - steps // 2]
    walls: list[float] = []
    parts: list[dict[str, float]] = []
    before, began = dict(clock.spent_s), 0.0
    cycle, count = plain(session.plan), steps + _SKIPPED_STEPS
    stream = session.stream_ids(prompt, max_new_tokens=count, ignore_eos=True, cycle=cycle)
    for index, _ in enumerate(stream):
        now = time.perf_counter()
        if index >= _SKIPPED_STEPS:
            walls.append(now - began)
            parts.append({part: clock.spent_s[part] - before[part] for part in PARTS})
        before, began = dict(clock.spent_s), time.perf_counter()
    return walls, parts


def loading(path: Path, threads: int, page_cache: bool, repeat: int) -> LoadFigures:
    """Load the plan in ``repeat`` new processes."""
    rows: list[list[float]] = []
    for _ in range(repeat):
        if not page_cache:
            _drop(path)
        began = time.perf_counter()
        command = [sys.executable, "-c", _LOAD, str(path), str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise FulcrumError("loading failed", where=path, found=done.stderr[-300:])
        rows.append([*json.loads(done.stdout), time.perf_counter() - began])
    middle = [statistics.median(column) for column in zip(*rows, strict=True)]
    return LoadFigures(
        plan=path.name,
        format=str(read_plan(path).part_formats),
        threads=threads,
        page_cache=page_cache,
        **dict(zip(("import_s", "load_s", "first_token_s", "process_s"), middle, strict=True)),
    )


def _drop(folder: Path) -> None:
    """Ask the system to forget the files' pages; written ones first go to the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def step_table(rows: list[StepFigures]) -> str:
    """Markdown."""
    titles = ["format", "threads", "context", "step, ms", *PARTS, "outside ORT", "share"]
    lines: list[list[str]] = []
    for row in rows:
        parts = [f"{row.parts_us[part] / 1e3:.2f}" for part in PARTS]
        ours = [f"{row.ours_us / 1e3:.2f}", f"{row.ours_share:.1%}"]
        about = [row.format, str(row.threads), str(row.context), f"{row.step_us / 1e3:.2f}"]
        lines.append([*about, *parts, *ours])
    return table(titles, lines)


def load_table(rows: list[LoadFigures]) -> str:
    """Markdown."""
    titles = ["format", "files", "import, s", "load, s", "both", "first token, s", "process, s"]
    lines: list[list[str]] = []
    for row in rows:
        times = row.import_s, row.load_s, row.import_s + row.load_s, row.first_token_s
        cells = [f"{value:.2f}" for value in (*times, row.process_s)]
        lines.append([row.format, "cached" if row.page_cache else "on disk", *cells])
    return table(titles, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables; the exit code."""
    asked = _parser().parse_args(arguments)
    threads = [int(part) for part in asked.threads.split(",")]
    try:
        steps = [
            profile(path, count, int(context), asked.steps)
            for path in asked.plans
            for count in threads
            for context in asked.contexts.split(",")
        ]
        loads = [
            loading(path, max(threads), cached, asked.repeat)
            for path in asked.plans
            for cached in (True, False)
        ]
    except FulcrumError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{step_table(steps)}\n\n{load_table(loads)}")
    if asked.json:
        document = {"steps": steps, "loads": loads}
        asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--threads", default="1,2", help="a list (default: 1,2)")
    parser.add_argument("--contexts", default="128,1024")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=3, help="processes that load")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
