"""The ``plan`` command: parses arguments, runs a command, turns errors into one line and a code.

Exit codes: 0 ok, 1 internal, 2 usage or bad input, 3 incompatible, 4 infeasible, 5 verification
failed, 130 interrupted. The body of each command is in ``planner.commands`` and loaded only when
it runs, so that help stays quick.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import Exit, TyperException

from planner.options import (
    AsJson,
    Emulate,
    Limit,
    NewTokens,
    Output,
    Plan,
    Prompts,
    Quiet,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    Verbose,
)
from planner.sizes import parse_size
from planner.terminal import Terminal
from profiles.errors import FulcrumError, InputError

INTERNAL = 1
INTERRUPTED = 130
CLOSED_PIPE = 141
"""As a program that SIGPIPE ends."""

app = typer.Typer(
    add_completion=False,
    # Plain text can be piped, and rich would take longer than the rest of the help
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def describe() -> None:
    """Plans speculative decoding ahead of time for one model on one device.

    \b
    plan compile smollm2-135m --device host
    plan run smollm2-135m-host.plan --prompt "Why is the sky blue?"
    """


def terminal_of(ctx: typer.Context, quiet: bool, verbose: bool) -> Terminal:
    """The terminal that ``main`` handed in, set as the command line says."""
    terminal = ctx.ensure_object(Terminal)
    terminal.configure(quiet, verbose)
    return terminal


@app.command()
def devices(
    ctx: typer.Context, as_json: AsJson = False, quiet: Quiet = False, verbose: Verbose = False
) -> None:
    """List the devices that plans can be made for.

    The last columns say how well each is known: numbers measured, published, derived, assumed.

    \b
    Example:
      plan devices
    """
    from planner.commands import devices as body

    body.list_devices(terminal_of(ctx, quiet, verbose), as_json)


@app.command()
def profile(
    ctx: typer.Context,
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="`host`, a name or a file.")],
    output: Output = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again, even if it was done before.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure this machine, or print a device's profile.

    \b
    Examples:
      plan profile host -o mine.toml
      plan profile oneplus12
    """
    from planner.commands import devices as body

    terminal = terminal_of(ctx, quiet, verbose)
    body.show_profile(terminal, device, output, refresh, threads, as_json)


@app.command("compile")
def compile_(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A bundled name, a .gguf file or a Hugging Face folder."
        ),
    ],
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="See `plan devices`; or a .toml file.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Default: MODEL-DEVICE.plan in this folder."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", metavar="N", help="Tokens of prompt and answer together."),
    ] = None,
    target_format: Annotated[
        str, typer.Option("--target-format", metavar="F", help="w8a16, w8a8 or f32.")
    ] = "w8a16",
    dram_budget: Annotated[
        int | None,
        typer.Option(
            "--dram-budget", metavar="SIZE", parser=parse_size, help="Such as 512MB or 2GiB."
        ),
    ] = None,
    prompts: Prompts = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Make a plan for a model on a device.

    Measures how often drafts are accepted, decides what to draft with and where each layer runs,
    and writes a folder. Measurements are kept, so a second compile is quick.

    \b
    Examples:
      plan compile smollm2-135m --device host
      plan compile ./my-llama --device oneplus12 --context 2048 -o my.plan
    """
    from planner.commands import compile as body

    body.compile_model(
        terminal_of(ctx, quiet, verbose),
        *(model, device),
        output=output,
        context=context,
        target_format=target_format,
        dram_budget_bytes=dram_budget,
        prompts=prompts,
        as_json=as_json,
    )


@app.command("inspect")
def inspect_(
    ctx: typer.Context,
    plan: Plan,
    view: Annotated[
        str, typer.Option("--format", metavar="VIEW", help="text, json, dot or svg.")
    ] = "text",
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show a plan: cycles, passes, placement, memory.

    \b
    Examples:
      plan inspect my.plan
      plan inspect my.plan --format svg -o my.svg
    """
    from planner.commands import inspect as body

    terminal = terminal_of(ctx, quiet, verbose)
    body.inspect_plan(terminal, plan, "json" if as_json else view, output)


