"""Token-exactness: what is compared, and that a planted difference is found."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import documented
import msgspec
import numpy as np
import pytest
from compiled_models import Recipe
from tree_plans import FORK, FORKED, GROWTH, LONG, tree_plan
from varied_plans import varied_plan

from planner import cli
from planner.prompt_file import Prompt, bundled_prompts
from planner.verify import cycles_to_verify, decode, reference_label, verify
from profiles.words import AttentionKernel, SubLayerId
from runtime.cycle import Decoding, Draft
from runtime.plan import Residency
from runtime.plan_cycles import ALONE, OFF, Cycle, DraftShape, DraftSource
from runtime.plan_folder import read_plan
from runtime.sampling import GREEDY, Sampling
from runtime.session import Session, load
from runtime.tree import Accepted

Compiled = Callable[[Recipe], Path]

SKIP = Cycle(DraftSource.SKIP, 3, mask=1)
NGRAM = Cycle(DraftSource.NGRAM, 5, ngram_min=2, ngram_max=3)
SKIPPING = Recipe(masks=((2, 5),), faint=(2, 5), cycles=((0, SKIP),))
CHANGING = Recipe(masks=((2, 5),), faint=(2, 5), cycles=((0, NGRAM), (40, SKIP), (80, OFF)))
PLAIN = Recipe()
ALONE_EVERYWHERE = Recipe(cycles=((0, ALONE),))
LOADED = Recipe(
    masks=((2, 5),),
    faint=(2, 5),
    attention=AttentionKernel.EXACT,
    cycles=((0, FORKED), (20, OFF)),
    draft_seed=0,
    trees=(FORK, LONG),
    growths=(GROWTH,),
)
PROMPTS = [Prompt("one", "code", "for the end of"), Prompt("two", "chat", "in the self")]
SAMPLED = Sampling(temperature=1.0, seed=3)


def quiet(stage: str, done: int, total: int) -> None:
    """A report that nobody hears."""
    assert 0 < done <= total, stage


@pytest.fixture
def wrong_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify pass that, whenever there is a draft, takes its first token unseen."""
    honest = Decoding._verify

    def gullible(self: Decoding, draft: Draft, cycle: Cycle) -> tuple[Accepted, float]:
        accepted, us = honest(self, draft, cycle)
        drafted = draft.tree.tokens[1:2]
        if drafted and accepted.tokens[:1] != drafted:
            accepted.tokens[-1] = drafted[0]
        return accepted, us

    monkeypatch.setattr(Decoding, "_verify", gullible)


@pytest.mark.parametrize("recipe", [SKIPPING, CHANGING, PLAIN], ids=["skip", "buckets", "off"])
def test_tiny_plans_are_token_exact(compiled: Compiled, recipe: Recipe) -> None:
    with load(compiled(recipe)) as session:
        result = verify(session, PROMPTS, [GREEDY, SAMPLED], 48, quiet)
    assert result.exact
    assert result.prompts == 2
    assert result.tokens == 2 * 2 * 48
    assert result.samplings == ("greedy", "sampled")


@pytest.mark.parametrize("streamed", [(), (1, 2, 5)], ids=["memory", "streamed"])
def test_every_tree_of_every_source_is_token_exact(
    compiled: Compiled, streamed: tuple[int, ...]
) -> None:
    residency = Residency(tuple(map(SubLayerId, streamed)), 2, 1 << 16) if streamed else None
    recipe = msgspec.structs.replace(LOADED, residency=residency)
    with load(compiled(recipe)) as session:
        result = verify(session, PROMPTS, [GREEDY, SAMPLED], 24, quiet)
    assert result.exact
    assert len(result.cycles) == 10 + bool(streamed)
    assert ("off again" in result.cycles) is bool(streamed)


def test_every_cycle_and_draft_source_is_compared(compiled: Compiled) -> None:
    def of(recipe: Recipe) -> list[Cycle | None]:
        return list(cycles_to_verify(read_plan(compiled(recipe))).values())

    default_ngram = Cycle(DraftSource.NGRAM, 4, ngram_min=1, ngram_max=3)
    assert of(SKIPPING) == [SKIP, default_ngram]
    assert of(CHANGING) == [NGRAM, SKIP, None]
    assert of(PLAIN) == [default_ngram]


def test_every_tree_is_filled_by_the_draft_model_and_one_by_the_others() -> None:
    plan = tree_plan(FORKED, OFF)
    cycles = cycles_to_verify(plan)
    assert list(cycles) == [
        "134M draft, tree of 3 nodes",
        "as planned",
        "134M draft, chain of 4",
        "134M draft, tree of 5 nodes",
        "134M draft, online, up to 16 nodes",
        "skip mask 1, 4 drafted",
        "skip mask 1, tree of 5 nodes",
        "skip mask 1, online, up to 16 nodes",
        "n-gram 1-3, 4 drafted",
        "n-gram 1-3, tree of 5 nodes",
    ]
    assert list(cycles.values())[:2] == [FORKED, None]


def test_no_cycle_is_lost_to_another_of_the_same_name() -> None:
    plan = tree_plan(OFF)
    plan = msgspec.structs.replace(plan, trees=plan.trees * 3)
    cycles = cycles_to_verify(plan)
    drafted = [c for c in cycles.values() if c is not None and c.draft is DraftSource.MODEL]
    assert sorted(c.tree for c in drafted if c.shape is DraftShape.STATIC) == [0, 1, 2, 3, 4, 5]
    assert {"134M draft, tree of 3 nodes #2", "134M draft, tree of 3 nodes #3"} < set(cycles)


