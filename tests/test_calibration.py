"""Calibration against plain, slow ways of measuring the same, and its memory on disk."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from compiled_models import Recipe
from tiny_models import GQA, MHA

from planner.agreement import (
    DepthCounts,
    draft_agreement,
    log_probability,
    pooled,
    skip_losses,
)
from planner.calibrate import Calibration, Store, read_store, split_prompts, write_store
from planner.corpus import Text, committed_cache, continue_prompts
from planner.prompt_file import Prompt, Split
from profiles.errors import InputError
from profiles.words import AttentionKernel, SubLayerId
from runtime.plan_cycles import OFF
from runtime.session import Session

RECIPE = Recipe(GQA, attention=AttentionKernel.EXACT, seed=3, masks=((1,), (0, 3)), faint=(1, 2, 3))
PROMPTS = ("the cat", "a b a b a b", "Zebra 12345 !?", "x")


@pytest.fixture(scope="module")
def session(compiled: Callable[[Recipe], Path]) -> Iterator[Session]:
    """A tiny model, loaded."""
    with Session(compiled(RECIPE)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def texts(session: Session) -> list[Text]:
    """Greedy continuations made in one batch."""
    prompts = [(p, "c", session.tokens.encode_prompt(p)) for p in PROMPTS]
    made = continue_prompts(session._target, prompts, 20, session.tokens, lambda _: None)
    for text, cache in made:
        alone, rows = committed_cache(session._target, text.tokens), len(text.tokens) - 1
        assert cache.length == rows
        for ours, theirs in ((cache.keys, alone.keys), (cache.values, alone.values)):
            assert np.array_equal(ours[:, :, :rows], theirs[:, :, :rows])
    return [text for text, _ in made]


def test_a_batch_of_prompts_says_what_each_says_alone(session: Session, texts: list[Text]) -> None:
    for prompt, text in zip(PROMPTS, texts, strict=True):
        alone = session.generate(prompt, max_new_tokens=20, cycle=OFF)
        assert text.tokens[text.prompt_tokens :] == alone.token_ids
    assert {len(text.tokens) - text.prompt_tokens for text in texts} == {20}


def slow_agreement(session: Session, text: Text, mask: int, depth: int) -> DepthCounts:
    """Draft from every root with the runtime's own passes, one token at a time."""
    target = session._target
    active = target.active(session.plan.masks[mask].skipped)
    tried, accepted = [0] * depth, [0] * depth
    for root in text.roots:
        prefix = Text(text.id, "c", text.prompt_tokens, text.tokens[: root + 1])
        cache = committed_cache(target, prefix.tokens)
        token = text.tokens[root]
        for level in range(depth):
            if root + level + 1 >= len(text.tokens):
                break
            result = target.run_chain([token], root + level, cache, active)
            cache.write(root + level, result.keys, result.values, slice(0, 1))
            token = int(target.logits(result.hidden)[0].argmax())
            tried[level] += 1
            if token != text.tokens[root + level + 1]:
                break
            accepted[level] += 1
    return DepthCounts(tuple(tried), tuple(accepted))


@pytest.mark.parametrize("mask", [1, 2])
def test_agreement_in_wide_passes_equals_drafting_one_by_one(
    session: Session, texts: list[Text], mask: int
) -> None:
    for text in texts[:3]:
        cache = committed_cache(session._target, text.tokens)
        skipped = session.plan.masks[mask].skipped
        fast = draft_agreement(session._target, text, cache, skipped, 4)
        assert fast == slow_agreement(session, text, mask, 4)
        assert cache.length == len(text.tokens) - 1


def test_a_draft_that_leaves_nothing_out_always_agrees(session: Session, texts: list[Text]) -> None:
    for text in texts:
        cache = committed_cache(session._target, text.tokens)
        counts = draft_agreement(session._target, text, cache, (), 5)
        assert counts.accepted == counts.tried
        assert counts.tried == tuple(len(text.roots) - level for level in range(5))


def test_single_skips_equal_passes_that_skip_one(session: Session, texts: list[Text]) -> None:
    target, text = session._target, texts[0]
    roots = list(text.roots)[::3]
    cache = committed_cache(target, text.tokens)
    losses = skip_losses(target, text, cache, roots)
    following = np.array(text.tokens)[np.array(roots) + 1]
    for sub_layer, loss in enumerate(losses):
        counts = draft_agreement(target, text, cache, [SubLayerId(sub_layer)], 1)
        every = skip_losses(target, text, cache, list(text.roots))[sub_layer]
        assert every.hits == counts.accepted[0]
        assert loss.positions == len(following)
        assert loss.log_loss >= 0


