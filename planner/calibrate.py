"""Calibration: acceptance, agreement and quality, measured once per model, format and prompts.

Everything measured is kept in a file named by the digest of what it depends on, written after each
step: a compile that was interrupted goes on where it stopped, and another device's compile finds
what does not depend on the device. Prompts are split three ways: to search, to re-score, to
report; a number in a report never chose anything.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from lowering.source import ModelSource
from planner.agreement import (
    DepthCounts,
    SkipLoss,
    draft_agreement,
    pooled,
    skip_losses,
)
from planner.corpus import Text, committed_cache, continue_prompts
from planner.draft_acceptance import (
    DraftRanks,
    DraftReading,
    TextRanks,
    find_ranks,
    merged_ranks,
)
from planner.locks import locked
from planner.prompt_file import Prompt, Split
from planner.quality import measure_quality
from profiles.errors import InputError
from profiles.words import SubLayerId
from runtime.kv_cache import KvCache
from runtime.plan import Formats, Quality
from runtime.target import Target
from runtime.tokens import Tokens

VERSION = 2
"""Part of the digest: raise it when what is measured changes its meaning."""
NEW_TOKENS = 64
MAX_PROMPT_TOKENS = 384
LOSS_TEXTS = 6
"""Texts of the search split that single skips are measured on."""
LOSS_ROOTS = 32
"""Positions of each."""
log = logging.getLogger(__name__)

T = TypeVar("T")


class Report(Protocol):
    """Called with a stage, steps done and steps in all."""

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


class Draft(msgspec.Struct):
    """Agreement of one skip mask."""

    skipped: tuple[SubLayerId, ...]
    split: Split
    counts: DepthCounts


class Store(msgspec.Struct):
    """What a calibration file holds."""

    texts: dict[Split, list[Text]] = msgspec.field(default_factory=dict)
    losses: list[list[SkipLoss]] = msgspec.field(default_factory=list)
    """By text, then by sub-layer."""
    drafts: list[Draft] = msgspec.field(default_factory=list)
    quality: Quality | None = None
    ranks: list[DraftRanks] = msgspec.field(default_factory=list)


def calibration_digest(
    source: ModelSource, formats: Formats, prompts: Sequence[Prompt], context: int
) -> str:
    """SHA-256 of everything that a calibration depends on."""
    # The model's name does not matter, everything else that is known of it does
    spec = msgspec.structs.replace(source.spec, name="")
    sizes = (NEW_TOKENS, MAX_PROMPT_TOKENS, LOSS_TEXTS, LOSS_ROOTS)
    parts = [VERSION, sizes, str(formats), context, spec, list(prompts)]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


class Calibration:
    """Measures on demand, remembers on disk."""

    def __init__(
        self,
        target: Target,
        tokens: Tokens,
        prompts: Sequence[Prompt],
        *,
        context: int,
        digest: str,
        folder: Path,
        report: Report,
    ) -> None:
        self.digest = digest
        self.context = context
        self._target = target
        self._tokens = tokens
        self._prompts = split_prompts(prompts)
        self._new_tokens = min(NEW_TOKENS, context // 2)
        self._prompt_tokens = min(MAX_PROMPT_TOKENS, context - self._new_tokens)
        self.report = report
        self._file = folder / f"{digest}.json"
        self._store = read_store(self._file)
        self._caches: tuple[Split, list[KvCache]] | None = None

    def texts(self, split: Split) -> list[Text]:
        """Prompts of ``split`` with the target's own greedy continuations."""
        if split not in self._store.texts:
            encoded = [(p.id, p.category, self._encode(p.prompt)) for p in self._prompts[split]]
            stage = f"continuing {len(encoded)} prompts ({split})"
            made = continue_prompts(
                *(self._target, encoded, self._new_tokens, self._tokens),
                lambda done: self.report(stage, done, self._new_tokens),
            )
            usable = [(text, cache) for text, cache in made if len(text.roots) > 1]
            if not usable:
                raise InputError(
                    "the model ends all its answers at once, so there is nothing to measure",
                    where=f"prompts to {split}",
                    hint="give other prompts with --prompts",
                )
            self._store.texts[split] = [text for text, _ in usable]
            self._caches = split, [cache for _, cache in usable]
            self._save()
        return self._store.texts[split]

    def _encode(self, prompt: str) -> list[int]:
        chat = self._tokens.spec.chat_template is not None
        # The end says that it is the model's turn to speak
        return self._tokens.encode_prompt(prompt, chat=chat)[-self._prompt_tokens :]

    def positions(self, split: Split) -> int:
        """Positions of ``split`` at which a draft can be judged."""
        return sum(len(text.roots) for text in self.texts(split))

    def skip_losses(self) -> list[SkipLoss]:
        """What each sub-layer is worth: the loss when it alone is left out (search split)."""
        texts = spread(self.texts(Split.SEARCH), LOSS_TEXTS)
        for index in range(len(self._store.losses), len(texts)):
            self.report("leaving out single sub-layers", index, len(texts))
            text = texts[index]
            roots = spread(text.roots, LOSS_ROOTS)
            cache = committed_cache(self._target, text.tokens)
            self._store.losses.append(skip_losses(self._target, text, cache, roots))
            self._save()
        self.report("leaving out single sub-layers", len(texts), len(texts))
        return pooled(self._store.losses[: len(texts)])

    def draft_agreement(
        self, skipped: Sequence[SubLayerId], split: Split, depth: int
    ) -> DepthCounts:
        """Agreement of drafts under a skip mask, by depth up to ``depth``."""
        key = tuple(sorted(skipped))
        for known in self._store.drafts:
            if (known.skipped, known.split) == (key, split) and len(known.counts.tried) >= depth:
                counts = known.counts
                return DepthCounts(counts.tried[:depth], counts.accepted[:depth])
        total = DepthCounts((0,) * depth, (0,) * depth)
        texts = self.texts(split)
        stage = f"drafting without {len(key)} sub-layers ({split})"
        for index, (text, cache) in enumerate(zip(texts, self._split_caches(split), strict=True)):
            self.report(stage, index, len(texts))
            total += draft_agreement(self._target, text, cache, key, depth)
        self.report(stage, len(texts), len(texts))
        self._store.drafts.append(Draft(key, split, total))
        self._save()
        return total

    def _split_caches(self, split: Split) -> list[KvCache]:
        if self._caches is None or self._caches[0] is not split:
            texts = self.texts(split)
            caches: list[KvCache] = []
            for index, text in enumerate(texts):
                self.report(f"reading prompts ({split})", index, len(texts))
                caches.append(committed_cache(self._target, text.tokens))
            self._caches = split, caches
        return self._caches[1]

    def draft_ranks(self, reading: DraftReading, split: Split) -> list[TextRanks]:
        """What a draft model holds of the target's text, at every position of ``split``."""
        known = find_ranks(self._store.ranks, reading.digest, split)
        if known is None:
            self._store.ranks.append(known := DraftRanks(reading.digest, split, []))
        texts = self.texts(split)
        stage = f"reading along with the draft model ({split})"
        for index in range(len(known.texts), len(texts)):
            self.report(stage, index, len(texts))
            known.texts.append(reading.ranks(texts[index]))
            self._save()
        self.report(stage, len(texts), len(texts))
        return known.texts

    def quality(self, source: ModelSource) -> Quality:
        """The target format against f32 on the report split."""
        if self._store.quality is None:
            texts = self.texts(Split.REPORT)
            self._store.quality = measure_quality(
                *(source, self._target, texts),
                partial(self.report, "comparing with f32"),
            )
            self._save()
        return self._store.quality

    def _save(self) -> None:
        write_store(self._file, self._store)


