"""Arguments and options that several commands share, with their help."""

from pathlib import Path
from typing import Annotated

import typer

from planner.sizes import parse_rate, parse_size

Plan = Annotated[Path, typer.Argument(metavar="PLAN", help="A folder that `plan compile` wrote.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout; keys in docs/commands.md.")
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Nothing but errors on stderr.")]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Log lines on stderr; a traceback after a bug.")
]
Emulate = Annotated[
    bool,
    typer.Option(
        "--emulate",
        help="Execute a plan of another device here, and predict that device's time.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help="Threads; default: one for each core."),
]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write here, not to stdout.")]
PlanOutput = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Default: MODEL-DEVICE.plan in this folder."),
]
ViewName = Annotated[str, typer.Option("--format", metavar="VIEW", help="text, json, dot or svg.")]
Refresh = Annotated[
    bool, typer.Option("--refresh", help="Measure again, even if it was done before.")
]
NewTokens = Annotated[
    int, typer.Option("--max-new-tokens", min=1, metavar="N", help="Most tokens.")
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="JSON lines with id, category, prompt; default: those that come with Fulcrum.",
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, metavar="N", help="The first N prompts only.")
]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="The k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option("--top-p", help="The likeliest of this mass; 1 is off.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the sampling noise.")]
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A bundled name, a .gguf file or a Hugging Face folder."),
]
Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help="See `plan devices`; or a .toml file.")
]
Context = Annotated[
    int | None,
    typer.Option("--context", metavar="N", help="Tokens of prompt and answer together."),
]
TargetFormat = Annotated[
    str,
    typer.Option(
        "--target-format",
        metavar="F",
        help="w8a16 (default), w8a8, w4 or f32; by part: w8a16,mlp=w4,head=w8a8.",
    ),
]
DraftModelName = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL",
        help="A smaller model with the same tokens, to draft with where that pays.",
    ),
]
DraftFormat = Annotated[
    str, typer.Option("--draft-format", metavar="F", help="Of the draft model; as --target-format.")
]
DramBudget = Annotated[
    int | None,
    typer.Option("--dram-budget", metavar="SIZE", parser=parse_size, help="Such as 512MB or 2GiB."),
]
OtherDevice = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="Price it there; default: as the plan has it."),
]
PromptText = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        help="Or - for stdin, or @FILE; default: a conversation on a terminal, else stdin.",
    ),
]
AnswerTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        min=1,
        metavar="N",
        help="Most tokens; default: 128, in a conversation what the context holds.",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End before this text; can be repeated."),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past the end of the answer, to measure.")
]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Chat template; default: if the model has one."),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="MODE",
        help="plan, ar, off, chainN, modelN, skipN, ngramN, treeN or online; see `plan bench`.",
    ),
]
Sampled = Annotated[
    bool, typer.Option("--sampled/--no-sampled", help="Sampled output too, or greedy only.")
]
SampledTemperature = Annotated[float, typer.Option("--temperature", help="Of the sampled output.")]
Modes = Annotated[
    str | None,
    typer.Option(
        "--modes",
        metavar="LIST",
        help="ar, off, spec, chainN, modelN, skipN, ngramN, treeN, online; default: ar,spec, and "
        "chain8 where there is a draft model or a skip mask.",
    ),
]
Rivals = Annotated[
    list[str] | None,
    typer.Option(
        "--rival",
        metavar="PLAN[:MODE]",
        help="Another plan of the same model, decoded plainly or in MODE; can be repeated.",
    ),
]
FlashRate = Annotated[
    int | None,
    typer.Option(
        "--flash-rate",
        metavar="RATE",
        parser=parse_rate,
        help="Rate to read streamed weights at, such as 500MB/s.",
    ),
]
Repeat = Annotated[
    int, typer.Option("--repeat", min=1, metavar="N", help="Rounds over the prompts.")
]
