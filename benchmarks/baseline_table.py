"""Figures of ``baselines.py``: medians over prompts of rates and of ratios to llama.cpp."""

import statistics
from collections.abc import Callable, Sequence

import msgspec
from baseline_engines import LLAMA, OURS, Run
from markdown_table import table

from runtime.stats import per_second

FEWEST_TIMED = 8
"""Tokens after the first arrival that an answer needs for its rate to count."""


class Sample(msgspec.Struct, frozen=True):
    """One prompt decoded once in one way."""

    engine: str
    label: str
    mode: str
    threads: int
    prompts: str
    """Name of the prompt file."""
    prompt_id: str
    category: str
    prompt_tokens: int
    run: Run

    @property
    def timed_tokens(self) -> int:
        """Tokens after the first arrival."""
        return len(self.run.token_ids) - self.run.first_tokens

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, prefill excluded."""
        return per_second(self.timed_tokens, self.run.decode_us)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one way to decode did with the prompts of one file."""

    prompts: str
    label: str
    mode: str
    answers: int
    """Prompts that count."""
    tokens_per_s: dict[int, float]
    """By threads: median over prompts."""
    vs_llama_ar: dict[int, float]
    """By threads: median over prompts of the ratio to llama.cpp's plain decoding of the same."""
    best_vs_best: float | None
    """Each at the number of threads where it is fastest: median ratio over prompts."""
    same_as_ours: float | None
    """Share of the new tokens up to the first that differs from our plain decoding."""
    same_as_own: float | None
    """Likewise, from the same engine's plain decoding; ours: from the plan's plain cycle ``off``,
    which is what a draft is held to."""


def counted(samples: Sequence[Sample]) -> list[Sample]:
    """Samples of prompts that every way answered at length, each in the prompts it was given."""
    short = {
        (s.prompts, s.prompt_id)
        for s in samples
        if s.timed_tokens < FEWEST_TIMED or s.run.decode_us <= 0
    }
    return [s for s in samples if (s.prompts, s.prompt_id) not in short]


def figures(samples: Sequence[Sample]) -> list[Figures]:
    """One entry for each prompt file and way, in the order of the samples."""
    kept = counted(samples)
    keys = dict.fromkeys((s.prompts, s.label, s.mode) for s in kept)
    return [_figures([s for s in kept if s.prompts == key[0]], *key) for key in keys]


def _figures(samples: Sequence[Sample], prompts: str, label: str, mode: str) -> Figures:
    own = [s for s in samples if (s.label, s.mode) == (label, mode)]
    llama = [s for s in samples if (s.engine, s.mode) == (LLAMA, "ar")]
    first = next((s.label for s in samples if s.engine == OURS), None)
    ours = [s for s in samples if (s.label, s.mode) == (first, "ar")]
    drafts_of_ours = mode != "ar" and own[0].engine == OURS
    plain = [s for s in samples if (s.label, s.mode) == (label, "off" if drafts_of_ours else "ar")]
    threads = sorted({s.threads for s in own})
    ratios = {count: _ratios(_at(own, count), _at(llama, count)) for count in threads}
    best = _ratios(_at(own, _fastest(own)), _at(llama, _fastest(llama))) if llama else []
    return Figures(
        prompts=prompts,
        label=label,
        mode=mode,
        answers=len({s.prompt_id for s in own}),
        tokens_per_s={count: _rate(_at(own, count)) for count in threads},
        vs_llama_ar={count: statistics.median(r) for count, r in ratios.items() if r},
        best_vs_best=statistics.median(best) if best else None,
        same_as_ours=_agreement(own, ours),
        same_as_own=_agreement(own, plain),
    )


def _at(samples: Sequence[Sample], threads: int) -> list[Sample]:
    return [s for s in samples if s.threads == threads]


def _rate(samples: Sequence[Sample]) -> float:
    return statistics.median(s.tokens_per_s for s in samples)


def _fastest(samples: Sequence[Sample]) -> int:
    """Number of threads with the highest median rate."""
    return max({s.threads for s in samples}, key=lambda count: _rate(_at(samples, count)))


def _ratios(own: Sequence[Sample], others: Sequence[Sample]) -> list[float]:
    other = {s.prompt_id: s.tokens_per_s for s in others}
    return [s.tokens_per_s / other[s.prompt_id] for s in own if s.prompt_id in other]


def _agreement(own: Sequence[Sample], others: Sequence[Sample]) -> float | None:
    other = {(s.prompt_id, s.threads): s.run.token_ids for s in others}
    pairs = [
        (s.run.token_ids, other[s.prompt_id, s.threads])
        for s in own
        if (s.prompt_id, s.threads) in other
    ]
    total = sum(max(len(one), len(two)) for one, two in pairs)
    return sum(_shared(one, two) for one, two in pairs) / total if total else None


def _shared(one: Sequence[int], two: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    pairs = zip(one, two, strict=False)
    differing = (at for at, (a, b) in enumerate(pairs) if a != b)
    return next(differing, min(len(one), len(two)))


def markdown(rows: Sequence[Figures]) -> str:
    """One table; a cell without a number is a dash."""
    threads = sorted({count for row in rows for count in row.tokens_per_s})
    titles = ["prompts", "engine", "mode", "n"]
    for count in threads:
        titles += [f"tok/s, {count} thr.", "vs llama.cpp ar"]
    titles += ["best vs best", "as ours", "as its own"]
    lines: list[list[str]] = []
    for row in rows:
        cells = [row.prompts, row.label, row.mode, str(row.answers)]
        for count in threads:
            cells += [
                _cell(row.tokens_per_s.get(count), "{:.1f}".format),
                _cell(row.vs_llama_ar.get(count), "{:.2f}x".format),
            ]
        cells.append(_cell(row.best_vs_best, "{:.2f}x".format))
        cells += [_cell(share, "{:.0%}".format) for share in (row.same_as_ours, row.same_as_own)]
        lines.append(cells)
    return table(titles, lines)


def _cell(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)
