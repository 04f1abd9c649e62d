"""Speculation against plain decoding, token by token and bit by bit, on tiny compiled models."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from compiled_models import (
    AR_US,
    CYCLE_US,
    DRAFT_US,
    FORMATS,
    HEAD_ROW_US,
    NGRAM_US,
    VERIFY_US,
    Recipe,
    recipe_source,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import GQA, MHA, UNTIED, VOCAB, WIDE_HEADS

from lowering.decoder import Decoder
from profiles.words import AttentionKernel, Format
from runtime.cycle import Decoding, Draft, bucket_at, commit_width
from runtime.kv_cache import KvCache
from runtime.plan_cycles import ALONE, OFF, Cycle, DraftSource
from runtime.plan_types import WIDEST_PASS
from runtime.sampling import GREEDY, Sampling
from runtime.session import FinishReason, Generation, Session
from runtime.tree import ROOT, TokenTree

SHAPES = {"gqa": GQA, "mha": MHA, "untied": UNTIED, "wide_heads": WIDE_HEADS}
# Mask 1 is often right, mask 2 now and then, mask 3 leaves nothing but the embedding
FAINT = (2, 3)
MASKS = (FAINT, (1, 2, 3), tuple(range(6)))
SAMPLED = Sampling(temperature=0.9, seed=11)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "nucleus": Sampling(temperature=1.3, top_k=20, top_p=0.8, seed=2**63),
}
PROMPT = [9, 40, 41, 42, 9, 40, 41, 77, 9, 40]

Compiled = Callable[[Recipe], Path]
Opened = Callable[..., Session]


def recipe(name: str = "gqa", fmt: Format = Format.W8A16, **changes: Any) -> Recipe:
    shape = SHAPES[name]
    masks = tuple(tuple(s for s in mask if s < 2 * shape.layers) for mask in MASKS)
    return Recipe(shape=shape, format=fmt, seed=1, masks=masks, faint=FAINT, **changes)


def skip(length: int, mask: int = 1) -> Cycle:
    return Cycle(DraftSource.SKIP, length, mask=mask)


def ngram(length: int, shortest: int = 1, longest: int = 3) -> Cycle:
    return Cycle(DraftSource.NGRAM, length, ngram_min=shortest, ngram_max=longest)


CYCLES = [
    *(
        skip(length, mask)
        for length, mask in zip(range(1, 9), (1, 2, 3, 0, 1, 2, 3, 1), strict=True)
    ),
    *(ngram(1), ngram(3), ngram(8), ngram(5, 2, 4)),
]


def generated(session: Session, ids: Sequence[int], **options: Any) -> Generation:
    """A finished generation, checked for what holds of every one."""
    pieces = list(session.stream_ids(ids, **options))
    done = session.last
    assert done is not None
    stats = done.stats
    assert list(itertools.chain(*pieces)) == list(done.token_ids)
    assert all(pieces)
    assert stats.new_tokens == len(done.token_ids) > 0
    assert stats.prompt_tokens == len(ids)
    assert stats.cycles == len(pieces)
    assert stats.accepted <= stats.drafted
    return done


def assert_same_tokens(
    session: Session, ids: Sequence[int], cycles: Sequence[Cycle], **options: Any
) -> int:
    """Speculation equals plain decoding; returns the accepted drafts."""
    plain = generated(session, ids, cycle=OFF, **options)
    assert plain.stats.drafted == 0
    accepted = 0
    for cycle in cycles:
        fast = generated(session, ids, cycle=cycle, **options)
        assert fast.token_ids == plain.token_ids, cycle
        assert (fast.text, fast.finish_reason) == (plain.text, plain.finish_reason)
        accepted += fast.stats.accepted
    return accepted


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_draft_source_gives_the_tokens_of_plain_decoding(
    opened: Opened, name: str, fmt: Format, sampling: Sampling
) -> None:
    session = opened(recipe(name, fmt))
    accepted = assert_same_tokens(*(session, PROMPT, CYCLES), max_new_tokens=40, sampling=sampling)
    assert accepted > 80, "drafts that are never right would prove little"


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(SHAPES)),
    fmt=st.sampled_from(FORMATS),
    cycle=st.builds(skip, st.integers(1, 8), st.integers(0, 3))
    | st.builds(ngram, st.integers(1, 8)),
    prompt=st.lists(st.integers(3, 9), min_size=1, max_size=70),
    count=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_request_gives_the_tokens_of_plain_decoding(
    opened, name, fmt, cycle, prompt, count, temperature, seed
) -> None:
    sampling = Sampling(temperature=temperature, seed=seed)
    session = opened(recipe(name, fmt))
    assert_same_tokens(session, prompt, [cycle], max_new_tokens=count, sampling=sampling)


def test_plain_decoding_gives_the_tokens_of_the_torch_reference(opened: Opened) -> None:
    for name in SHAPES:
        what = recipe(name, Format.F32)
        expected = Decoder(recipe_source(what)).greedy(PROMPT, 60)
        found = generated(opened(what), PROMPT, max_new_tokens=60)
        assert list(found.token_ids) == expected
        assert len(set(expected)) > 8, "a degenerate output would prove little"


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_prompt_of_one_token_needs_no_prefill(opened: Opened, fmt: Format) -> None:
    session = opened(recipe("gqa", fmt))
    for token in (0, 5, VOCAB - 1):
        assert_same_tokens(session, [token], CYCLES, max_new_tokens=12)


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", ["gqa", "mha"])
def test_the_whole_target_as_its_own_draft_is_always_accepted(
    opened: Opened, name: str, sampling: Sampling, length: int
) -> None:
    session = opened(recipe(name))
    done = generated(
        *(session, PROMPT), cycle=skip(length, mask=0), max_new_tokens=41, sampling=sampling
    )
    assert done.stats.accepted == done.stats.drafted > 0
    assert done.stats.cycles == -(-41 // (length + 1))


def test_one_new_token_is_never_drafted(opened: Opened) -> None:
    session = opened(recipe())
    for cycle in (OFF, *CYCLES):
        done = generated(session, PROMPT, max_new_tokens=1, cycle=cycle)
        assert (len(done.token_ids), done.stats.drafted) == (1, 0)
        assert done.finish_reason is FinishReason.LENGTH


def test_no_more_than_the_tokens_asked_for_are_drafted_or_given(opened: Opened) -> None:
    session = opened(recipe())
    for count in range(1, 20):
        done = generated(session, PROMPT, max_new_tokens=count, cycle=skip(8, mask=0))
        assert len(done.token_ids) == count
        assert done.stats.drafted + done.stats.cycles == count


@pytest.mark.parametrize("cycle", [OFF, *CYCLES], ids=str)
def test_decoding_ends_where_the_plans_context_ends(opened: Opened, cycle: Cycle) -> None:
    session = opened(recipe(context=48))
    for count in (1, 2, 9, 30):
        prompt = (PROMPT * 5)[: 48 - count]
        assert_same_tokens(session, prompt, [cycle], max_new_tokens=100)
        done = generated(session, prompt, max_new_tokens=100, cycle=cycle)
        assert done.finish_reason is FinishReason.CONTEXT
        assert len(done.token_ids) == count
        done = generated(session, prompt, max_new_tokens=count, cycle=cycle)
        assert done.finish_reason is FinishReason.LENGTH


def test_a_context_that_several_cache_growths_serve_changes_nothing(compiled: Compiled) -> None:
    tokens = set()
    for growth_tokens, chunk in ((1, 1), (7, 3), (32, 16), (256, 64)):
        folder = compiled(recipe(growth_tokens=growth_tokens, chunk=chunk))
        with Session(folder) as session:
            for cycle in (OFF, skip(6), ngram(6)):
                done = generated(session, PROMPT * 5, max_new_tokens=80, cycle=cycle)
                tokens.add(done.token_ids)
    assert len(tokens) == 1


def test_an_outgrown_cache_is_freed(compiled: Compiled) -> None:
    exact = AttentionKernel.EXACT
    with Session(compiled(recipe(growth_tokens=16, attention=exact))) as session:
        generated(session, PROMPT, max_new_tokens=3, cycle=skip(2))
        outgrown = weakref.ref(session._cache.keys)
        generated(session, PROMPT, max_new_tokens=40, cycle=OFF)
        assert outgrown() is None


class Watched:
    """A decoding whose cache can be compared with that of plain decoding."""

    def __init__(
        self, session: Session, cycle: Cycle, sampling: Sampling = GREEDY, room: int = 10**6
    ) -> None:
        plan = session.plan
        self.cache = KvCache(plan.model, plan.kv.growth_tokens, plan.context + WIDEST_PASS)
        self.run = Decoding(plan, session._target, self.cache, PROMPT, sampling, cycle)
        self.run.prefill()
        self.room = room

    def step(self) -> int:
        """Tokens that one cycle added; the invariant between cycles is checked."""
        before = len(self.run.tokens)
        done = self.run.step(self.room)
        assert self.cache.length == len(self.run.tokens) - 1
        assert done.committed == len(self.run.tokens) - before == done.accepted + 1
        return done.committed

    def bits(self) -> tuple[bytes, bytes]:
        """Keys and values in front of the cursor."""
        length = self.cache.length
        return (
            self.cache.keys[:, :, :length].tobytes(),
            self.cache.values[:, :, :length].tobytes(),
        )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_after_every_cycle_the_cache_is_bit_equal_to_plain_decodings(
    opened: Opened, name: str, fmt: Format, sampling: Sampling
) -> None:
    session = opened(recipe(name, fmt))
    for cycle in (skip(4, 0), skip(4, 1), skip(3, 3), ngram(6)):
        plain, fast = Watched(session, OFF, sampling), Watched(session, cycle, sampling)
        while len(fast.run.tokens) < 60:
            for _ in range(fast.step()):
                plain.step()
            assert fast.run.tokens == plain.run.tokens
            assert fast.bits() == plain.bits()


def draft_of(tokens: Sequence[int]) -> Callable[..., Draft]:
    """A replacement of ``Decoding._draft`` that drafts what is given."""

    def draft(run: Decoding, _cycle: Cycle, length: int) -> Draft:
        tree, node = TokenTree(run.tokens[-1]), ROOT
        for token in tokens[:length]:
            node = tree.add(node, token)
        return Draft(tree)

    return draft


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_cycle_whose_draft_goes_wrong_leaves_no_trace(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, name: str, fmt: Format, right: int
) -> None:
    session = opened(recipe(name, fmt))
    plain = Watched(session, OFF)
    for _ in range(30):
        plain.step()
    truth = plain.run.tokens[len(PROMPT) :]
    fast = Watched(session, skip(7))
    for done in range(0, 24, right + 1):
        wrong = [(token + 1) % VOCAB for token in truth[done + right :]]
        draft = [*truth[done : done + right], *wrong]
        monkeypatch.setattr(Decoding, "_draft", draft_of(draft))
        assert fast.step() == right + 1
    monkeypatch.undo()
    straight = Watched(session, OFF)
    while len(straight.run.tokens) < len(fast.run.tokens):
        straight.step()
    assert fast.run.tokens == straight.run.tokens
    assert fast.bits() == straight.bits()


def spellings(session: Session, ids: Sequence[int], count: int) -> tuple[int, ...]:
    return generated(session, ids, max_new_tokens=count).token_ids


@pytest.mark.parametrize("cycle", [OFF, *CYCLES], ids=str)
def test_decoding_ends_with_the_first_eos(opened: Opened, cycle: Cycle) -> None:
    free = spellings(opened(recipe()), PROMPT, 60)
    for place in (0, 1, 2, 5, 11, 20):
        eos = free[place]
        session = opened(recipe(eos_ids=(eos,)))
        done = generated(session, PROMPT, max_new_tokens=60, cycle=cycle)
        assert done.token_ids == free[: free.index(eos) + 1]
        assert done.finish_reason is FinishReason.EOS
        assert session._cache.length == len(PROMPT) + len(done.token_ids) - 1


@pytest.mark.parametrize("place", range(8))
def test_what_was_accepted_past_an_eos_is_dropped(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    free = spellings(opened(recipe()), PROMPT, 20)
    eos = free[place]
    session = opened(recipe(eos_ids=(eos,)))
    monkeypatch.setattr(Decoding, "_draft", draft_of(free))
    done = generated(session, PROMPT, max_new_tokens=60, cycle=skip(20))
    kept = free.index(eos) + 1
    assert done.token_ids == free[:kept]
    assert (done.stats.cycles, done.stats.drafted, done.stats.accepted) == (1, 20, kept)
    monkeypatch.undo()
    # What the dropped rows left behind is not seen by the next generation
    assert_same_tokens(session, PROMPT[:4], [skip(3)], max_new_tokens=30)


def test_of_several_eos_the_first_to_come_ends_it(opened: Opened) -> None:
    free = spellings(opened(recipe()), PROMPT, 60)
    early, late = free[4], free[15]
    session = opened(recipe(eos_ids=(late, early)))
    for cycle in (OFF, *CYCLES):
        done = generated(session, PROMPT, max_new_tokens=60, cycle=cycle)
        assert done.token_ids == free[: min(free.index(early), free.index(late)) + 1]


def test_without_an_eos_only_length_and_context_end_it(opened: Opened) -> None:
    session = opened(recipe(context=64))
    assert session.plan.model.tokenizer.eos_ids == ()
    for cycle in (OFF, *CYCLES):
        done = generated(session, PROMPT, max_new_tokens=1000, cycle=cycle)
        assert done.finish_reason is FinishReason.CONTEXT
        assert len(done.token_ids) == session.plan.context - len(PROMPT)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_passes_padded_to_32_give_the_tokens_of_unpadded_ones(
    opened: Opened, sampling: Sampling
) -> None:
    for name, fmt in itertools.product(SHAPES, FORMATS):
        phone = opened(recipe(name, fmt, width_step=32, soc="SM8650"), emulate=True)
        assert {c.width_step for c in phone.plan.numerics} == {1, 32}
        expected = generated(
            opened(recipe(name, fmt)), PROMPT, max_new_tokens=40, sampling=sampling
        )
        for cycle in (OFF, skip(4), ngram(6)):
            found = generated(phone, PROMPT, max_new_tokens=40, cycle=cycle, sampling=sampling)
            assert found.token_ids == expected.token_ids


BUCKETED = ((0, ngram(5)), (20, skip(3)), (50, OFF), (70, skip(8, 2)))


def test_a_plans_buckets_give_the_tokens_of_plain_decoding(opened: Opened) -> None:
    session = opened(recipe(cycles=BUCKETED))
    plain = generated(session, PROMPT, max_new_tokens=100, cycle=OFF)
    planned = generated(session, PROMPT, max_new_tokens=100)
    assert planned.token_ids == plain.token_ids
    assert 0 < planned.stats.speculating_cycles < planned.stats.cycles


def test_a_bucket_is_left_upwards_at_its_border_and_downwards_with_hysteresis(
    opened: Opened,
) -> None:
    plan = opened(recipe(cycles=BUCKETED)).plan
    assert plan.hysteresis_tokens == 4
    assert [bucket_at(plan, tokens, 0) for tokens in (0, 19, 20, 49, 50, 255)] == [0, 0, 1, 1, 2, 3]
    assert [bucket_at(plan, tokens, 1) for tokens in (20, 16, 15, 50)] == [1, 1, 0, 2]
    assert bucket_at(plan, 10_000, 0) == 3


def test_a_committing_pass_is_as_wide_as_every_numerics_class_asks(opened: Opened) -> None:
    phone = opened(recipe(width_step=32, soc="SM8650"), emulate=True).plan.numerics
    host = opened(recipe("mha")).plan.numerics
    assert [commit_width(phone, rows) for rows in (1, 32, 33)] == [32, 32, 64]
    # more than 32 rows are cut into blocks, and none may be left with one row
    assert [commit_width(host, rows) for rows in (1, 2, 3, 33, 34)] == [2, 2, 3, 34, 34]


def test_simulated_time_adds_up_the_plans_tables(opened: Opened) -> None:
    session = opened(recipe())

    def simulated(cycle: Cycle, count: int) -> float:
        return generated(session, PROMPT, max_new_tokens=count, cycle=cycle).stats.simulated_us

    alone, one = (CYCLE_US + us + HEAD_ROW_US for us in (AR_US, VERIFY_US))
    assert simulated(ALONE, 7) == pytest.approx(7 * alone)
    assert simulated(OFF, 7) == pytest.approx(7 * one)
    # A drafting pass is listed with its head, and pays the constant of a pass
    drafting = 3 * (DRAFT_US + CYCLE_US)
    assert simulated(skip(3, 0), 8) == pytest.approx(
        2 * (CYCLE_US + drafting + VERIFY_US + 4 * HEAD_ROW_US)
    )
    # A look-up costs the same whether it finds something or not
    assert simulated(ngram(1, 30, 30), 3) == pytest.approx(3 * one + 2 * NGRAM_US)
