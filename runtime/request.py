"""What one generation is asked for, and whether a plan can serve it."""

from collections.abc import Callable, Sequence
from numbers import Integral
from types import UnionType
from typing import TypedDict

import msgspec

from profiles.errors import InputError
from runtime.ending import FinishReason, check_stop
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import Cycle, DraftShape, DraftSource, misused_lone
from runtime.sampling import GREEDY, Sampling

_KINDS = {
    "sampling": "a Sampling, or None",
    "max_new_tokens": "a whole number, or None",
    "cycle": "a Cycle such as runtime.plan_cycles.OFF, or None",
}

Progress = Callable[[int, int], None]
"""Called with prompt tokens read so far, and all of them."""


class Options(TypedDict, total=False):
    """How to generate, as keywords; ``Request`` has the defaults."""

    max_new_tokens: int | None
    """Default 64; None goes on until the context is full."""
    stop: str | Sequence[str] | None
    """The text ends before the first of these strings."""
    ignore_eos: bool
    """Go on past the end of an answer, as for a measurement."""
    sampling: Sampling | None
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
    """The request; ``InputError`` for a value of a wrong kind."""
    stop, sampling = options.get("stop"), options.get("sampling")
    given = {
        "stop": check_stop(() if stop is None else stop),
        "sampling": GREEDY if sampling is None else sampling,
    }
    request = msgspec.structs.replace(Request(), **{**options, **given})
    _check_kind("sampling", request.sampling, Sampling)
    _check_kind("max_new_tokens", request.max_new_tokens, Integral | None)
    _check_kind("cycle", request.cycle, Cycle | None)
    return request


def _check_kind(name: str, value: object, kind: type | UnionType) -> None:
    # A Boolean is an int to Python, and True tokens would be one token
    if isinstance(value, bool) or not isinstance(value, kind):
        raise InputError(f"not a value of {name}", found=repr(value), expected=_KINDS[name])


def check_request(plan: ExecutionPlan, prompt: Sequence[int], request: Request) -> None:
    """``InputError`` unless ``plan`` can serve the request."""
    vocab, count = plan.model.vocab, request.max_new_tokens
    unknown = next((token for token in prompt if not 0 <= token < vocab), None)
    if unknown is not None:
        raise InputError("no such token", found=unknown, expected=f"0 to {vocab - 1}")
    if request.cycle is not None:
        check_cycle(plan, request.cycle)
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


def check_cycle(plan: ExecutionPlan, cycle: Cycle) -> None:
    """``InputError`` unless the plan holds what the cycle drafts with."""
    if cycle.draft is DraftSource.MODEL and plan.draft is None:
        raise InputError("the plan has no draft model", hint="compile with --draft MODEL")
    if cycle.mask >= len(plan.masks):
        raise InputError(
            "the plan has no such skip mask",
            found=cycle.mask,
            expected=f"0 to {len(plan.masks) - 1}",
        )
    held = {DraftShape.STATIC: len(plan.trees), DraftShape.ONLINE: len(plan.growths)}
    if cycle.tree >= held.get(cycle.shape, cycle.tree + 1):
        raise InputError(
            f"the plan has no such {cycle.shape} tree",
            found=cycle.tree,
            expected=f"one of the {held[cycle.shape]} that it carries, from 0",
        )
    if why := misused_lone(cycle, plan.numerics):
        raise InputError(why, found="a lone cycle", hint="use one that is not lone, such as OFF")
