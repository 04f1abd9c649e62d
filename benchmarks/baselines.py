"""Compares compiled plans with llama.cpp and transformers on the same GGUF, prompts and token ids.

    python benchmarks/baselines.py smollm2-135m smollm2-w4.plan --threads 1,2 \
        --prompts benchmarks/prompts_lookup.jsonl --minutes 4 --json out.json

Every prompt is decoded greedily in every way, at every number of threads, one after the other, and
every other prompt in reverse order; only one engine computes at a time. ``docs/benchmarks.md`` has
the method. The table goes to stdout, progress to stderr.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from baseline_engines import OURS, Run, Setup, Task, parse_way
from baseline_table import Sample, counted, figures, markdown
from baseline_workers import Worker, close_all

from lowering.source import BUNDLED, bundled_path, digest_of
from planner.modes import parse_mode
from planner.prompt_file import Prompt, load_prompts
from profiles.errors import FulcrumError, InputError
from profiles.measure import cpu_description
from runtime.plan import TOKENIZER_FILE, ExecutionPlan
from runtime.plan_folder import load_plan
from runtime.tokens import Tokens

DEFAULT_MODES = (
    "llama.cpp:ar,llama.cpp:lookup2,llama.cpp:lookup10,"
    "fulcrum:ar,fulcrum:off,fulcrum:spec,fulcrum:ngram8,"
    "transformers:ar,transformers:lookup10"
)
WARM_TOKENS = 8
_WARM_PROMPT_TOKENS = 32
_SLACK_TOKENS = 128
"""Context beyond prompt and answer, since drafts reach past the end."""


class Way(msgspec.Struct, frozen=True):
    """One way to decode a prompt."""

    setup: Setup
    mode: str
    threads: int


class Encoded(msgspec.Struct, frozen=True):
    """A prompt as every engine gets it."""

    prompts: str
    """Name of its file."""
    prompt: Prompt
    ids: tuple[int, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit code."""
    asked = _parser().parse_args(arguments)
    try:
        samples, about = compare(asked)
    except FulcrumError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    rows = figures(samples)
    left_out = len({s.prompt_id for s in samples}) - len({s.prompt_id for s in counted(samples)})
    print(
        f"{about['model']}, {about['cpu']}, up to {asked.new_tokens} new tokens; others kept"
        f" {about['busy_cores']:.1f} cores busy before."
    )
    if left_out:
        print(f"{left_out} prompts with short answers are left out.")
    print(f"\n{markdown(rows)}")
    if asked.json:
        document = {**about, "figures": rows, "samples": samples}
        asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF, or a bundled name")
    parser.add_argument("plans", nargs="+", type=Path, help="folders compiled from that GGUF")
    parser.add_argument("--prompts", action="append", required=True, type=Path, metavar="JSONL")
    parser.add_argument("--limit", type=int, help="prompts of each file (default: all)")
    parser.add_argument(
        "--even", action="store_true", help="every second prompt only, from the second on"
    )
    parser.add_argument("--max-prompt-tokens", type=int, default=768)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", default="1,2", help="a list (default: 1,2)")
    parser.add_argument("--modes", default=DEFAULT_MODES, help=f"default: {DEFAULT_MODES}")
    parser.add_argument(
        "--draft", type=Path, help="GGUF for llama.cpp:draftN, transformers:assisted"
    )
    parser.add_argument("--minutes", type=float, help="begin no further prompt after that")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every sample, too")
    return parser


def compare(asked: argparse.Namespace) -> tuple[list[Sample], dict[str, object]]:
    """All samples, and what they are about."""
    wanted = dict.fromkeys(parse_way(text, asked.draft) for text in asked.modes.split(","))
    model = bundled_path(asked.model) if asked.model in BUNDLED else Path(asked.model)
    plans = [(folder, load_plan(folder)[1]) for folder in asked.plans]
    _check_plans(model, plans, [mode for engine, mode in wanted if engine == OURS])
    prompts = _encode(asked, *plans[0])
    longest = max(len(encoded.ids) for encoded in prompts)
    common = {
        "draft": asked.draft,
        "context": longest + asked.new_tokens + _SLACK_TOKENS,
        "eos_ids": plans[0][1].model.tokenizer.eos_ids,
    }
    ways: list[Way] = []
    for engine, mode in wanted:
        for setup in _setups(engine, model, plans, common):
            ways += [Way(setup, mode, count) for count in _threads(asked.threads)]
    about = {"model": model.name, "cpu": cpu_description(), "busy_cores": busy_cores()}
    samples = _measure(ways, prompts, asked.new_tokens, asked.minutes)
    return samples, {**about, "new_tokens": asked.new_tokens}


