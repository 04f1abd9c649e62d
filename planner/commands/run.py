"""``plan run``: generates text with a plan, then says what it did and how long it took."""

import os
import sys
from pathlib import Path

import msgspec

from planner.inspect.units import rate_label, three_digits, time_label
from planner.modes import parse_mode
from planner.terminal import Terminal
from profiles.errors import InputError
from runtime.sampling import Sampling
from runtime.session import FinishReason, Generation, Session, load


class Wish(msgspec.Struct, frozen=True):
    """What the user asks a plan for."""

    prompt: str
    """Text, ``-`` for stdin or ``@file``."""
    chat: bool | None
    """None uses the chat template if the model has one."""
    system: str | None
    max_new_tokens: int
    sampling: Sampling
    draft: str
    """A mode: ``plan``, ``off``, ``chainN`` or ``ngramN``."""


def run_plan(
    terminal: Terminal, path: Path, wish: Wish, *, emulate: bool, threads: int | None, as_json: bool
) -> None:
    """Stream the answer to stdout and the statistics to stderr, or all as JSON to stdout."""
    prompt = read_prompt(wish.prompt)
    terminal.report("loading the plan", 0, 1)
    with load(path, emulate=emulate, threads=threads) as session:
        terminal.clear()
        generation = generate(session, prompt, wish, stream=not as_json)
        if as_json:
            terminal.result_json(generation_data(session, generation, emulate))
        else:
            terminal.remark(statistics(session, generation, emulate))


def read_prompt(prompt: str) -> str:
    """The prompt itself, or what stdin (``-``) or a file (``@file``) holds.

    Raises:
        InputError: The file cannot be read or is not UTF-8.
    """
    try:
        if prompt == "-":
            text = sys.stdin.read().removesuffix("\n")
        elif prompt.startswith("@"):
            file = Path(os.path.expanduser(prompt[1:]))
            text = file.read_text(encoding="utf-8").removesuffix("\n")
        else:
            text = prompt
        # In a locale without Unicode, what is no ASCII comes as escaped bytes
        return os.fsencode(text).decode() if _is_escaped(text) else text
    except OSError as error:
        hint = "use - to read stdin" if prompt == "@" else None
        raise InputError(
            "cannot read the prompt", where=prompt[1:], found=error.strerror, hint=hint
        ) from error
    except UnicodeDecodeError as error:
        raise InputError("the prompt is not UTF-8 text", where=prompt.lstrip("@")) from error


def _is_escaped(text: str) -> bool:
    return any("\udc80" <= character <= "\udcff" for character in text)


def has_chat(session: Session, asked: bool | None) -> bool:
    """Whether to use the chat template."""
    return session.plan.model.tokenizer.chat_template is not None if asked is None else asked


def generate(session: Session, prompt: str, wish: Wish, *, stream: bool) -> Generation:
    """The finished generation; ``stream`` writes its text to stdout as it comes."""
    pieces = session.stream(
        prompt,
        max_new_tokens=wish.max_new_tokens,
        chat=has_chat(session, wish.chat),
        system=wish.system,
        sampling=wish.sampling,
        cycle=parse_mode(wish.draft, session.plan).cycle,
    )
    begun = False
    try:
        for piece in pieces:
            if stream:
                begun = True
                sys.stdout.write(piece)
                sys.stdout.flush()
    finally:
        if begun:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return session.finished()


_REASONS = {
    FinishReason.EOS: "the model ended its answer",
    FinishReason.LENGTH: "reached --max-new-tokens",
    FinishReason.CONTEXT: "the plan's context is full",
}


def statistics(session: Session, generation: Generation, emulate: bool) -> str:
    """What was done and how long it took, for people."""
    stats = generation.stats
    lines = [
        f"{stats.new_tokens} tokens in {time_label(stats.decode_us)}: "
        f"{rate_label(stats.tokens_per_s)} on this machine; "
        f"prompt of {stats.prompt_tokens} tokens read in {time_label(stats.prefill_us)}",
        f"{stats.cycles} cycles, {stats.speculating_cycles} with a draft: per cycle "
        f"{three_digits(stats.mean_accepted)} accepted of {three_digits(stats.mean_drafted)} "
        "drafted tokens",
        f"finished: {_REASONS[generation.finish_reason]}",
    ]
    if emulate:
        lines.append(
            f"{session.plan.device.name}, predicted, not measured: "
            f"{time_label(stats.simulated_us)}, {rate_label(stats.simulated_tokens_per_s)}"
        )
    return "\n".join(lines)


def generation_data(session: Session, generation: Generation, emulate: bool) -> dict[str, object]:
    """A generation as ``plan run --json`` shows it."""
    stats = generation.stats
    return {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason.value,
        "device": session.plan.device.name,
        "emulated": emulate,
        **msgspec.to_builtins(stats),
        "tokens_per_s": stats.tokens_per_s,
        "mean_accepted": stats.mean_accepted,
        "mean_drafted": stats.mean_drafted,
        "predicted_tokens_per_s": stats.simulated_tokens_per_s,
    }
