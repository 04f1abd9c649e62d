"""Paired measurement of ways to decode: every prompt in every way, side by side.

A machine's speed drifts over minutes, so ways take turns prompt by prompt, and every other round
in reverse order; a speedup is the ratio of two neighbours in time.
"""

import resource
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from planner.modes import Mode
from planner.prompt_file import Prompt
from runtime import memory
from runtime.session import Session
from runtime.stats import Stats

if TYPE_CHECKING:
    from planner.calibrate import Report

WARM_TOKENS = 8


class Sample(msgspec.Struct, frozen=True):
    """One prompt decoded once in one mode."""

    mode: str
    """Or the name of a rival."""
    prompt_id: str
    category: str
    round: int
    token_ids: tuple[int, ...]
    stats: Stats
    peak_rss_bytes: int = 0
    """Most memory that the process held until then, loading included."""
    decode_peak_bytes: int | None = None
    """Most memory that it held during this; None where the system does not say."""


class Contender(msgspec.Struct, frozen=True):
    """A plan that is loaded, and a way to decode it."""

    session: Session
    mode: Mode
    name: str
    """What its samples are called: the mode's name, or more for a rival."""


def contenders(session: Session, modes: Sequence[Mode]) -> list[Contender]:
    """The modes of one plan."""
    return [Contender(session, mode, mode.name) for mode in modes]


def measure(
    ways: Sequence[Contender],
    prompts: Sequence[Prompt],
    *,
    rounds: int,
    max_new_tokens: int,
    report: "Report",
) -> list[Sample]:
    """Decode every prompt in every way, ``rounds`` times, greedily.

    Each way is warmed up first. Prompts go through the first plan's chat template if its model has
    one; all plans get the same token ids.
    """
    first = ways[0].session
    chat = first.plan.model.tokenizer.chat_template is not None
    encoded = [first.tokens.encode_prompt(p.prompt, chat=chat) for p in prompts]
    for way in ways:
        _decode(way, encoded[0], min(WARM_TOKENS, max_new_tokens))
    samples: list[Sample] = []
    peak_bytes = peak_rss_bytes()
    total = rounds * len(prompts) * len(ways)
    for turn in range(rounds):
        for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            for way in ways if (turn + index) % 2 == 0 else reversed(ways):
                report("measuring", len(samples), total)
                resets = memory.reset_peak()
                tokens, stats = _decode(way, ids, max_new_tokens)
                own_peak = memory.peak_rss_bytes() if resets else None
                peak_bytes = max(peak_bytes, own_peak or peak_rss_bytes())
                where = way.name, prompt.id, prompt.category, turn
                samples.append(Sample(*where, tokens, stats, peak_bytes, own_peak))
    report("measuring", total, total)
    return samples


def _decode(way: Contender, ids: Sequence[int], count: int) -> tuple[tuple[int, ...], Stats]:
    for _ in way.session.stream_ids(ids, max_new_tokens=count, cycle=way.mode.cycle):
        pass
    done = way.session.finished()
    return done.token_ids, done.stats


def peak_rss_bytes() -> int:
    """Most memory that this process held since it began, or since it was last reset."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, except on macOS
    return peak if sys.platform == "darwin" else 1024 * peak
