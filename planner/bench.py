"""Paired measurement of ways to decode: every prompt in every mode, side by side, then medians.

A machine's speed drifts over minutes, so modes take turns prompt by prompt, and every other round
in reverse order; a speedup is the ratio of two neighbours in time.
"""

import resource
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from planner.modes import AR, SPEC, Mode, parse_mode, reference, speculates
from planner.prompt_file import Prompt
from runtime.session import Session
from runtime.stats import Stats, per_second

if TYPE_CHECKING:
    from planner.calibrate import Report

WARM_TOKENS = 8


class Sample(msgspec.Struct, frozen=True):
    """One prompt decoded once in one mode."""

    mode: str
    prompt_id: str
    category: str
    round: int
    token_ids: tuple[int, ...]
    stats: Stats


class ModeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a mode did over some prompts. Rates are medians over prompts of medians over rounds."""

    tokens_per_s: float
    total_tokens_per_s: float
    """All tokens over the time of all: long answers weigh more."""
    total_speedup_vs_ar: float
    """The same ratio of total times: what the plan's forecast is to be compared with."""
    ar_tokens_per_s: float
    speedup_vs_ar: float
    """Median over prompts of the ratio to plain decoding of the same prompt and round."""
    speedup_quartiles: tuple[float, float]
    """Over prompts."""
    mean_accepted: float
    mean_drafted: float
    """Per cycle."""
    cycles: int
    """In one round."""
    new_tokens: int
    """In one round."""
    predicted_tokens_per_s: float
    """On the plan's device, by its tables, for the passes that ran."""
    predicted_speedup_vs_ar: float
    measured_over_predicted: float | None
    """None when the plan is of another device, or nothing is predicted."""
    flash_bytes_per_token: float
    peak_rss_bytes: int
    """Of the process so far, all modes together."""
    token_exact: bool
    """The output was that of plain decoding in the same passes, for every prompt and round."""


def measure(
    session: Session,
    prompts: Sequence[Prompt],
    modes: Sequence[Mode],
    *,
    rounds: int,
    max_new_tokens: int,
    report: "Report",
) -> list[Sample]:
    """Decode every prompt in every mode, ``rounds`` times, greedily.

    Each mode is warmed up first. Prompts go through the chat template if the model has one.
    """
    chat = session.plan.model.tokenizer.chat_template is not None
    encoded = [session.tokens.encode_prompt(p.prompt, chat=chat) for p in prompts]
    for mode in modes:
        _decode(session, encoded[0], mode, min(WARM_TOKENS, max_new_tokens))
    samples: list[Sample] = []
    total = rounds * len(prompts) * len(modes)
    for turn in range(rounds):
        for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            for mode in modes if (turn + index) % 2 == 0 else reversed(modes):
                report("measuring", len(samples), total)
                tokens, stats = _decode(session, ids, mode, max_new_tokens)
                where = mode.name, prompt.id, prompt.category, turn
                samples.append(Sample(*where, tokens, stats))
    report("measuring", total, total)
    return samples


def _decode(
    session: Session, ids: Sequence[int], mode: Mode, count: int
) -> tuple[tuple[int, ...], Stats]:
    for _ in session.stream_ids(ids, max_new_tokens=count, cycle=mode.cycle):
        pass
    done = session.finished()
    return done.token_ids, done.stats


