"""Renders a model's chat template: a stranger's program, hence in a sandbox and within limits."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from profiles.errors import InputError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 1 << 18
MAX_RENDERED_CHARS = 1 << 24
MAX_STEPS = 100_000
"""Numbers that all ``range`` calls of one rendering may hold together."""
_MAX_EXPONENT = 64
_MAX_REASON_CHARS = 300


def render_chat(
    template: str, messages: Sequence[Mapping[str, str]], bos_token: str, eos_token: str
) -> str:
    """The text of ``messages`` (each with role and content), up to where the assistant speaks.

    The template gets what Hugging Face templates are written for. Raises InputError with the
    template's own reason if it fails, if it does what the sandbox forbids or exceeds a limit.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InputError(
            "chat template is too long",
            found=f"{len(template)} characters",
            expected=f"at most {MAX_TEMPLATE_CHARS}",
        )
    functions = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "range": _StepBudget().range,
    }
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "tools": None,
        "documents": None,
    }
    pieces: list[str] = []
    length = 0
    try:
        for piece in _sandbox().from_string(template, globals=functions).generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise ValueError(f"its text exceeds {MAX_RENDERED_CHARS} characters")
    except Exception as error:  # a template can raise whatever an expression can
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
        raise InputError(f"chat template failed: {reason}") from error
    return "".join(pieces)


def _sandbox() -> "ImmutableSandboxedEnvironment":
    # Late, since a session without chat need not load it
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what to train on; here it means nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            _check_size(operator, left, right)
            return super().call_binop(context, operator, left, right)

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = _to_json
    return sandbox


class _StepBudget:
    """What is left of the steps that one rendering may take."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def range(self, *bounds: int) -> range:
        steps = range(*bounds)
        self._left -= len(steps)
        if self._left < 0:
            raise ValueError(f"it counts through more than {MAX_STEPS} numbers")
        return steps


def _check_size(operator: str, left: Any, right: Any) -> None:
    """Stops the two operators that make much out of little."""
    if operator == "**" and abs(right) > _MAX_EXPONENT:
        raise ValueError(f"exponent {right} exceeds {_MAX_EXPONENT}")
    for repeated, count in ((left, right), (right, left)):
        if isinstance(repeated, (str, list, tuple)) and isinstance(count, int):
            size: int = len(repeated) * count
            if size > MAX_RENDERED_CHARS:
                raise ValueError(f"a repetition is longer than {MAX_RENDERED_CHARS}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
