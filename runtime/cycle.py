"""One cycle: draft a token tree, verify it with the full target in one pass, commit what it agrees
with.

The invariant between cycles: the cache holds every position but the last token's, whose key and
value the next cycle's verify pass computes. So a rejected draft leaves nothing behind, and an
accepted one has its rows computed by the target in the target's own numerics classes.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from profiles.errors import InputError
from profiles.words import AttentionKernel, Format, NodeId
from runtime.draft_model import DraftModelDrafter, DraftRows
from runtime.drafting import Drafter, NgramDrafter, SkipDrafter, fill_chain, fill_static
from runtime.feedback import Feedback
from runtime.growth import Grown, grow
from runtime.kv_cache import KvCache
from runtime.ngram import NgramIndex
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import Cycle, DraftShape, DraftSource, HeadOrder, NumericsClass
from runtime.plan_tables import PassKind
from runtime.pricing import PriceList
from runtime.sampling import Sampling, choose
from runtime.stats import FinishedCycle
from runtime.target import Target
from runtime.tree import ROOT, Accepted, TokenTree, follow, nodes_by_depth

Array = np.ndarray[Any, Any]

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


class Draft(NamedTuple):
    """The draft of a cycle."""

    tree: TokenTree
    us: float = 0.0
    """Device time by the plan's tables."""
    passes: int = 0
    drafter: Drafter | None = None
    """Who has to hear what became of it."""
    whole: TokenTree | None = None
    """What was drafted, where only a part of it is worth verifying."""
    grown: Grown | None = None