def figures(
    samples: Sequence[Sample], mode: str, comparable: bool, exact_as: str = AR
) -> ModeFigures:
    """What ``mode`` did in ``samples``, which hold plain decoding of the same prompts too.

    ``comparable`` says whether this machine is the plan's device, ``exact_as`` the mode whose
    output this one has to equal.
    """
    own = [s for s in samples if s.mode == mode]
    plain = {(s.prompt_id, s.round): s for s in samples if s.mode == AR}
    pairs = [(sample, plain[sample.prompt_id, sample.round]) for sample in own]
    texts = {(s.prompt_id, s.round): s.token_ids for s in samples if s.mode == exact_as}
    rounds = 1 + max(sample.round for sample in own)
    ratios = _by_prompt((s.prompt_id, _ratio(_speed(s), _speed(p))) for s, p in pairs)
    rate = statistics.median(_by_prompt((s.prompt_id, _speed(s)) for s in own))
    predicted = statistics.median(_by_prompt((s.prompt_id, _predicted(s)) for s in own))
    cycles = sum(s.stats.cycles for s in own)
    return ModeFigures(
        tokens_per_s=rate,
        total_tokens_per_s=per_second(
            sum(s.stats.new_tokens for s in own), sum(s.stats.decode_us for s in own)
        ),
        total_speedup_vs_ar=_ratio(
            sum(p.stats.decode_us for _, p in pairs), sum(s.stats.decode_us for s in own)
        ),
        ar_tokens_per_s=statistics.median(_by_prompt((s.prompt_id, _speed(p)) for s, p in pairs)),
        speedup_vs_ar=statistics.median(ratios),
        speedup_quartiles=quartiles(ratios),
        mean_accepted=_ratio(sum(s.stats.accepted for s in own), cycles),
        mean_drafted=_ratio(sum(s.stats.drafted for s in own), cycles),
        cycles=cycles // rounds,
        new_tokens=sum(s.stats.new_tokens for s in own) // rounds,
        predicted_tokens_per_s=predicted,
        predicted_speedup_vs_ar=statistics.median(
            _by_prompt((s.prompt_id, _ratio(_predicted(s), _predicted(p))) for s, p in pairs)
        ),
        measured_over_predicted=rate / predicted if comparable and predicted else None,
        # Every plan keeps its weights in memory: streaming is not part of this format version
        flash_bytes_per_token=0.0,
        peak_rss_bytes=peak_rss_bytes(),
        token_exact=all(s.token_ids == texts[s.prompt_id, s.round] for s in own),
    )


def bench_data(samples: Sequence[Sample], session: Session, comparable: bool) -> dict[str, object]:
    """Everything that ``plan bench --json`` shows; keys in ``docs/commands.md``."""
    names = list(dict.fromkeys(sample.mode for sample in samples))
    categories = sorted({sample.category for sample in samples})
    modes: dict[str, dict[str, object]] = {}
    for name in names:
        how = comparable, reference(parse_mode(name, session.plan), session.plan)
        parts = {
            category: msgspec.to_builtins(
                figures([s for s in samples if s.category == category], name, *how)
            )
            for category in categories
        }
        whole = msgspec.to_builtins(figures(samples, name, *how))
        modes[name] = {**whole, "by_category": parts}
    headline = SPEC if SPEC in modes else names[-1]
    plan = session.plan
    return {
        "model": plan.model.name,
        "device": plan.device.name,
        "target_format": str(plan.part_formats),
        "device_is_here": comparable,
        "plan_speculates": speculates(plan),
        "prompts": len({sample.prompt_id for sample in samples}),
        "rounds": 1 + max(sample.round for sample in samples),
        "headline_mode": headline,
        **{key: value for key, value in modes[headline].items() if key != "by_category"},
        "modes": modes,
    }


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile; of a single value, itself twice."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def peak_rss_bytes() -> int:
    """Most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, except on macOS
    return peak if sys.platform == "darwin" else 1024 * peak


def _by_prompt(values: Iterable[tuple[str, float]]) -> list[float]:
    """The median over the rounds of each prompt."""
    grouped: dict[str, list[float]] = {}
    for prompt, value in values:
        grouped.setdefault(prompt, []).append(value)
    return [statistics.median(group) for group in grouped.values()]


def _speed(sample: Sample) -> float:
    return sample.stats.tokens_per_s


def _predicted(sample: Sample) -> float:
    return sample.stats.simulated_tokens_per_s


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0
