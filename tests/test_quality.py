"""What a format costs: against the reference run text by text, and with few weights at a time."""

from contextlib import closing

import numpy as np
import pytest
import torch
from compiled_models import Recipe, recipe_source
from tiny_models import QWEN2, VOCAB
from torch.nn.functional import cross_entropy

from lowering.decoder import Decoder
from planner.corpus import Text
from planner.quality import check_quality, measure_quality
from profiles.errors import InfeasibleError
from profiles.words import AttentionKernel, Format
from runtime.kv_cache import KvCache
from runtime.plan import Quality, formats_of
from runtime.plan_folder import map_tensors, read_plan
from runtime.target import Target

RECIPE = Recipe(shape=QWEN2, format=Format.W8A8, attention=AttentionKernel.EXACT)
RANDOM = np.random.default_rng(3)
TEXTS = [
    Text(f"text-{n}", "any", 3, tuple(RANDOM.integers(0, VOCAB, n).tolist())) for n in (7, 150, 64)
]


@pytest.fixture
def target(compiled):
    folder = compiled(RECIPE)
    plan = read_plan(folder)
    tensors = map_tensors(folder, plan.weights, plan.tensors)
    with closing(
        Target(folder, plan.model, plan.graphs, tensors, 1, AttentionKernel.EXACT)
    ) as opened:
        yield opened


def test_quality_equals_that_of_the_reference_text_by_text(target):
    reference, steps = Decoder(recipe_source(RECIPE)), []
    agreed, positions, losses = 0, 0, [0.0, 0.0]
    for text in TEXTS:
        ids, following = text.tokens[:-1], torch.tensor(text.tokens[1:])
        hidden = target.run_chain(ids, 0, KvCache(target.spec, 16, 256)).hidden
        both = torch.from_numpy(target.logits(hidden)), reference.forward(ids)
        agreed += int((both[0].argmax(-1) == both[1].argmax(-1)).sum())
        positions += len(ids)
        for index, logits in enumerate(both):
            losses[index] += float(cross_entropy(logits.double(), following, reduction="sum"))
    found = measure_quality(
        reference_source := recipe_source(RECIPE), target, TEXTS, lambda *s: steps.append(s)
    )
    assert reference_source.spec == target.spec
    assert found.positions == positions
    assert found.top1_agreement == agreed / positions
    assert 0 < agreed < positions, "all or nothing would prove little"
    assert found.perplexity == pytest.approx(np.exp(losses[0] / positions), rel=1e-5)
    assert found.f32_perplexity == pytest.approx(np.exp(losses[1] / positions), rel=1e-5)
    assert found.perplexity != found.f32_perplexity
    assert steps == [(done + 1, 5) for done in range(5)]


def test_the_reference_holds_the_weights_of_one_layer_at_a_time():
    decoder = Decoder(recipe_source(RECIPE))
    sequences = [list(text.tokens) for text in TEXTS]
    held: list[set[str]] = []
    together = decoder.hidden_of_each(
        sequences, lambda layer: held.append({*decoder.weights, str(layer)})
    )
    assert held == [{"0"}, {"1"}], "weights of a layer outlive it"
    for ids, hidden in zip(sequences, together, strict=True):
        assert torch.equal(decoder.logits(hidden), Decoder(recipe_source(RECIPE)).forward(ids))


def test_rows_of_the_embedding_are_the_same_whether_it_is_loaded_or_not():
    decoder = Decoder(recipe_source(RECIPE))
    ids = [5, 5, 319, 0]
    apart = decoder.embed(ids)
    assert not list(decoder.weights)
    assert torch.equal(apart, decoder.weights["embed"][ids])
    assert torch.equal(apart, decoder.embed(ids))
    with pytest.raises(IndexError, match="row 320 of embed, expected 0 to 319"):
        Decoder(recipe_source(RECIPE)).embed([320])


def test_a_format_that_agrees_too_rarely_is_refused():
    check_quality(Quality(10, 0.8, 2.0, 2.0), formats_of(Format.W8A8))
    with pytest.raises(InfeasibleError, match=r"w8a8 changes the model too much.*79\.0%"):
        check_quality(Quality(10, 0.79, 2.0, 2.0), formats_of(Format.W8A8))
