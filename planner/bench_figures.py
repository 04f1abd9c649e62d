"""What measurements of ways to decode amount to: rates, paired ratios, what a cycle spends."""

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from planner.bench import Sample
from planner.modes import AR, SPEC, parse_mode, reference, speculates
from runtime.plan import Bucket, ExecutionPlan
from runtime.plan_cycles import HeadOrder
from runtime.pricing import PriceList
from runtime.stats import Stats, per_second


class Speedup(msgspec.Struct, frozen=True):
    """How much faster a mode was than a rival, prompt and round being the same."""

    speedup: float
    """Median over prompts of medians over rounds."""
    quartiles: tuple[float, float]
    """Over prompts."""
    total_speedup: float
    """The rival's time for a token, over all tokens, by the mode's."""


class CycleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a cycle spends, on average over all cycles; times measured on this machine."""

    draft_us: float
    draft_passes: float
    verify_us: float
    exposed_io_us: float
    """From the begin of the verify pass to the arrival of the last byte that it needs."""
    expected_exposed_io_us: float
    """(streamed bytes - bytes read ahead) / measured bandwidth: what ``exposed_io_us`` is to be."""
    stalled_us: float
    """Of the verify pass, waiting for weights."""
    flash_bytes: float
    ahead_bytes: float
    """Of ``flash_bytes``, in memory when the pass began."""
    nodes_by_depth: tuple[float, ...]
    """Drafted at depth 1, 2, ..."""


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
    speedup_vs_rivals: dict[str, Speedup]
    mean_accepted: float
    mean_drafted: float
    """Tokens, or nodes of a tree; per cycle."""
    acceptance_by_depth: tuple[float, ...]
    """Share of cycles that accepted at depth 1, 2, ..., of those that could have."""
    cycles: int
    """In one round."""
    new_tokens: int
    """In one round."""
    per_cycle: CycleFigures
    predicted_tokens_per_s: float
    """On the plan's device, by its tables, for the passes that ran."""
    predicted_speedup_vs_ar: float
    measured_over_predicted: float | None
    """None when the plan is of another device, or nothing is predicted."""
    flash_bytes_per_token: float
    flash_bytes_per_s: float
    """While the reader read; 0 where nothing streams."""
    exposed_over_expected: float | None
    """None where nothing was to be exposed."""
    peak_rss_bytes: int
    """Of the process, all modes and rivals together, loading included."""
    decode_peak_bytes: int | None
    """Of the process while this mode decoded; None where the system does not say."""
    token_exact: bool
    """The output was that of plain decoding in the same passes, for every prompt and round."""


class Pairs:
    """Samples of a mode, each with its neighbour in another."""

    def __init__(self, samples: Sequence[Sample], mode: str, other: str) -> None:
        others = {(s.prompt_id, s.round): s for s in samples if s.mode == other}
        own = (s for s in samples if s.mode == mode)
        self._pairs = [(s, others[s.prompt_id, s.round]) for s in own]

    def ratios(self, rate: Callable[[Sample], float]) -> list[float]:
        """How much faster the mode was, by prompt: the median over rounds."""
        return by_prompt((s.prompt_id, _ratio(rate(s), rate(o))) for s, o in self._pairs)

    def others(self, rate: Callable[[Sample], float]) -> list[float]:
        """The other's rate by prompt."""
        return by_prompt((s.prompt_id, rate(o)) for s, o in self._pairs)

    def total(self) -> float:
        """How much faster the mode was over all tokens."""
        mine, theirs = zip(*self._pairs, strict=True)
        return _ratio(total_rate(mine), total_rate(theirs))

    def speedup(self) -> Speedup:
        """All of it, by measured rates."""
        ratios = self.ratios(speed)
        return Speedup(statistics.median(ratios), quartiles(ratios), self.total())


