"""What the target format costs against f32: next-token agreement and perplexity on real text."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowering.decoder import Decoder
from lowering.source import ModelSource
from planner.agreement import log_probability
from planner.corpus import PREFILL_ROWS, Text
from profiles.errors import InfeasibleError
from profiles.words import Format
from runtime.kv_cache import KvCache
from runtime.plan import Quality
from runtime.target import Target

Array = np.ndarray[Any, Any]

LOWEST_AGREEMENT = 0.80
"""A target format that agrees less often than this with f32 is refused."""


def measure_quality(
    source: ModelSource, target: Target, texts: Sequence[Text], progress: Callable[[int], None]
) -> Quality:
    """Compare ``target`` with the float32 torch reference at every position of ``texts``."""
    import torch

    reference = Decoder(source)
    agreed = positions = 0
    loss, exact_loss = 0.0, 0.0
    for done, text in enumerate(texts):
        with torch.inference_mode():
            exact = reference.forward(text.tokens[:-1]).numpy()
        ours = _logits(target, text)
        following = np.array(text.tokens[1:])
        agreed += int((ours.argmax(-1) == exact.argmax(-1)).sum())
        positions += len(following)
        loss -= float(log_probability(ours, following).sum())
        exact_loss -= float(log_probability(exact, following).sum())
        progress(done + 1)
    return Quality(
        positions=positions,
        top1_agreement=agreed / positions,
        perplexity=round(float(np.exp(loss / positions)), 4),
        f32_perplexity=round(float(np.exp(exact_loss / positions)), 4),
    )


def _logits(target: Target, text: Text) -> Array:
    """Teacher-forced logits of every position but the last, [n - 1, vocab]."""
    cache = KvCache(target.spec, PREFILL_ROWS, 1 << 20)
    rows: list[Array] = []
    for start in range(0, len(text.tokens) - 1, PREFILL_ROWS):
        ids = text.tokens[start : min(start + PREFILL_ROWS, len(text.tokens) - 1)]
        result = target.run_chain(ids, start, cache)
        rows.append(target.logits(result.hidden))
        cache.commit(result.keys, result.values, slice(0, len(ids)))
    return np.concatenate(rows)


def check_quality(quality: Quality, fmt: Format) -> None:
    """``InfeasibleError`` when the format changes too many next tokens."""
    if quality.top1_agreement < LOWEST_AGREEMENT:
        raise InfeasibleError(
            f"{fmt} changes the model too much",
            found=f"{quality.top1_agreement:.1%} of next tokens as in f32",
            expected=f"at least {LOWEST_AGREEMENT:.0%}",
            hint="choose a finer --target-format, such as w8a16 or f32",
        )
