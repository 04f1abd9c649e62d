"""What the target format costs against f32: next-token agreement and perplexity on real text."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lowering.decoder import Decoder
from lowering.source import ModelSource
from planner.agreement import log_probability
from planner.corpus import PREFILL_ROWS, Text
from profiles.errors import InfeasibleError
from runtime.kv_cache import KvCache
from runtime.plan import Formats, Quality
from runtime.target import Target

Array = np.ndarray[Any, Any]

LOWEST_AGREEMENT = 0.80
"""A target format that agrees less often than this with f32 is refused."""


def measure_quality(
    source: ModelSource, target: Target, texts: Sequence[Text], progress: Callable[[int, int], None]
) -> Quality:
    """Compare ``target`` with the float32 torch reference at every position of ``texts``.

    The reference goes through the model once, layer by layer, and then its head, so that the
    float32 weights are never in memory together. ``progress`` gets steps done and steps in all.
    """
    reference, layers = Decoder(source), source.spec.layers
    steps = layers + len(texts)
    inputs = [text.tokens[:-1] for text in texts]
    hidden = reference.hidden_of_each(inputs, lambda layer: progress(layer + 1, steps))
    agreed = positions = 0
    loss, exact_loss = 0.0, 0.0
    for done, text in enumerate(texts):
        at = 0
        for ours in _logits(target, text):
            rows = slice(at, at := at + len(ours))
            exact = reference.logits(hidden[done][rows]).numpy()
            following = np.array(text.tokens[1:])[rows]
            agreed += int((ours.argmax(-1) == exact.argmax(-1)).sum())
            loss -= float(log_probability(ours, following).sum())
            exact_loss -= float(log_probability(exact, following).sum())
        positions += at
        progress(layers + done + 1, steps)
    return Quality(
        positions=positions,
        top1_agreement=agreed / positions,
        perplexity=round(float(np.exp(loss / positions)), 4),
        f32_perplexity=round(float(np.exp(exact_loss / positions)), 4),
    )


def _logits(target: Target, text: Text) -> Iterator[Array]:
    """Teacher-forced logits of every position but the last, [.., vocab], some rows at a time."""
    cache = KvCache(target.spec, PREFILL_ROWS, 1 << 20)
    for start in range(0, len(text.tokens) - 1, PREFILL_ROWS):
        ids = text.tokens[start : min(start + PREFILL_ROWS, len(text.tokens) - 1)]
        result = target.run_chain(ids, start, cache)
        yield target.logits(result.hidden)
        cache.commit(result.keys, result.values, slice(0, len(ids)))


def check_quality(quality: Quality, formats: Formats) -> None:
    """``InfeasibleError`` when the format changes too many next tokens."""
    if quality.top1_agreement < LOWEST_AGREEMENT:
        raise InfeasibleError(
            f"{formats} changes the model too much",
            found=f"{quality.top1_agreement:.1%} of next tokens as in f32",
            expected=f"at least {LOWEST_AGREEMENT:.0%}",
            hint="choose a finer --target-format, such as w8a16 or f32",
        )