def test_pooling_weighs_by_positions(session: Session, texts: list[Text]) -> None:
    target = session._target
    parts = []
    for text in texts[:2]:
        cache = committed_cache(target, text.tokens)
        parts.append(skip_losses(target, text, cache, list(text.roots)[: 5 + 3 * len(parts)]))
    joint = pooled(parts)
    for index, loss in enumerate(joint):
        assert loss.positions == 13
        assert loss.hits == parts[0][index].hits + parts[1][index].hits


def test_log_probability_is_log_softmax() -> None:
    logits = np.array([[0.0, 1.0, 2.0], [1e4, 0.0, -1e4]], np.float32)
    expected = 2.0 - np.log(np.exp([0.0, 1.0, 2.0]).sum())
    assert log_probability(logits, np.array([2, 0])) == pytest.approx([expected, 0.0])


def calibration(session: Session, folder: Path, said: list[str]) -> Calibration:
    """A calibration of the tiny model over six prompts."""
    prompts = [Prompt(f"p{i}", "c", f"say {i} again {i}") for i in range(6)]
    return Calibration(
        session._target,
        session.tokens,
        prompts,
        context=512,
        digest="d" * 64,
        folder=folder,
        report=lambda stage, *_: said.append(stage),
    )


def test_what_was_measured_is_remembered(session: Session, tmp_path: Path) -> None:
    said: list[str] = []
    first = calibration(session, tmp_path, said)
    losses = first.skip_losses()
    counts = first.draft_agreement([SubLayerId(1)], Split.RESCORE, 3)
    assert any("continuing" in stage for stage in said)
    said.clear()
    second = calibration(session, tmp_path, said)
    assert second.skip_losses() == losses
    assert second.draft_agreement([SubLayerId(1)], Split.RESCORE, 3) == counts
    assert second.draft_agreement([SubLayerId(1)], Split.RESCORE, 2).tried == counts.tried[:2]
    assert not any("continuing" in stage or "drafting" in stage for stage in said)


def test_an_interrupted_calibration_goes_on_where_it_stopped(
    session: Session, tmp_path: Path
) -> None:
    class StopError(Exception):
        pass

    def stop(stage: str, done: int, _total: int) -> None:
        if "leaving out" in stage and done == 1:
            raise StopError

    first = calibration(session, tmp_path, [])
    first.report = stop
    with pytest.raises(StopError):
        first.skip_losses()
    left = read_store(tmp_path / f"{'d' * 64}.json")
    assert len(left.losses) == 1
    assert Split.SEARCH in left.texts
    whole = calibration(session, tmp_path, []).skip_losses()
    fresh = calibration(session, tmp_path / "fresh", []).skip_losses()
    assert whole == fresh


def test_a_damaged_or_unwritable_cache_costs_only_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(b'{"texts": 3')
    with caplog.at_level(logging.WARNING):
        assert read_store(file) == Store()
        assert "ignoring" in caplog.text
        blocked = tmp_path / "file"
        blocked.write_text("")
        write_store(blocked / "below" / "c.json", Store())
        assert "cannot keep" in caplog.text
    write_store(file, Store())
    assert read_store(file) == Store()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.json", "file"]


def test_prompts_without_a_split_are_dealt_out_and_too_few_are_refused() -> None:
    prompts = [Prompt(str(i), "c", "x") for i in range(6)]
    assert {s: len(p) for s, p in split_prompts(prompts).items()} == dict.fromkeys(Split, 2)
    with pytest.raises(InputError, match="too few prompts"):
        split_prompts(prompts[:2])


def test_shapes_without_groups_work_too(compiled: Callable[[Recipe], Path]) -> None:
    with Session(compiled(Recipe(MHA, attention=AttentionKernel.EXACT, masks=((1,),)))) as loaded:
        prompts = [("p", "c", loaded.tokens.encode_prompt("hello there"))] * 2
        made = continue_prompts(loaded._target, prompts, 12, loaded.tokens, lambda _: None)
        alone = loaded.generate("hello there", max_new_tokens=12, cycle=OFF)
        text = made[0][0]
        assert text.tokens[text.prompt_tokens :] == alone.token_ids
