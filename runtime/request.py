"""What one generation is asked for, and whether a plan can serve it."""

from collections.abc import Callable, Sequence
from typing import TypedDict

import msgspec

from profiles.errors import InputError
from runtime.ending import FinishReason, check_stop
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import Cycle, misused_lone
from runtime.sampling import GREEDY, Sampling

Progress = Callable[[int, int], None]
"""Called with prompt tokens read so far, and all of them."""


class Options(TypedDict, total=False):
    """How to generate, as keywords; ``Request`` has the defaults."""

    max_new_tokens: int | None
    """Default 64; None goes on until the context is full."""
    stop: str | Sequence[str]
    """The text ends before the first of these strings."""
    ignore_eos: bool
    """Go on past the end of an answer, as for a measurement."""
    sampling: Sampling
    """Default: greedy."""
    cycle: Cycle | None
    """How to speculate; default: as the plan says. All give the same tokens but ``plan.ALONE``."""
    progress: Progress | None
    """Told while a prompt of several chunks is read."""


class Request(msgspec.Struct, frozen=True):
    """``Options``, complete."""

    max_new_tokens: int | None = 64
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    sampling: Sampling = GREEDY
    cycle: Cycle | None = None
    progress: Progress | None = None

    def limit(self, prompt_tokens: int, context: int) -> tuple[int, FinishReason]:
        """Most tokens of prompt and answer together, and what ends a generation there."""
        if self.max_new_tokens is None or prompt_tokens + self.max_new_tokens > context:
            return context, FinishReason.CONTEXT
        return prompt_tokens + self.max_new_tokens, FinishReason.LENGTH


def request_of(options: Options) -> Request:
    """The request; ``InputError`` for a stop string that is none."""
    stop = check_stop(options.get("stop", ()))
    return msgspec.structs.replace(Request(), **{**options, "stop": stop})


def check_request(plan: ExecutionPlan, prompt: Sequence[int], request: Request) -> None:
    """``InputError`` unless ``plan`` can serve the request."""
    vocab, count = plan.model.vocab, request.max_new_tokens
    unknown = next((token for token in prompt if not 0 <= token < vocab), None)
    if unknown is not None:
        raise InputError("no such token", found=unknown, expected=f"0 to {vocab - 1}")
    if request.cycle is not None:
        _check_cycle(plan, request.cycle)
    if not prompt:
        raise InputError("the prompt has no tokens", hint="give some text, or use --chat")
    if count is not None and count < 1:
        raise InputError("nothing to generate", found=count, expected="1 token or more")
    if len(prompt) >= plan.context:
        raise InputError(
            "the prompt does not fit",
            found=f"{len(prompt)} tokens",
            expected=f"fewer than {plan.context}",
            hint="shorten it or compile with a larger --context",
        )


def _check_cycle(plan: ExecutionPlan, cycle: Cycle) -> None:
    if cycle.mask >= len(plan.masks):
        raise InputError(
            "the plan has no such skip mask",
            found=cycle.mask,
            expected=f"0 to {len(plan.masks) - 1}",
        )
    if why := misused_lone(cycle, plan.numerics):
        raise InputError(why, found="a lone cycle", hint="use one that is not lone, such as OFF")
