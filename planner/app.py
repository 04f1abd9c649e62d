"""The arguments of every command, with their help; each calls its body in ``planner.commands``.

A body is loaded only when its command runs: some take seconds to load, and help shall be quick.
"""

from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import Exit, TyperException

from planner.options import (
    AnswerTokens,
    AsJson,
    Chat,
    Context,
    Device,
    Draft,
    DraftFormat,
    DraftModelName,
    DramBudget,
    Emulate,
    FlashRate,
    IgnoreEos,
    Limit,
    Model,
    Modes,
    NewTokens,
    OtherDevice,
    Output,
    Plan,
    PlanOutput,
    Prompts,
    PromptText,
    Quiet,
    Refresh,
    Repeat,
    Rivals,
    Sampled,
    SampledTemperature,
    Seed,
    Stop,
    TargetFormat,
    Temperature,
    Threads,
    TopK,
    TopP,
    Verbose,
    ViewName,
)
from planner.terminal import Terminal
from profiles.errors import InputError
from runtime.plan import FORMAT

app = typer.Typer(
    add_completion=False,
    # Plain text can be piped, and rich would take longer than the rest of the help
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _tell_version(asked: bool) -> None:
    if asked:
        # Late: it looks through the installed packages
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"plan {version('fulcrum-plan')}, plan format {FORMAT}")
        except PackageNotFoundError:
            typer.echo(f"plan, not installed, plan format {FORMAT}")
        raise Exit


@app.callback()
def describe(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Say which version this is."
        ),
    ] = False,
) -> None:
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
    refresh: Refresh = False,
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
    model: Model,
    device: Device,
    output: PlanOutput = None,
    context: Context = None,
    target_format: TargetFormat = "w8a16",
    draft: DraftModelName = None,
    draft_format: DraftFormat = "w4",
    dram_budget: DramBudget = None,
    prompts: Prompts = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Make a plan for a model on a device.

    Measures how often drafts are accepted, decides what to draft with and where each layer runs,
    and writes a folder. Measurements are kept, so a second compile is quick. Weights that the
    budget cannot hold stream from flash.

    \b
    Examples:
      plan compile smollm2-135m --device host
      plan compile ./my-llama --device oneplus12 --context 2048 -o my.plan
      plan compile big.gguf --draft small.gguf --device host --dram-budget 900MiB
    """
    from planner.commands import compile as body

    body.compile_model(
        terminal_of(ctx, quiet, verbose),
        *(model, device),
        output=output,
        context=context,
        target_format=target_format,
        draft=draft,
        draft_format=draft_format,
        dram_budget_bytes=dram_budget,
        prompts=prompts,
        as_json=as_json,
    )


@app.command("inspect")
def inspect_(
    ctx: typer.Context,
    plan: Plan,
    view: ViewName = "text",
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
def simulate(
    ctx: typer.Context,
    plan: Plan,
    device: OtherDevice = None,
    dram_budget: DramBudget = None,
    flash_rate: FlashRate = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Predict a plan's time: its cycles on their lanes, and what if.

    \b
    Example:
      plan simulate my.plan --device oneplus12 --dram-budget 1GiB --flash-rate 2GB/s
    """
    from planner.commands import simulate as body

    wish = body.Wish(device, dram_budget, flash_rate)
    body.simulate_plan(terminal_of(ctx, quiet, verbose), plan, wish, as_json)


@app.command()
def run(
    ctx: typer.Context,
    plan: Plan,
    prompt: PromptText = None,
    chat: Chat = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_new_tokens: AnswerTokens = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    draft: Draft = "plan",
    emulate: Emulate = False,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Answer a prompt, or hold a conversation.

    The text streams to stdout; statistics follow on stderr. On a terminal, without a prompt, each
    line is answered and remembered.

    \b
    Examples:
      plan run my.plan
      plan run my.plan --prompt "Why is the sky blue?"
      plan run phone.plan --emulate --prompt @letter.txt --temperature 0.7 --seed 1
    """
    from planner.commands import run as body

    terminal = terminal_of(ctx, quiet, verbose)
    sampling = body.Sampling(temperature, top_k, top_p, seed)
    wish = body.Wish(
        *(prompt, chat, system, max_new_tokens, sampling, draft, tuple(stop or ()), ignore_eos)
    )
    body.run_plan(terminal, plan, wish, emulate=emulate, threads=threads, as_json=as_json)


@app.command()
def verify(
    ctx: typer.Context,
    plan: Plan,
    prompts: Prompts = None,
    limit: Limit = None,
    max_new_tokens: NewTokens = 64,
    sampled: Sampled = True,
    temperature: SampledTemperature = 1.0,
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
        *(terminal_of(ctx, quiet, verbose), plan, body.choose_prompts(prompts, limit)),
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
    modes: Modes = None,
    rival: Rivals = None,
    prompts: Prompts = None,
    limit: Limit = None,
    repeat: Repeat = 3,
    max_new_tokens: NewTokens = 64,
    flash_rate: FlashRate = None,
    emulate: Emulate = False,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure ways to decode against each other.

    Modes take turns prompt by prompt: `ar` is plain decoding at its fastest, `off` the plain
    decoding that drafts are held to, `spec` (or `plan`) the plan's own cycles. `chainN` drafts N
    tokens with the draft model, else under the best skip mask; `modelN` and `skipN` say which.
    `ngramN` looks N tokens up. `treeN` is the plan's static tree of at most N nodes, `online` its
    trees grown as probabilities say.

    \b
    Examples:
      plan bench my.plan
      plan bench my.plan --modes ar,chain4,chain8,spec --limit 6 --json
      plan bench streamed.plan --rival without-draft.plan --flash-rate 500MB/s
    """
    from planner.commands import bench as body

    body.bench_plan(
        *(terminal_of(ctx, quiet, verbose), plan, body.choose_prompts(prompts, limit)),
        modes=modes,
        rivals=rival or (),
        repeat=repeat,
        max_new_tokens=max_new_tokens,
        loading=body.Loading(emulate, threads, flash_rate),
        as_json=as_json,
    )


def dispatch(arguments: Sequence[str], terminal: Terminal) -> int:
    """Parse ``arguments``, run the command; its exit code.

    Typer without its own handling of errors, which takes several lines.

    Raises:
        InputError: The arguments are wrong.
    """
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
