"""Many generations on one session: stop strings, turns that share a beginning, full contexts."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from compiled_models import Recipe
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EOS_ID

from profiles.errors import InputError
from runtime import backends
from runtime.cycle import Decoding
from runtime.plan_cycles import OFF, Cycle, DraftSource
from runtime.sampling import GREEDY, Sampling
from runtime.session import FinishReason, Session

Compiled = Callable[[Recipe], Path]

SKIP = Cycle(DraftSource.SKIP, 5, mask=1)
NGRAM = Cycle(DraftSource.NGRAM, 5, ngram_min=1, ngram_max=3)
WHOLE = Cycle(DraftSource.SKIP, 7, mask=0)
CYCLES = (OFF, SKIP, NGRAM, WHOLE)
RECIPE = Recipe(
    seed=1, masks=((2, 3),), faint=(2, 3), eos_ids=(EOS_ID,), cycles=((0, NGRAM), (40, SKIP))
)
PROMPT = "the cat and the cat in the hat"
SAMPLED = Sampling(temperature=1.1, seed=3)


@pytest.fixture(scope="module")
def session(compiled: Compiled) -> Iterator[Session]:
    with Session(compiled(RECIPE)) as opened:
        yield opened


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rows(session: Session) -> bytes:
    cache = session._cache
    return cache.keys[:, :, : cache.length].tobytes() + cache.values[:, :, : cache.length].tobytes()


@pytest.mark.parametrize("cycle", CYCLES, ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it(
    session: Session, cycle: Cycle, sampling: Sampling
) -> None:
    options: dict[str, Any] = {"cycle": cycle, "sampling": sampling, "ignore_eos": True}
    free = session.generate(PROMPT, **options)
    assert len(free.text) > 30
    for start in (0, 1, 7, 20):
        for size in (1, 2, 5):
            stop = free.text[start : start + size]
            if "\ufffd" in stop:
                continue
            pieces = list(session.stream(PROMPT, stop=["never there", stop], **options))
            done = session.finished()
            assert "".join(pieces) == done.text == free.text[: free.text.index(stop)]
            assert done.finish_reason is FinishReason.STOP
            assert all(pieces)
            # The last token is the one that completes the stop string
            kept = len(done.token_ids)
            assert done.token_ids == free.token_ids[:kept]
            assert stop in session.tokens.decode(done.token_ids)
            assert stop not in session.tokens.decode(done.token_ids[:-1])
            assert done.stats.new_tokens == kept
            assert session._cache.length == done.stats.prompt_tokens + kept - 1


def test_what_was_accepted_past_a_stop_string_leaves_no_trace(
    session: Session, compiled: Compiled
) -> None:
    free = session.generate(PROMPT, max_new_tokens=40, cycle=OFF)
    stop = free.text[4:7]
    done = session.generate(PROMPT, max_new_tokens=40, cycle=WHOLE, stop=stop)
    assert done.stats.drafted + done.stats.cycles > len(done.token_ids), "nothing was cut"
    ids = [*session.tokens.encode_prompt(PROMPT), *done.token_ids, 40, 41]
    with Session(compiled(RECIPE)) as fresh:
        fresh.logits_at(ids)
        session.logits_at(ids)
        assert rows(session) == rows(fresh)


def test_a_stop_string_that_never_comes_changes_nothing(session: Session) -> None:
    free = session.generate(PROMPT, max_new_tokens=40)
    done = session.generate(PROMPT, max_new_tokens=40, stop=["\x00\x01", free.text + "x"])
    assert (done.text, done.token_ids) == (free.text, free.token_ids)
    assert done.finish_reason is FinishReason.LENGTH


def test_an_empty_stop_string_is_refused_and_leaves_the_session_free(session: Session) -> None:
    for stop in ("", ["a", ""]):
        with pytest.raises(InputError, match="not a stop string"):
            session.generate(PROMPT, stop=stop)
    assert session.generate(PROMPT, max_new_tokens=2).token_ids


def test_an_ignored_eos_is_generated_past(compiled: Compiled, session: Session) -> None:
    free = session.generate(PROMPT, max_new_tokens=30)
    eos = free.token_ids[3]
    with Session(compiled(msgspec.structs.replace(RECIPE, eos_ids=(eos,)))) as ending:
        assert ending.generate(PROMPT).finish_reason is FinishReason.EOS
        for cycle in CYCLES:
            done = ending.generate(PROMPT, max_new_tokens=30, ignore_eos=True, cycle=cycle)
            assert done.token_ids == free.token_ids
            assert done.finish_reason is FinishReason.LENGTH


def test_without_a_number_of_tokens_only_the_context_ends_it(session: Session) -> None:
    done = session.generate(PROMPT, max_new_tokens=None, ignore_eos=True)
    assert done.finish_reason is FinishReason.CONTEXT
    assert done.stats.prompt_tokens + len(done.token_ids) == session.plan.context


def test_messages_are_put_into_the_models_template(session: Session) -> None:
    by_hand = (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nyes?<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    turns = [say("user", "hi"), say("assistant", "yes?"), say("user", "bye")]
    expected = session.generate(by_hand, max_new_tokens=9).token_ids
    given_twice = session.generate(turns, system="Be brief", max_new_tokens=9)
    assert given_twice.token_ids == expected
    assert session.generate([say("system", "Be brief"), *turns], max_new_tokens=9) is not None
    assert session.finished().token_ids == expected


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "no messages"),
        ([say("user", "hi"), {"role": "user"}], r"messages\[1\]"),
        ([{"content": "hi"}], r"messages\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]"),
        (["hi"], r"messages\[0\]"),
        ([say("system", "a"), say("user", "b")], "system message already"),
    ],
)
def test_malformed_conversations_are_named(session: Session, messages: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        session.generate(messages, system="Be brief")


@pytest.mark.parametrize("cycle", CYCLES, ids=str)
def test_a_second_turn_reads_only_what_is_new(compiled: Compiled, cycle: Cycle) -> None:
    with Session(compiled(RECIPE)) as session:
        turns = [say("user", "the cat")]
        first = session.generate(turns, max_new_tokens=12, cycle=cycle)
        assert first.stats.reused_tokens == 0
        held = [*session.tokens.encode_prompt(turns), *first.token_ids]
        turns += [say("assistant", first.text), say("user", "and the hat")]
        ids = session.tokens.encode_prompt(turns)
        # A random model's answer is seldom what the tokenizer makes of its text
        shared = next(i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b)
        assert shared >= first.stats.prompt_tokens
        second = session.generate(turns, max_new_tokens=12, cycle=cycle)
        assert second.stats.reused_tokens == shared
        again = session.generate(turns, max_new_tokens=12, cycle=cycle)
        assert again.stats.reused_tokens == len(ids) - 1
    with Session(compiled(RECIPE)) as fresh:
        alone = fresh.generate(turns, max_new_tokens=12, cycle=cycle)
    assert alone.stats.reused_tokens == 0
    assert alone.token_ids == second.token_ids == again.token_ids


@pytest.mark.parametrize("cycle", CYCLES, ids=str)
def test_an_answer_that_is_sent_back_is_not_read_again(session: Session, cycle: Cycle) -> None:
    list(session.stream_ids([5, 6, 7], max_new_tokens=20, cycle=cycle))
    answer = session.finished().token_ids
    list(session.stream_ids([5, 6, 7, *answer, 8, 9], max_new_tokens=4, cycle=cycle))
    assert session.finished().stats.reused_tokens == 3 + len(answer) - 1


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sequence_of_requests_gives_what_each_gives_alone(
    session: Session, alone: Callable[..., Any], data: Any
) -> None:
    """Requests share beginnings, stop early, are given up, and grow and shrink the context."""
    for _ in range(data.draw(st.integers(1, 5))):
        ids = [9, 40, 41, 42] * data.draw(st.integers(1, 40))
        ids = [*ids, *data.draw(st.lists(st.integers(3, 50), max_size=3))]
        cycle = data.draw(st.sampled_from(CYCLES))
        steps = data.draw(st.integers(1, 6))
        stream = session.stream_ids(ids, max_new_tokens=20, cycle=cycle)
        if data.draw(st.booleans()):
            found = [token for new in stream for token in new]
            assert session.finished().finish_reason is not None
        else:
            found = [token for _, new in zip(range(steps), stream, strict=False) for token in new]
            stream.close()
        assert tuple(found) == alone(tuple(ids))[: len(found)]


@pytest.fixture(scope="module")
def alone(compiled: Compiled) -> Iterator[Callable[..., Any]]:
    """What a prompt gives when nothing of an earlier generation is reused."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    with Session(compiled(RECIPE)) as other:

        def answer(ids: tuple[int, ...]) -> tuple[int, ...]:
            if ids not in known:
                other._latest = None
                list(other.stream_ids(ids, max_new_tokens=20, cycle=OFF))
                assert other.finished().stats.reused_tokens == 0
                known[ids] = other.finished().token_ids
            return known[ids]

        yield answer