class Decoding:
    """The state of one generation: its tokens, cache and drafts; ``step`` runs one cycle.

    ``model`` is the session's draft model with its keys and values, if the plan has one.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        target: Target,
        cache: KvCache,
        prompt: Sequence[int],
        sampling: Sampling,
        cycle: Cycle | None = None,
        model: tuple[Target, DraftRows] | None = None,
    ) -> None:
        self.tokens = list(prompt)
        self._plan = plan
        self._target = target
        self._cache = cache
        self._sampling = sampling
        self._forced = cycle
        self._model = model
        self._bucket = 0
        self._first_lone = plan.context
        """First slot whose row was computed alone."""
        self._prices = PriceList(plan.tables)
        self._drafters: dict[tuple[object, ...], Drafter] = {}
        self._ngrams: dict[tuple[int, int], NgramIndex] = {}
        self._feedback: dict[int, Feedback] = {}
        """By envelope."""

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

        A draft model that the first cycle asks reads the prompt too.
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
        cycle = self._cycle()
        if cycle.draft is DraftSource.MODEL and self._model is not None:
            self._drafter(cycle).begin(self.tokens)

    def step(self, room: int) -> FinishedCycle:
        """Run one cycle that adds 1 to ``room`` tokens to ``tokens``."""
        began = time.perf_counter()
        cycle = self._cycle()
        depth = min(cycle.length, room - 1, self._plan.context - len(self.tokens) - 1)
        draft = self._draft(cycle, depth)
        drafted, before = time.perf_counter(), self._target.flash
        accepted, price = self._verify(draft, cycle)
        flash = self._target.flash.since(before)
        self._tell(draft, cycle, accepted.path)
        self.tokens += accepted.tokens
        return FinishedCycle(
            drafted=len(draft.tree) - 1,
            accepted=len(accepted.path) - 1,
            committed=len(accepted.tokens),
            draft_us=1e6 * (drafted - began),
            verify_us=1e6 * (time.perf_counter() - drafted),
            simulated_us=self._prices.cycle_us + draft.us + price,
            draft_passes=draft.passes,
            nodes_by_depth=nodes_by_depth(draft.tree),
            flash_bytes=flash.used_bytes,
            ahead_bytes=flash.ahead_bytes,
            read_us=flash.used_us,
            exposed_io_us=flash.exposed_us,
            stalled_us=flash.waited_us,
        )

    def keep(self, length: int) -> None:
        """Drop tokens past ``length``, as after an end accepted in the middle of a draft."""
        del self.tokens[length:]
        self._cache.truncate(min(self._cache.length, length - 1))

    def _cycle(self) -> Cycle:
        self._bucket = bucket_at(self._plan, len(self.tokens), self._bucket)
        return self._forced or self._plan.buckets[self._bucket].cycle

    def _draft(self, cycle: Cycle, depth: int) -> Draft:
        """Fill a tree no deeper than ``depth``."""
        tree = TokenTree(self.tokens[-1])
        if cycle.draft is DraftSource.OFF or depth < 1:
            return Draft(tree)
        if cycle.draft is DraftSource.NGRAM and cycle.shape is DraftShape.CHAIN:
            node = ROOT
            for token in self._look_up(cycle, depth):
                node = tree.add(node, token)
            return Draft(tree, self._prices.ngram_us)
        drafter = self._drafter(cycle)
        before = drafter.passes
        drafter.begin(self.tokens)
        eos, context = self._plan.model.tokenizer.eos_ids, len(self.tokens)
        match cycle.shape:
            case DraftShape.CHAIN:
                us = fill_chain(tree, drafter, depth, context, eos)
            case DraftShape.STATIC:
                template = self._plan.trees[cycle.tree]
                us = fill_static(tree, template, drafter, depth, context, eos)
            case DraftShape.ONLINE:
                grown = self._grow(tree, cycle, drafter, depth)
                passes = drafter.passes - before
                return Draft(grown.verified, grown.draft_us, passes, drafter, tree, grown)
        return Draft(tree, us, drafter.passes - before, drafter)

    def _grow(self, tree: TokenTree, cycle: Cycle, drafter: Drafter, depth: int) -> Grown:
        growth, context = self._plan.growths[cycle.tree], len(self.tokens)
        return grow(
            *(tree, growth, drafter),
            self._prices.cycle(self._bucket, context, cycle.head),
            self._feedback.setdefault(cycle.tree, Feedback(growth)),
            room_depth=depth,
            context=context,
            ends=self._plan.model.tokenizer.eos_ids,
        )

    def _tell(self, draft: Draft, cycle: Cycle, path: Sequence[NodeId]) -> None:
        """Let those who drafted know what the target agreed with."""
        if draft.drafter is None:
            return
        if draft.grown is None or draft.whole is None:
            draft.drafter.accept(draft.tree, path)
            return
        nodes, ranks, chances = draft.grown.nodes, draft.grown.ranks, draft.grown.chances
        draft.drafter.accept(draft.whole, [nodes[at] for at in path])
        self._feedback[cycle.tree].observe(draft.tree, ranks, chances, path)

    def _look_up(self, cycle: Cycle, length: int) -> list[int]:
        key = cycle.ngram_min, cycle.ngram_max
        index = self._ngrams.setdefault(key, NgramIndex(*key))
        index.extend(self.tokens[len(index) :])
        return index.propose(length)

    def _drafter(self, cycle: Cycle) -> Drafter:
        """Who fills the trees of ``cycle``; made once in a generation."""
        key = cycle.draft, cycle.mask, cycle.ngram_min, cycle.ngram_max
        if key not in self._drafters:
            self._drafters[key] = self._new_drafter(cycle)
        return self._drafters[key]

    def _new_drafter(self, cycle: Cycle) -> Drafter:
        plan, prices, sampling = self._plan, self._prices, self._sampling
        if cycle.draft is DraftSource.NGRAM:
            return NgramDrafter(cycle.ngram_min, cycle.ngram_max, prices)
        if cycle.draft is DraftSource.SKIP:
            active = self._target.active(plan.masks[cycle.mask].skipped)
            return SkipDrafter(
                *(self._target, self._cache, active, cycle.mask, sampling, prices), cycle.length
            )
        if self._model is None:
            raise InputError("the plan has no draft model", hint="compile it with --draft")
        return DraftModelDrafter(*self._model, prices, sampling, plan.model.vocab)

    def _verify(self, draft: Draft, cycle: Cycle) -> tuple[Accepted, float]:
        """What the target agrees with, its rows committed, and the device time."""
        tree, cache, rows = draft.tree, self._cache, len(draft.tree)
        start = cache.length
        width = 1 if cycle.lone else commit_width(self._plan.numerics, rows)
        if self._target.attention is AttentionKernel.EXACT:
            result = self._target.run_tree(tree, start, cache, width)
        else:
            result = self._target.run_chain(tree.tokens, start, cache, width=width)
        if cycle.lone:
            self._first_lone = min(self._first_lone, start)
        along = cycle.head is HeadOrder.PATH and rows > 1
        positions = [start + depth for depth in tree.depths]

        def next_token(node: NodeId) -> int:
            at = slice(node, node + 1)
            return self._next_tokens(result.hidden[at], positions[at], cycle.lone)[0]

        if along:
            accepted = follow(tree, next_token)
        else:
            chosen = self._next_tokens(result.hidden[:rows], positions, cycle.lone)
            accepted = follow(tree, chosen.__getitem__)
        path = accepted.path
        chain = path == list(range(len(path)))
        kept = slice(0, len(path)) if chain else np.array(path)
        cache.commit(result.keys, result.values, kept)
        kind = PassKind.AR if cycle.lone else PassKind.VERIFY
        head_us = len(path) * self._prices.head_us(1) if along else self._prices.head_us(rows)
        ahead_us = draft.us + head_us + self._prices.cycle_us
        where = self._bucket, kind, rows, start + rows
        return accepted, head_us + self._prices.verify_us(*where, ahead_us)

    def _next_tokens(self, hidden: Array, positions: Sequence[int], alone: bool) -> list[int]:
        """The target's token after each of the rows ``hidden``, whose tokens are at ``positions``.

        ``w4`` heads run over two rows at least, of which the last is repeated.
        """
        rows = len(positions)
        if not alone and (lacking := head_rows(self._plan, rows) - rows):
            hidden = np.concatenate([hidden, hidden[-1:].repeat(lacking, axis=0)])
        logits = self._target.logits(hidden)[:rows]
        return choose(logits, [at + 1 for at in positions], self._sampling).tolist()