def test_a_streamed_plan_is_compared_with_its_own_plain_decoding() -> None:
    streamed = Residency((SubLayerId(3),), slots=1, read_bytes=1 << 20)
    plan = msgspec.structs.replace(varied_plan(cycles=(OFF,)), residency=streamed)
    assert cycles_to_verify(plan)["off again"] == OFF
    assert reference_label(plan) == "off, the plan's only plain decoding"


def test_the_verdict_says_which_plain_decoding_is_meant(compiled: Compiled) -> None:
    drafting, alone = read_plan(compiled(SKIPPING)), read_plan(compiled(ALONE_EVERYWHERE))
    assert reference_label(drafting) == "off, plain decoding in the passes that verify drafts"
    assert "decodes alone (ar)" in reference_label(alone)
    exact = read_plan(compiled(Recipe(attention=AttentionKernel.EXACT)))
    assert reference_label(exact) == "off, the plan's only plain decoding"


@pytest.mark.usefixtures("wrong_draft")
def test_a_planted_difference_names_prompt_position_and_tokens(compiled: Compiled) -> None:
    recipe = Recipe(masks=((0, 1, 2),), cycles=((0, Cycle(DraftSource.SKIP, 3, mask=1)),))
    with load(compiled(recipe)) as session:
        result = verify(session, PROMPTS, [GREEDY], 12, quiet)
        assert not result.exact
        found = result.divergences[0]
        assert found.prompt_id == "one"
        assert found.sampling == "greedy"
        ids = session.tokens.encode_prompt(PROMPTS[0].prompt, chat=True)
        plain = decode(session, ids, 12, GREEDY, OFF)
        assert found.expected_id == plain[found.position]
        assert found.found_id not in (None, found.expected_id)
        assert found.expected_text == session.tokens.decode([plain[found.position]])
        # The expected token is the greedy one, so its logit is the larger
        assert found.logit_gap is not None
        assert found.logit_gap > 0


def test_an_output_that_ends_early_differs(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Session.stream_ids

    def short(self: Session, prompt: Sequence[int], **settings: Any) -> Any:
        if settings["cycle"] is not OFF:
            settings["max_new_tokens"] = 3
        return honest(self, prompt, **settings)

    monkeypatch.setattr(Session, "stream_ids", short)
    with load(compiled(PLAIN)) as session:
        result = verify(session, PROMPTS[:1], [GREEDY], 5, quiet)
    (found,) = result.divergences
    assert (found.position, found.found_id, found.logit_gap) == (3, None, None)


def test_logits_are_those_that_plain_decoding_chooses_by(compiled: Compiled) -> None:
    with load(compiled(SKIPPING)) as session:
        ids = session.tokens.encode_prompt("for the end")
        plain = decode(session, ids, 6, GREEDY, OFF)
        for count, token in enumerate(plain):
            logits = session.logits_at([*ids, *plain[:count]])
            assert logits.shape == (session.plan.model.vocab,)
            assert int(np.argmax(logits)) == token


def prompt_file(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    lines = [{"id": p.id, "category": p.category, "prompt": p.prompt} for p in PROMPTS]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_the_command_says_yes(
    compiled: Compiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ["verify", str(compiled(CHANGING)), "--prompts", str(prompt_file(tmp_path))]
    request += ["--max-new-tokens", "16"]
    assert cli.main(request) == 0
    out = capsys.readouterr().out
    assert out.startswith("token-exact: yes (2 prompts, 64 tokens, cycles: n-gram 2-3, 5 drafted;")
    assert "\n  reference  off, plain decoding in the passes that verify drafts\n" in out
    assert cli.main([*request, "--no-sampled", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    keys = {*("token_exact", "prompts", "tokens", "cycles", "samplings", "divergences")}
    keys.add("reference")
    documented.check_keys("verify", data, keys)
    assert data["token_exact"] is True
    assert data["tokens"] == 32
    assert data["samplings"] == ["greedy"]


@pytest.mark.usefixtures("wrong_draft")
def test_the_command_fails_with_5_on_a_difference(
    compiled: Compiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe(masks=((0, 1, 2),), cycles=((0, Cycle(DraftSource.SKIP, 3, mask=1)),))
    request = ["verify", str(compiled(recipe)), "--prompts", str(prompt_file(tmp_path))]
    assert cli.main(request) == 5
    written = capsys.readouterr()
    assert written.out.startswith("token-exact: no (2 prompts, ")
    assert "prompt one, greedy, skip mask 1, 3 drafted: new token " in written.out
    assert "logit gap" in written.out
    assert written.err.startswith("error: ")
    assert written.err.count("\n") == 1
    assert cli.main([*request, "--json"]) == 5
    data = json.loads(capsys.readouterr().out)
    assert data["token_exact"] is False
    keys = {
        *("prompt_id", "cycle", "sampling", "position", "expected_id", "expected_text"),
        *("found_id", "found_text", "logit_gap"),
    }
    documented.check_keys("verify", data["divergences"][0], keys)


def test_the_bundled_prompts_are_the_default() -> None:
    from planner.commands.verify import choose_prompts

    assert choose_prompts(None, None) == bundled_prompts("verify")
    assert len(choose_prompts(None, None)) == 24
    assert len(choose_prompts(None, 5)) == 5
