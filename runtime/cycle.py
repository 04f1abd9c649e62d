"""One cycle: draft a chain, verify it with the full target in one pass, commit what it agrees with.

The invariant between cycles: the cache holds every position but the last token's, whose key and
value the next cycle's verify pass computes. So a rejected draft leaves nothing behind, and an
accepted one has its rows computed by the target in the target's own numerics classes.
"""

import time
from collections.abc import Callable, Sequence

from profiles.words import AttentionKernel, Format
from runtime.kv_cache import KvCache
from runtime.ngram import NgramIndex
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import Cycle, DraftSource, NumericsClass
from runtime.plan_tables import PassKind
from runtime.pricing import PriceList
from runtime.sampling import Sampling, choose
from runtime.stats import FinishedCycle
from runtime.target import Target

WIDEST_BLOCK = 32
"""A product of more rows is cut into blocks of an even number of rows, and a single row that is
left over would be summed by another kernel."""


def bucket_at(plan: ExecutionPlan, tokens: int, current: int) -> int:
    """Index of the bucket for a context of ``tokens``, with hysteresis below its lower edge."""
    bucket = plan.buckets[current]
    low = bucket.context_from - plan.hysteresis_tokens
    if low <= tokens < bucket.context_to:
        return current
    found = [i for i, b in enumerate(plan.buckets) if b.context_from <= tokens < b.context_to]
    return found[0] if found else len(plan.buckets) - 1


