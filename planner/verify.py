"""Token-exactness: whatever drafts, a plan's output is that of its own plain decoding.

Each prompt is decoded plainly and then with every cycle that the plan could use; the token ids
must be the same, greedy and sampled (the noise of a position does not depend on who drafts).
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from planner.inspect.figures import cycle_label
from planner.modes import CHAINS, planned_cycles, shaped, sources
from planner.prompt_file import Prompt
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import OFF, Cycle, DraftShape, DraftSource, runs_alone
from runtime.sampling import Sampling
from runtime.session import Session

if TYPE_CHECKING:
    from planner.calibrate import Report

DRAFT_LENGTH = 4
"""Drafted tokens of the cycles that the plan does not choose itself."""
PLANNED = "as planned"
AGAIN = "off again"
"""Plain decoding of a streamed plan a second time, the ring being filled otherwise."""


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
    reference: str
    """The plain decoding that all is compared with."""
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
    """Cycles by name: the plan's own, and those that it could use of what it carries.

    For each source a chain, and the draft model in every tree and envelope; other sources in the
    largest tree, and under a skip mask the first envelope (a look-up has no probabilities to grow
    by). None follows the buckets; it is there when cycles change with the context.
    """
    planned = [cycle for cycle in planned_cycles(plan) if cycle.draft is not DraftSource.OFF]
    cycles: list[Cycle | None] = [*planned]
    if len(planned_cycles(plan)) > 1:
        cycles.append(None)
    cycles += [c for c in _possible(plan, planned) if c not in planned]
    if plan.residency is not None:
        cycles.append(OFF)
    found: dict[str, Cycle | None] = {}
    for cycle in cycles:
        name = _name(cycle, plan)
        # Two trees may have as many nodes, or a chain another order of the head
        again = sum(known.rpartition(" #")[0] == name or known == name for known in found)
        found[f"{name} #{again + 1}" if again else name] = cycle
    return found


def _name(cycle: Cycle | None, plan: ExecutionPlan) -> str:
    if cycle is None:
        return PLANNED
    return AGAIN if cycle == OFF else cycle_label(cycle, plan)


def _possible(plan: ExecutionPlan, planned: Sequence[Cycle]) -> Iterator[Cycle]:
    """Each source's chain, unless the plan has one of it, then its trees."""
    trees = range(len(plan.trees))
    largest = sorted(trees, key=lambda index: len(plan.trees[index].parents))[-1:]
    for source in sources(plan):
        chains = (c for c in planned if c.draft is source and c.shape is DraftShape.CHAIN)
        if next(chains, None) is None:
            yield CHAINS[source](plan, DRAFT_LENGTH)
        first = source is DraftSource.MODEL
        for index in trees if first else largest:
            yield shaped(plan, DraftShape.STATIC, index, source)
        if source is not DraftSource.NGRAM:
            for index in range(len(plan.growths) if first else min(1, len(plan.growths))):
                yield shaped(plan, DraftShape.ONLINE, index, source)


def reference_label(plan: ExecutionPlan) -> str:
    """Which plain decoding the others are compared with, and whether the plan itself uses it."""
    if not runs_alone(plan.numerics):
        return "off, the plan's only plain decoding"
    label = "off, plain decoding in the passes that verify drafts"
    if plan.buckets[0].cycle.lone:
        label += "; the plan itself decodes alone (ar), in other last bits, which is not compared"
    return label


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
        reference=reference_label(session.plan),
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
