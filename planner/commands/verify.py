"""``plan verify``: says whether a plan's output is that of plain decoding."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from planner.inspect.text import field
from planner.inspect.units import counted, three_digits
from planner.prompt_file import Prompt, bundled_prompts, load_prompts
from planner.terminal import Terminal
from planner.verify import Divergence, Verification, verify
from profiles.errors import InputError, VerificationError
from runtime.sampling import GREEDY, Sampling
from runtime.session import load

BUNDLED = "verify"
_SHOWN = 10
_LABEL = 11


def choose_prompts(path: Path | None, limit: int | None) -> list[Prompt]:
    """The first ``limit`` prompts of a file, or of the bundled ones."""
    prompts = bundled_prompts(BUNDLED) if path is None else load_prompts(path)
    if limit is not None and limit < 1:
        raise InputError("no prompts are left", where="--limit", found=limit, expected="1 or more")
    return prompts[:limit]


def verify_plan(
    terminal: Terminal,
    path: Path,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    sampled: Sampling | None,
    emulate: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compare and say so; ``VerificationError`` on a difference.

    ``sampled`` are the settings of the sampled comparison; None leaves it out.
    """
    samplings = [GREEDY] if sampled is None else [GREEDY, sampled]
    with load(path, emulate=emulate, threads=threads) as session:
        result = verify(session, prompts, samplings, max_new_tokens, terminal.report)
    if as_json:
        terminal.result_json({"token_exact": result.exact, **msgspec.to_builtins(result)})
    else:
        terminal.result(verification_text(result))
    if not result.exact:
        count = counted(len(result.divergences), "difference")
        raise VerificationError(
            f"the output differs from plain decoding: {count}",
            where=path,
            hint="compile again; if it stays, this is a bug in Fulcrum",
        )


def verification_text(result: Verification) -> str:
    """The verdict for people, with the first differences."""
    verdict = "yes" if result.exact else "no"
    scope = [
        counted(result.prompts, "prompt"),
        counted(result.tokens, "token"),
        f"cycles: {'; '.join(result.cycles)}",
        " and ".join(result.samplings),
    ]
    lines = [f"token-exact: {verdict} ({', '.join(scope)})"]
    lines += field("reference", result.reference, label_width=_LABEL)
    lines += map(_divergence_line, result.divergences[:_SHOWN])
    if (hidden := len(result.divergences) - _SHOWN) > 0:
        lines.append(f"  and {hidden} more")
    return "\n".join(lines)


def _divergence_line(found: Divergence) -> str:
    gap = "one ended" if found.logit_gap is None else f"logit gap {three_digits(found.logit_gap)}"
    return (
        f"  prompt {found.prompt_id}, {found.sampling}, {found.cycle}: new token {found.position} "
        f"is {_token(found.found_id, found.found_text)}, plain decoding has "
        f"{_token(found.expected_id, found.expected_text)} ({gap})"
    )


def _token(token: int | None, text: str) -> str:
    return "nothing" if token is None else f"{token} {text!r}"


def sampling_for(settings: Sampling, wanted: bool) -> Sampling | None:
    """The settings of the sampled round, if there is to be one; they need a temperature."""
    if wanted and settings.temperature == 0:
        raise InputError(
            "sampling needs a temperature above 0", where="--temperature", hint="or --no-sampled"
        )
    return settings if wanted else None