def figures(
    samples: Sequence[Sample],
    mode: str,
    comparable: bool,
    exact_as: str = AR,
    rivals: Sequence[str] = (),
) -> ModeFigures:
    """What ``mode`` did in ``samples``, which hold plain decoding of the same prompts too.

    ``comparable`` says whether this machine is the plan's device, ``exact_as`` the mode whose
    output this one has to equal, ``rivals`` what else it is compared with.
    """
    own = [s for s in samples if s.mode == mode]
    plain = Pairs(samples, mode, AR)
    vs_ar = plain.speedup()
    rounds = 1 + max(sample.round for sample in own)
    rate = statistics.median(by_prompt((s.prompt_id, speed(s)) for s in own))
    predicted = statistics.median(by_prompt((s.prompt_id, _predicted(s)) for s in own))
    stats = totals(own)
    cycle = cycle_figures(stats)
    expected = cycle.expected_exposed_io_us
    return ModeFigures(
        tokens_per_s=rate,
        total_tokens_per_s=total_rate(own),
        total_speedup_vs_ar=vs_ar.total_speedup,
        ar_tokens_per_s=statistics.median(plain.others(speed)),
        speedup_vs_ar=vs_ar.speedup,
        speedup_quartiles=vs_ar.quartiles,
        speedup_vs_rivals={name: Pairs(samples, mode, name).speedup() for name in rivals},
        mean_accepted=stats.mean_accepted,
        mean_drafted=stats.mean_drafted,
        acceptance_by_depth=tuple(
            _ratio(accepted, tried)
            for accepted, tried in zip(stats.accepted_by_depth, stats.tried_by_depth, strict=True)
        ),
        cycles=stats.cycles // rounds,
        new_tokens=stats.new_tokens // rounds,
        per_cycle=cycle,
        predicted_tokens_per_s=predicted,
        predicted_speedup_vs_ar=statistics.median(plain.ratios(_predicted)),
        measured_over_predicted=rate / predicted if comparable and predicted else None,
        flash_bytes_per_token=_ratio(stats.flash_bytes, stats.new_tokens),
        flash_bytes_per_s=per_second(stats.flash_bytes, stats.read_us),
        exposed_over_expected=cycle.exposed_io_us / expected if expected else None,
        peak_rss_bytes=max(sample.peak_rss_bytes for sample in samples),
        decode_peak_bytes=max((s.decode_peak_bytes or 0 for s in own), default=0) or None,
        token_exact=same_text(samples, mode, exact_as),
    )


def cycle_figures(stats: Stats) -> CycleFigures:
    """The totals by cycle."""
    cycles = stats.cycles
    bandwidth = per_second(stats.flash_bytes, stats.read_us)
    return CycleFigures(
        draft_us=_ratio(stats.draft_us, cycles),
        draft_passes=_ratio(stats.draft_passes, cycles),
        verify_us=_ratio(stats.verify_us, cycles),
        exposed_io_us=_ratio(stats.exposed_io_us, cycles),
        expected_exposed_io_us=_ratio(
            1e6 * _ratio(stats.flash_bytes - stats.ahead_bytes, bandwidth), cycles
        ),
        stalled_us=_ratio(stats.stalled_us, cycles),
        flash_bytes=_ratio(stats.flash_bytes, cycles),
        ahead_bytes=_ratio(stats.ahead_bytes, cycles),
        nodes_by_depth=tuple(_ratio(count, cycles) for count in stats.nodes_by_depth),
    )


def totals(samples: Iterable[Sample]) -> Stats:
    """The sums of all samples' statistics."""
    total = Stats()
    for sample in samples:
        for name in Stats.__struct_fields__:
            one, other = getattr(total, name), getattr(sample.stats, name)
            setattr(total, name, _added(one, other) if isinstance(one, list) else one + other)
    return total


def _added(one: list[int], other: list[int]) -> list[int]:
    """Sums by place; the shorter list goes on with zeros."""
    size = max(len(one), len(other))
    return [sum(counts[i] for counts in (one, other) if i < len(counts)) for i in range(size)]


def same_text(samples: Sequence[Sample], mode: str, other: str) -> bool:
    """Whether two modes always gave the same tokens."""
    texts = {(s.prompt_id, s.round): s.token_ids for s in samples if s.mode == other}
    return all(s.token_ids == texts[s.prompt_id, s.round] for s in samples if s.mode == mode)