def spread(items: Sequence[T], count: int) -> Sequence[T]:
    """At most ``count`` of ``items``, evenly spaced, the first one included."""
    return items[:: max(1, len(items) // count)][:count]


def split_prompts(prompts: Sequence[Prompt]) -> dict[Split, list[Prompt]]:
    """Prompts by split; those without one are dealt out in turn."""
    order = list(Split)
    dealt: dict[Split, list[Prompt]] = {split: [] for split in order}
    for index, prompt in enumerate(prompts):
        dealt[prompt.split or order[index % len(order)]].append(prompt)
    for split, members in dealt.items():
        if not members:
            raise InputError(
                "too few prompts to calibrate with",
                found=f"none for the {split} split",
                expected="at least 3, better 24",
                hint="add prompts or leave out --prompts to use the bundled ones",
            )
    return dealt


def read_store(file: Path) -> Store:
    """What an earlier calibration left; a file that cannot be read counts as none."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Store)
    except FileNotFoundError:
        return Store()
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("ignoring the calibration in %s: %s", file, error)
        return Store()


def merged(one: Store, other: Store) -> Store:
    """All that is in either; both measured the same model, so what both have is equal."""
    drafts = {(draft.skipped, draft.split): draft for draft in other.drafts}
    for draft in one.drafts:
        known = drafts.get((draft.skipped, draft.split))
        if known is None or len(known.counts.tried) <= len(draft.counts.tried):
            drafts[draft.skipped, draft.split] = draft
    return Store(
        texts={**other.texts, **one.texts},
        losses=max(one.losses, other.losses, key=len),
        drafts=list(drafts.values()),
        quality=one.quality or other.quality,
        ranks=merged_ranks(one.ranks, other.ranks),
    )


def write_store(file: Path, store: Store) -> None:
    """Add ``store`` to ``file`` as one step; a full or read-only disk costs only the memory."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.parent, "another process that keeps its calibration"):
            store = merged(store, read_store(file))
            partial.write_bytes(msgspec.json.encode(store))
            partial.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        log.warning("cannot keep the calibration: %s", error)
