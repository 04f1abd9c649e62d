"""Token-exactness: whatever drafts, a plan's output is that of its own plain decoding.

Each prompt is decoded plainly and then with every cycle that the plan could use; the token ids
must be the same, greedy and sampled (the noise of a position does not depend on who drafts).
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from planner.inspect.figures import cycle_label
from planner.modes import best_mask, chain, ngram, planned_cycles
from planner.prompt_file import Prompt
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import OFF, Cycle, DraftSource
from runtime.sampling import Sampling
from runtime.session import Session

if TYPE_CHECKING:
    from planner.calibrate import Report

DRAFT_LENGTH = 4
"""Drafted tokens of the cycles that the plan does not choose itself."""
PLANNED = "as planned"


class Divergence(msgspec.Struct, frozen=True):
    """Where a cycle's output first differs from plain decoding."""

    prompt_id: str
    cycle: str
    sampling: str
    """``greedy`` or ``sampled``."""
    position: int
    """Index among the new tokens, from 0."""
    expected_id: int | None
    """Token of plain decoding; None when it had ended."""
    expected_text: str
    found_id: int | None
    found_text: str
    logit_gap: float | None
    """Logit of the expected token less that of the other one; None when one had ended."""


class Verification(msgspec.Struct, frozen=True):
    """What was compared and where it differed."""

    prompts: int
    tokens: int
    """Tokens of plain decoding; each was compared once per cycle."""
    cycles: tuple[str, ...]
    samplings: tuple[str, ...]
    divergences: tuple[Divergence, ...]

    @property
    def exact(self) -> bool:
        """No difference anywhere."""
        return not self.divergences


def cycles_to_verify(plan: ExecutionPlan) -> dict[str, Cycle | None]:
    """Cycles by name: the plan's own, and a chain and a look-up where it has none of them.

    None follows the buckets; it is there when cycles change with the context.
    """
    planned = [cycle for cycle in planned_cycles(plan) if cycle.draft is not DraftSource.OFF]
    found: dict[str, Cycle | None] = {cycle_label(cycle): cycle for cycle in planned}
    if len(planned_cycles(plan)) > 1:
        found[PLANNED] = None
    sources = {cycle.draft for cycle in planned}
    extra: list[Cycle] = []
    if DraftSource.SKIP not in sources and best_mask(plan) is not None:
        extra.append(chain(plan, DRAFT_LENGTH))
    if DraftSource.NGRAM not in sources:
        extra.append(ngram(plan, DRAFT_LENGTH))
    return found | {cycle_label(cycle): cycle for cycle in extra}


def verify(
    session: Session,
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    max_new_tokens: int,
    report: "Report",
) -> Verification:
    """Decode every prompt plainly and with each cycle, and compare.

    Of a prompt, cycle and sampling only the first difference is kept. Prompts go through the chat
    template if the model has one. InputError for a prompt that does not fit the plan's context.
    """
    cycles = cycles_to_verify(session.plan)
    chat = session.plan.model.tokenizer.chat_template is not None
    divergences: list[Divergence] = []
    tokens = done = 0
    total = len(prompts) * len(samplings) * (1 + len(cycles))
    for prompt in prompts:
        ids = session.tokens.encode_prompt(prompt.prompt, chat=chat)
        for sampling in samplings:
            reference = decode(session, ids, max_new_tokens, sampling, OFF)
            tokens += len(reference)
            for name, cycle in cycles.items():
                done += 1
                report("comparing with plain decoding", done, total)
                found = decode(session, ids, max_new_tokens, sampling, cycle)
                if found != reference:
                    where = prompt.id, name, sampling_name(sampling)
                    divergences.append(describe(session, where, ids, reference, found))
            done += 1
            report("comparing with plain decoding", done, total)
    return Verification(
        prompts=len(prompts),
        tokens=tokens,
        cycles=tuple(cycles),
        samplings=tuple(dict.fromkeys(map(sampling_name, samplings))),
        divergences=tuple(divergences),
    )


def decode(
    session: Session, ids: Sequence[int], count: int, sampling: Sampling, cycle: Cycle | None
) -> list[int]:
    """Up to ``count`` new token ids."""
    stream: Iterator[list[int]] = session.stream_ids(
        ids, max_new_tokens=count, sampling=sampling, cycle=cycle
    )
    return [token for step in stream for token in step]


def sampling_name(sampling: Sampling) -> str:
    """``greedy`` or ``sampled``."""
    return "sampled" if sampling.temperature else "greedy"


def describe(
    session: Session,
    where: tuple[str, str, str],
    prompt: Sequence[int],
    reference: Sequence[int],
    found: Sequence[int],
) -> Divergence:
    """The first difference; ``where`` is (prompt id, cycle, sampling)."""
    both = zip(reference, found, strict=False)
    position = next((i for i, (a, b) in enumerate(both) if a != b), min(len(reference), len(found)))
    expected = reference[position] if position < len(reference) else None
    other = found[position] if position < len(found) else None
    gap = None
    if expected is not None and other is not None:
        logits = session.logits_at([*prompt, *reference[:position]])
        gap = float(logits[expected]) - float(logits[other])
    return Divergence(
        *where,
        position=position,
        expected_id=expected,
        expected_text=token_text(session, expected),
        found_id=other,
        found_text=token_text(session, other),
        logit_gap=gap,
    )


def token_text(session: Session, token: int | None) -> str:
    """What a token reads as; empty for none and for special ones."""
    return "" if token is None else session.tokens.decode([token])