def forecast_speedup(plan: ExecutionPlan, samples: Sequence[Sample]) -> float | None:
    """The compile's forecast of ``spec`` against plain decoding, at the contexts of its samples.

    To be compared with ``total_speedup_vs_ar``, so where memory is short plain decoding is that of
    this plan: the forecast's own rival would have the draft model's memory too. None where ``spec``
    was not measured.
    """
    plain_us = spec_us = 0.0
    prices = PriceList(plan.tables)
    for sample in (s for s in samples if s.mode == SPEC):
        at = sample.stats.prompt_tokens + sample.stats.new_tokens // 2
        bucket = _bucket_of(plan, at)
        forecast, ar_us = bucket.forecast, bucket.forecast.ar_us
        if plan.residency is not None:
            place = plan.buckets.index(bucket)
            ar_us = prices.cycle(place, at, HeadOrder.BATCH).verify_us(1, 0.0)
        plain_us += sample.stats.new_tokens * ar_us
        spec_us += sample.stats.new_tokens * _ratio(forecast.cycle_us, forecast.tokens_per_cycle)
    return plain_us / spec_us if spec_us else None


def _bucket_of(plan: ExecutionPlan, tokens: int) -> Bucket:
    holding = (b for b in plan.buckets if b.context_from <= tokens < b.context_to)
    return next(holding, plan.buckets[-1])


def bench_data(
    samples: Sequence[Sample],
    plan: ExecutionPlan,
    comparable: bool,
    rivals: Sequence[str] = (),
    flash_rate: int | None = None,
) -> dict[str, object]:
    """Everything that ``plan bench --json`` shows; keys in ``docs/commands.md``."""
    names = list(dict.fromkeys(s.mode for s in samples if s.mode not in rivals))
    modes = {
        name: _by_category(
            samples, name, comparable, reference(parse_mode(name, plan), plan), rivals
        )
        for name in names
    }
    headline = SPEC if SPEC in modes else names[-1]
    return {
        "model": plan.model.name,
        "device": plan.device.name,
        "target_format": str(plan.part_formats),
        "device_is_here": comparable,
        "plan_speculates": speculates(plan),
        "memory_need_bytes": plan.memory.total_bytes,
        "memory_budget_bytes": plan.device.memory_budget_bytes,
        "flash_rate_bytes_per_s": flash_rate,
        "prompts": len({sample.prompt_id for sample in samples}),
        "rounds": 1 + max(sample.round for sample in samples),
        "headline_mode": headline,
        **{key: value for key, value in modes[headline].items() if key != "by_category"},
        "forecast_speedup_vs_ar": forecast_speedup(plan, samples),
        "modes": modes,
        # Another plan's tables and device are its own, and so is its text where formats differ
        "rivals": {name: _by_category(samples, name, False, AR, rivals) for name in rivals},
    }


def _by_category(
    samples: Sequence[Sample],
    name: str,
    comparable: bool,
    exact_as: str,
    rivals: Sequence[str],
) -> dict[str, object]:
    """The figures of a mode as plain data, over all prompts and by category."""

    def of(part: Sequence[Sample]) -> dict[str, object]:
        return msgspec.to_builtins(figures(part, name, comparable, exact_as, rivals))

    categories = sorted({sample.category for sample in samples})
    parts = {c: of([s for s in samples if s.category == c]) for c in categories}
    return {**of(samples), "by_category": parts}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile; of a single value, itself twice."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def by_prompt(values: Iterable[tuple[str, float]]) -> list[float]:
    """The median over the rounds of each prompt."""
    grouped: dict[str, list[float]] = {}
    for prompt, value in values:
        grouped.setdefault(prompt, []).append(value)
    return [statistics.median(group) for group in grouped.values()]


def total_rate(samples: Sequence[Sample]) -> float:
    """All tokens over the time of all."""
    stats = [sample.stats for sample in samples]
    return per_second(sum(s.new_tokens for s in stats), sum(s.decode_us for s in stats))


def speed(sample: Sample) -> float:
    """Measured tokens per second."""
    return sample.stats.tokens_per_s


def _predicted(sample: Sample) -> float:
    return sample.stats.simulated_tokens_per_s


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0