@pytest.mark.parametrize("at", ["reuse", "prefill", "step", "keep"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_an_interrupt_anywhere_leaves_a_session_that_answers_right(
    session: Session,
    alone: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    late: bool,
) -> None:
    honest = getattr(Decoding, at)

    def interrupted(run: Decoding, *arguments: Any) -> Any:
        if late:
            honest(run, *arguments)
        raise KeyboardInterrupt

    first, second = (9, 40, 41, 42) * 12, (9, 40, 41, 42, 9, 77) * 9
    list(session.stream_ids(first, max_new_tokens=20))
    monkeypatch.setattr(Decoding, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(session.stream_ids(second, max_new_tokens=20))
    monkeypatch.undo()
    for ids in (second, first):
        list(session.stream_ids(ids, max_new_tokens=20))
        assert session.finished().token_ids == alone(ids)


def test_an_interrupt_between_chunks_keeps_what_was_read(session: Session) -> None:
    ids = [5, 6, 7, 8, 9] * 30

    def interrupt(done: int, total: int) -> None:
        assert total == len(ids) - 1
        if done >= 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(session.stream_ids(ids, max_new_tokens=2, progress=interrupt))
    list(session.stream_ids(ids, max_new_tokens=2))
    assert session.finished().stats.reused_tokens == 64


def test_a_hundred_generations_bind_no_more_than_a_few(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "MAX_BOUND_ROWS", 40)
    with Session(compiled(RECIPE)) as session:
        alone = {n: session.generate("x" * n, max_new_tokens=6).token_ids for n in (3, 60)}
        capacity = session._cache.capacity
        for number in range(100):
            session.generate("the hat " * (1 + number % 50), max_new_tokens=1 + number % 40)
        for n in (60, 3, 60):
            assert session.generate("x" * n, max_new_tokens=6).token_ids == alone[n]
        assert session._cache.capacity == capacity
        bindings = session._target._layers._bindings
        assert sum(bindings) <= 40
        assert all(bound.serves(session._cache) for bound in bindings.values())


@pytest.mark.parametrize("step", [1, 32], ids=["unpadded", "padded"])
@pytest.mark.parametrize("context", [63, 64, 65, 512])
def test_a_context_can_be_filled_to_its_last_slot(
    compiled: Compiled, step: int, context: int
) -> None:
    recipe = msgspec.structs.replace(
        RECIPE, context=context, width_step=step, soc="SM8650" if step > 1 else "", eos_ids=()
    )
    ids = list(range(3, 63)) * 10
    with Session(compiled(recipe), emulate=True) as session:
        texts = []
        for cycle in CYCLES:
            for length in (context - 1, context - 6, 40):
                list(session.stream_ids(ids[:length], max_new_tokens=None, cycle=cycle))
                done = session.finished()
                assert done.finish_reason is FinishReason.CONTEXT
                assert length + len(done.token_ids) == context
                assert session._cache.length == context - 1
                texts.append((length, done.token_ids))
        assert len(set(texts)) == 3
        with pytest.raises(InputError, match="larger --context"):
            list(session.stream_ids(ids[:context]))


def test_reading_a_long_prompt_is_told_chunk_by_chunk(session: Session) -> None:
    session.generate("z", max_new_tokens=1)
    told: list[tuple[int, int]] = []
    list(
        session.stream_ids(
            [5] * 100, max_new_tokens=3, progress=lambda done, total: told.append((done, total))
        )
    )
    assert [done for done, _ in told] == list(range(0, 99, session.plan.prefill.chunk))
    assert {total for _, total in told} == {99}
    assert all(later > earlier for (earlier, _), (later, _) in pairwise(told))