def commit_width(classes: Sequence[NumericsClass], rows: int) -> int:
    """Rows of a pass that commits: padded as every numerics class of the target asks."""
    width = max(rows, *(c.min_width for c in classes))
    step = max(c.width_step for c in classes)
    width = -(-width // step) * step
    if width > WIDEST_BLOCK and classes[0].attention is AttentionKernel.FUSED:
        width += width % 2
    return width


def head_rows(plan: ExecutionPlan, rows: int) -> int:
    """Rows that the head runs over, so that each is what it is in any pass: ``w4`` asks for two."""
    return max(rows, 2) if plan.part_formats.head is Format.W4 else rows


class Decoding:
    """The state of one generation: its tokens, cache and drafts; ``step`` runs one cycle."""

    def __init__(
        self,
        plan: ExecutionPlan,
        target: Target,
        cache: KvCache,
        prompt: Sequence[int],
        sampling: Sampling,
        cycle: Cycle | None = None,
    ) -> None:
        self.tokens = list(prompt)
        self._plan = plan
        self._target = target
        self._cache = cache
        self._sampling = sampling
        self._forced = cycle
        self._bucket = 0
        self._first_lone = plan.context
        """First slot whose row was computed alone."""
        self._prices = PriceList(plan.tables)
        self._masks = [target.active(mask.skipped) for mask in plan.masks]
        self._ngrams: dict[tuple[int, int], NgramIndex] = {}

    def reusable(self) -> list[int]:
        """Tokens whose rows the cache holds as any later generation would compute them."""
        return self.tokens[: min(self._cache.length, self._first_lone)]

    def reuse(self, known: Sequence[int]) -> int:
        """Keep the rows of what the prompt shares with ``known``, drop others; how many stay.

        ``known`` are the tokens whose rows the cache holds already. Where the prompt begins with
        them their rows stay: no row of them depends on the pass that computed it.
        """
        last, kept = len(self.tokens) - 1, 0
        while kept < min(last, len(known)) and known[kept] == self.tokens[kept]:
            kept += 1
        self._cache.truncate(kept)
        self._cache.trim(len(self.tokens))
        return kept

    def prefill(self, report: Callable[[int, int], None] | None = None) -> None:
        """Compute and commit every prompt position but the last that the cache does not hold.

        ``report`` is told before each chunk how many of how many positions are done.
        """
        cache, prompt, chunk = self._cache, self.tokens, self._plan.prefill.chunk
        last = len(prompt) - 1
        for start in range(cache.length, last, chunk):
            if report is not None:
                report(start, last)
            ids = prompt[start : min(start + chunk, last)]
            width = commit_width(self._plan.numerics, len(ids))
            result = self._target.run_chain(ids, start, cache, width=width)
            cache.commit(result.keys, result.values, slice(0, len(ids)))

    def step(self, room: int) -> FinishedCycle:
        """Run one cycle that adds 1 to ``room`` tokens to ``tokens``."""
        began = time.perf_counter()
        cycle = self._cycle()
        length = min(cycle.length, room - 1, self._plan.context - len(self.tokens) - 1)
        draft, draft_price = self._draft(cycle, length)
        drafted = time.perf_counter()
        added, price = self._verify(draft, cycle.lone)
        return FinishedCycle(
            drafted=len(draft),
            accepted=min(len(added) - 1, len(draft)),
            committed=len(added),
            draft_us=1e6 * (drafted - began),
            verify_us=1e6 * (time.perf_counter() - drafted),
            simulated_us=self._prices.cycle_us + draft_price + price,
        )

    def keep(self, length: int) -> None:
        """Drop tokens past ``length``, as after an end accepted in the middle of a draft."""
        del self.tokens[length:]
        self._cache.truncate(min(self._cache.length, length - 1))

    def _cycle(self) -> Cycle:
        if self._forced is not None:
            return self._forced
        self._bucket = bucket_at(self._plan, len(self.tokens), self._bucket)
        return self._plan.buckets[self._bucket].cycle

    def _draft(self, cycle: Cycle, length: int) -> tuple[list[int], float]:
        """Drafted tokens and their device time."""
        if cycle.draft is DraftSource.OFF or length < 1:
            return [], 0.0
        if cycle.draft is DraftSource.NGRAM:
            return self._look_up(cycle, length), self._prices.ngram_us
        return self._draft_skipping(cycle, length)

    def _look_up(self, cycle: Cycle, length: int) -> list[int]:
        key = cycle.ngram_min, cycle.ngram_max
        index = self._ngrams.setdefault(key, NgramIndex(*key))
        index.extend(self.tokens[len(index) :])
        return index.propose(length)

    def _draft_skipping(self, cycle: Cycle, length: int) -> tuple[list[int], float]:
        """The target under a skip mask, one token a pass (KnapSpec); its rows stay scratch."""
        cache, prices = self._cache, self._prices
        eos = self._plan.model.tokenizer.eos_ids
        at, token = cache.length, self.tokens[-1]
        draft: list[int] = []
        price = 0.0
        cache.reserve(at + length + 1)
        while True:
            result = self._target.run_chain([token], at, cache, self._masks[cycle.mask])
            price += prices.pass_us(PassKind.DRAFT, cycle.mask, 1, at + 1) + prices.cycle_us
            logits = self._target.logits(result.hidden)
            token = int(choose(logits, [at + 1], self._sampling)[0])
            draft.append(token)
            if len(draft) == length or token in eos:
                return draft, price
            cache.write(at, result.keys, result.values, slice(0, 1))
            at += 1

    def _verify(self, draft: Sequence[int], lone: bool) -> tuple[list[int], float]:
        """Tokens that the target says follow, appended and committed, and the device time."""
        cache, rows = self._cache, len(draft) + 1
        start = cache.length
        width = 1 if lone else commit_width(self._plan.numerics, rows)
        result = self._target.run_chain([self.tokens[-1], *draft], start, cache, width=width)
        if lone:
            self._first_lone = min(self._first_lone, start)
            logits = self._target.logits(result.hidden)
        else:
            logits = self._target.logits(result.hidden[: head_rows(self._plan, rows)])[:rows]
        chosen = choose(logits, range(start + 1, start + 1 + rows), self._sampling).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == chosen[accepted]:
            accepted += 1
        cache.commit(result.keys, result.values, slice(0, accepted + 1))
        added = chosen[: accepted + 1]
        self.tokens += added
        kind = PassKind.AR if lone else PassKind.VERIFY
        price = self._prices.pass_us(kind, 0, rows, start + rows) + self._prices.head_us(rows)
        return added, price