def busy_cores(seconds: float = 0.5) -> float:
    """Cores that whatever else runs here keeps busy, while this process sleeps.

    On a machine that is not quiet, engines whose threads wait for each other fall far behind.
    """
    before = _ticks()
    time.sleep(seconds)
    spent = [after - ago for after, ago in zip(_ticks(), before, strict=True)]
    idle = spent[3] + spent[4]
    return (os.cpu_count() or 1) * (1 - idle / max(sum(spent), 1))


def _ticks() -> list[int]:
    """Time of all cores so far: user, nice, system, idle, waiting for input, interrupts, stolen."""
    with open("/proc/stat", encoding="ascii") as stream:
        return [int(word) for word in stream.readline().split()[1:9]]


def _threads(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise InputError("no numbers of threads", where="--threads", found=text, expected="1,2")
    return counts


def _check_plans(
    model: Path, plans: Sequence[tuple[Path, ExecutionPlan]], modes: Sequence[str]
) -> None:
    if not model.is_file():
        raise InputError("cannot read the model", where=model, expected="a GGUF")
    digest = digest_of([model])
    for folder, plan in plans:
        if plan.model.weights_digest != digest:
            raise InputError("the plan was compiled from another file", where=folder)
        for mode in modes:
            parse_mode(mode, plan)


def _setups(
    engine: str,
    model: Path,
    plans: Sequence[tuple[Path, ExecutionPlan]],
    common: dict[str, object],
) -> list[Setup]:
    if engine != OURS:
        return [Setup(engine, engine, model, **common)]
    formats = [str(plan.part_formats) for _, plan in plans]
    names = [
        f"{OURS} {kind}" if formats.count(kind) == 1 else f"{OURS} {folder.stem}"
        for kind, (folder, _) in zip(formats, plans, strict=True)
    ]
    # The draft is for other engines
    return [
        Setup(engine, name, folder, **{**common, "draft": None})
        for name, (folder, _) in zip(names, plans, strict=True)
    ]


def _encode(asked: argparse.Namespace, folder: Path, plan: ExecutionPlan) -> list[Encoded]:
    """Prompts of all files in turns, through the plan's chat template."""
    tokens = Tokens.from_files(folder / TOKENIZER_FILE, plan.model.tokenizer)
    chat = plan.model.tokenizer.chat_template is not None
    most = min(asked.max_prompt_tokens, plan.context - asked.new_tokens)
    columns: list[list[Encoded]] = []
    for file in asked.prompts:
        encoded = [
            Encoded(file.stem, prompt, tuple(tokens.encode_prompt(prompt.prompt, chat=chat)))
            for prompt in load_prompts(file)[1 if asked.even else 0 :: 2 if asked.even else 1]
        ]
        columns.append([one for one in encoded if len(one.ids) <= most][: asked.limit])
    turns = itertools.zip_longest(*columns)
    found = [one for turn in turns for one in turn if one is not None]
    if not found:
        raise InputError("no prompt is short enough", expected=f"at most {most} tokens")
    return found


def _measure(
    ways: Sequence[Way], prompts: Sequence[Encoded], new_tokens: int, minutes: float | None
) -> list[Sample]:
    workers = {setup: Worker(setup) for setup in dict.fromkeys(way.setup for way in ways)}
    samples: list[Sample] = []
    try:
        for way in ways:
            _tell(f"warming up {way.setup.label} {way.mode}")
            ids = prompts[0].ids[:_WARM_PROMPT_TOKENS]
            workers[way.setup].run(Task(way.mode, way.threads, ids, WARM_TOKENS))
        began = time.monotonic()
        for index, one in enumerate(prompts):
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                _tell(f"time is up after {index} of {len(prompts)} prompts\n")
                break
            for way in ways if index % 2 == 0 else reversed(ways):
                _tell(f"prompt {index + 1} of {len(prompts)}: {way.setup.label} {way.mode}")
                task = Task(way.mode, way.threads, one.ids, new_tokens)
                samples.append(_sample(way, one, workers[way.setup].run(task)))
    finally:
        close_all(list(workers.values()))
        _tell("")
    return samples


def _sample(way: Way, one: Encoded, run: Run) -> Sample:
    setup, prompt = way.setup, one.prompt
    how = setup.engine, setup.label, way.mode, way.threads
    return Sample(*how, one.prompts, prompt.id, prompt.category, len(one.ids), run)


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
    elif text.endswith("\n"):
        sys.stderr.write(text)


if __name__ == "__main__":
    sys.exit(main())
