"""``plan run``: generates text with a plan, then says what it did and how long it took."""

import os
import sys
from pathlib import Path

import msgspec

from planner.commands.chat import converse
from planner.inspect.units import bytes_label, rate_label, three_digits, time_label
from planner.modes import parse_mode
from planner.terminal import Terminal
from profiles.errors import InputError
from runtime.ending import check_stop
from runtime.request import Options
from runtime.sampling import Sampling
from runtime.session import FinishReason, Generation, Session, load

NEW_TOKENS = 128


class Wish(msgspec.Struct, frozen=True):
    """What the user asks a plan for."""

    prompt: str | None
    """Text, ``-`` for stdin or ``@file``; None is a conversation on a terminal, else stdin."""
    chat: bool | None
    """None uses the chat template if the model has one."""
    system: str | None
    max_new_tokens: int | None
    """None is 128, or as many as the context holds in a conversation."""
    sampling: Sampling
    draft: str
    """A mode of ``planner.modes``; ``plan`` is as planned."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


def run_plan(
    terminal: Terminal, path: Path, wish: Wish, *, emulate: bool, threads: int | None, as_json: bool
) -> None:
    """Stream the answer to stdout and the statistics to stderr, or all as JSON to stdout."""
    check_stop(wish.stop)
    conversation = wish.prompt is None and sys.stdin.isatty()
    if conversation and (as_json or wish.chat is False):
        raise InputError("there is no prompt", hint="give --prompt TEXT, or - to read stdin")
    prompt = "" if conversation else read_prompt("-" if wish.prompt is None else wish.prompt)
    terminal.report("loading the plan", 0, 1)
    with load(path, emulate=emulate, threads=threads) as session:
        terminal.clear()
        if conversation:
            options = options_of(wish, session, terminal, max_new_tokens=None)
            converse(terminal, session, wish.system, options)
            return
        generation = generate(session, prompt, wish, terminal, stream=not as_json)
        if as_json:
            terminal.result_json(generation_data(session, generation, emulate))
        else:
            terminal.remark(statistics(session, generation, emulate))


def options_of(
    wish: Wish, session: Session, terminal: Terminal, max_new_tokens: int | None
) -> Options:
    """The wish as the session takes it; ``max_new_tokens`` if the user said nothing of it."""
    chunk = session.plan.prefill.chunk

    def report(done: int, total: int) -> None:
        # Most prompts are read before a drawing of it could be
        if total > chunk:
            terminal.report("reading the prompt", done, total)

    return {
        "max_new_tokens": wish.max_new_tokens or max_new_tokens,
        "stop": wish.stop,
        "ignore_eos": wish.ignore_eos,
        "sampling": wish.sampling,
        "cycle": parse_mode(wish.draft, session.plan).cycle,
        "progress": report,
    }


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


def generate(
    session: Session, prompt: str, wish: Wish, terminal: Terminal, *, stream: bool
) -> Generation:
    """The finished generation; ``stream`` writes its text to stdout as it comes."""
    options = options_of(wish, session, terminal, max_new_tokens=NEW_TOKENS)
    pieces = session.stream(
        prompt, chat=has_chat(session, wish.chat), system=wish.system, **options
    )
    begun = False
    try:
        for piece in pieces:
            if stream:
                terminal.clear()
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
    FinishReason.STOP: "a --stop text came",
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
    if stats.flash_bytes:
        a_token = bytes_label(round(stats.flash_bytes / max(1, stats.new_tokens)))
        lines.append(
            f"from flash: {a_token} a token; passes waited {time_label(stats.stalled_us)} for it"
        )
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