@app.command()
def explain(
    ctx: typer.Context,
    plan: Plan,
    output: Output = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Say why a plan is what it is.

    For each decision: what it maximises, the runner-up, and what would flip it.

    \b
    Example:
      plan explain my.plan
    """
    from planner.commands import inspect as body

    body.explain_plan(terminal_of(ctx, quiet, verbose), plan, output, as_json)


@app.command()
def run(
    ctx: typer.Context,
    plan: Plan,
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TEXT", help="Or - for stdin, or @FILE.")
    ],
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Chat template; default: if the model has one."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    draft: Annotated[
        str, typer.Option("--draft", metavar="MODE", help="plan, off, chainN or ngramN.")
    ] = "plan",
    emulate: Emulate = False,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Answer a prompt.

    The text streams to stdout; statistics follow on stderr.

    \b
    Examples:
      plan run my.plan --prompt "Why is the sky blue?"
      plan run phone.plan --emulate --prompt @letter.txt --temperature 0.7 --seed 1
    """
    from planner.commands import run as body

    terminal = terminal_of(ctx, quiet, verbose)
    sampling = body.Sampling(temperature, top_k, top_p, seed)
    wish = body.Wish(prompt, chat, system, max_new_tokens, sampling, draft)
    body.run_plan(terminal, plan, wish, emulate=emulate, threads=threads, as_json=as_json)


@app.command()
def verify(
    ctx: typer.Context,
    plan: Plan,
    prompts: Prompts = None,
    limit: Limit = None,
    max_new_tokens: NewTokens = 64,
    sampled: Annotated[
        bool, typer.Option("--sampled/--no-sampled", help="Sampled output too, or greedy only.")
    ] = True,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    emulate: Emulate = False,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check that output is that of plain decoding.

    Every cycle of the plan and every draft source that it could use is compared with plain
    decoding, greedy and sampled. Exit code 5 on a difference.

    \b
    Examples:
      plan verify my.plan
      plan verify my.plan --prompts mine.jsonl --max-new-tokens 32 --no-sampled
    """
    from planner.commands import verify as body

    settings = body.Sampling(temperature, top_k, top_p, seed)
    body.verify_plan(
        terminal_of(ctx, quiet, verbose),
        plan,
        prompts=prompts,
        limit=limit,
        max_new_tokens=max_new_tokens,
        sampled=body.sampling_for(settings, sampled),
        emulate=emulate,
        threads=threads,
        as_json=as_json,
    )


@app.command()
def bench(
    ctx: typer.Context,
    plan: Plan,
    modes: Annotated[
        str | None,
        typer.Option(
            "--modes", metavar="LIST", help="ar, spec, chainN, ngramN; default: ar,spec,chain8."
        ),
    ] = None,
    prompts: Prompts = None,
    limit: Limit = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, metavar="N", help="Rounds over the prompts.")
    ] = 3,
    max_new_tokens: NewTokens = 64,
    emulate: Emulate = False,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure ways to decode against each other.

    Modes take turns prompt by prompt: `ar` is plain decoding, `spec` the plan's own cycles,
    `chainN` drafts N tokens with the plan's best skip mask, `ngramN` looks N tokens up.

    \b
    Examples:
      plan bench my.plan
      plan bench my.plan --modes ar,chain4,chain8,spec --limit 6 --json
    """
    from planner.commands import bench as body

    body.bench_plan(
        terminal_of(ctx, quiet, verbose),
        plan,
        modes=modes,
        prompts=prompts,
        limit=limit,
        repeat=repeat,
        max_new_tokens=max_new_tokens,
        emulate=emulate,
        threads=threads,
        as_json=as_json,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal without Unicode shows a question mark rather than nothing
            stream.reconfigure(errors="replace")
    terminal = Terminal()
    try:
        code = _guarded(sys.argv[1:] if arguments is None else arguments, terminal)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    return code


def _guarded(arguments: Sequence[str], terminal: Terminal) -> int:
    """Run a command; whatever stops it becomes one line on stderr and an exit code."""
    try:
        with terminal:
            return _dispatch(arguments or ("--help",), terminal)
    except BrokenPipeError:
        raise
    except FulcrumError as error:
        return _fail(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except Exception as error:
        if terminal.verbose:
            traceback.print_exc()
        more = "" if terminal.verbose else "; -v shows where"
        what = f"{type(error).__name__}: {error}"
        return _fail(f"error: {what}; this is a bug in Fulcrum{more}", INTERNAL)


def _dispatch(arguments: Sequence[str], terminal: Terminal) -> int:
    """Typer without its own handling of errors, which takes several lines."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("plan", list(arguments), obj=terminal) as ctx:
            command.invoke(ctx)
    except Exit as error:
        return error.exit_code
    except TyperException as error:
        ctx = getattr(error, "ctx", None)
        where = ctx.command_path if ctx is not None else "plan"
        what = error.format_message().rstrip(".")
        raise InputError(what, hint=f"`{where} --help` shows how") from error
    return 0


def _fail(message: str, code: int) -> int:
    """Say why on stderr, behind all results."""
    sys.stdout.flush()
    sys.stderr.write(" ".join(message.split()) + "\n")
    return code
