"""Renders a model's chat template: a stranger's program, hence in a sandbox and within limits."""

from collections.abc import Mapping, Sequence

from profiles.errors import InputError

MAX_TEMPLATE_CHARS = 1 << 17
MAX_RENDERED_CHARS = 1 << 22
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
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "tools": None,
        "documents": None,
    }
    # Late, since a session without chat need not load it
    from runtime.template_sandbox import sandbox

    pieces: list[str] = []
    length = 0
    try:
        for piece in sandbox().from_string(template).generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise ValueError(f"its text exceeds {MAX_RENDERED_CHARS} characters")
    except Exception as error:  # a template can raise whatever an expression can
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
        raise InputError(f"chat template failed: {reason}") from error
    return "".join(pieces)
