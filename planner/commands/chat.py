"""``plan run`` without a prompt on a terminal: a conversation, one line of text a turn."""

import sys
from contextlib import closing

from planner.inspect.units import rate_label
from planner.terminal import Terminal
from profiles.errors import InputError
from runtime.request import Options
from runtime.session import FinishReason, Session
from runtime.tokens import Message

FORGET = "/new"


def converse(terminal: Terminal, session: Session, system: str | None, options: Options) -> None:
    """Answer line by line until the input ends; answers go to stdout, remarks to stderr.

    An interrupt stops the answer; what was said of it stays in the conversation.
    """
    if session.plan.model.tokenizer.chat_template is None:
        raise InputError(
            "the model has no chat template", hint='complete a text instead: --prompt "..."'
        )
    terminal.remark(f"Ctrl-C stops an answer, {FORGET} forgets the conversation, Ctrl-D ends it.")
    messages: list[Message] = []
    interrupted = False
    while True:
        # All within, since impatient users interrupt more than once
        try:
            if interrupted:
                interrupted = False
                sys.stderr.write("\n")
            line = _ask()
            if line is None:
                return
            if line.strip() == FORGET:
                messages = []
            elif line.strip():
                messages = _turn(terminal, session, messages, line, system, options)
        except KeyboardInterrupt:
            interrupted = True


def _ask() -> str | None:
    """The next line; None at the end of the input."""
    try:
        # Else the prompt would get into the file that the answers go to
        return input("> " if sys.stdout.isatty() else "")
    except EOFError:
        sys.stderr.write("\n")
        return None


def _turn(
    terminal: Terminal,
    session: Session,
    before: list[Message],
    line: str,
    system: str | None,
    options: Options,
) -> list[Message]:
    """The conversation after ``line`` was answered; as before if nothing was said."""
    messages: list[Message] = [*before, {"role": "user", "content": line}]
    try:
        answer = _answer(terminal, session, messages, system, options)
    except InputError as error:
        more = f"; {FORGET} forgets the conversation" if before else ""
        terminal.remark(f"error: {error}{more}")
        return before
    return [*messages, {"role": "assistant", "content": answer}] if answer else before


def _answer(
    terminal: Terminal,
    session: Session,
    messages: list[Message],
    system: str | None,
    options: Options,
) -> str:
    pieces: list[str] = []
    stopped = False
    with closing(session.stream(messages, system=system, **options)) as stream:
        try:
            for piece in stream:
                terminal.clear()
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            stopped = True
    terminal.clear()
    if pieces:
        sys.stdout.write("\n")
        sys.stdout.flush()
    terminal.remark("(stopped)" if stopped else _remark(session))
    return "".join(pieces)


def _remark(session: Session) -> str:
    done = session.finished()
    why = {
        FinishReason.LENGTH: "; reached --max-new-tokens",
        FinishReason.CONTEXT: f"; the plan's context is full, {FORGET} forgets the conversation",
    }.get(done.finish_reason, "")
    return f"({done.stats.new_tokens} tokens, {rate_label(done.stats.tokens_per_s)}{why})"
