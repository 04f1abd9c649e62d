"""The public face of the runtime: text in, text out, one generation at a time."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from compiled_models import FORMATS, Recipe
from tiny_models import EOS_ID

import runtime
from profiles.errors import IncompatibleError, InputError
from profiles.words import AttentionKernel, Format
from runtime.plan_cycles import OFF, Cycle, DraftSource
from runtime.sampling import GREEDY, Sampling
from runtime.session import FinishReason, Session

Compiled = Callable[[Recipe], Path]

SKIP = Cycle(DraftSource.SKIP, 4, mask=1)
NGRAM = Cycle(DraftSource.NGRAM, 4, ngram_min=1, ngram_max=3)
PLAIN = Recipe(seed=1, masks=((2, 3),), faint=(2, 3), eos_ids=(EOS_ID,))
RECIPE = msgspec.structs.replace(PLAIN, cycles=((0, NGRAM), (24, SKIP)))
PROMPT = "the cat and the cat in the hat"
SAMPLED = Sampling(temperature=1.2, seed=4)


@pytest.fixture(scope="module")
def session(compiled: Compiled) -> Iterator[Session]:
    with Session(compiled(RECIPE)) as opened:
        yield opened


def test_load_is_offered_by_the_package(compiled: Compiled) -> None:
    with runtime.load(compiled(RECIPE)) as session:
        assert isinstance(session, runtime.Session)
        done = session.generate(PROMPT, max_new_tokens=5)
    assert isinstance(done, runtime.Generation)
    assert len(done.token_ids) == 5


@pytest.mark.parametrize("cycle", [None, OFF, SKIP, NGRAM])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_pieces_of_a_stream_together_are_the_text(
    session: Session, cycle: Cycle | None, sampling: Sampling
) -> None:
    for prompt in ("a", PROMPT, "caf\u00e9 \U0001f600", "self return " * 8):
        options = {"max_new_tokens": 60, "cycle": cycle, "sampling": sampling}
        whole = session.generate(prompt, **options)
        pieces = list(session.stream(prompt, **options))
        assert "".join(pieces) == whole.text
        assert session.last is not None
        assert session.last.token_ids == whole.token_ids
        assert all(pieces)


def test_a_chat_is_put_into_the_models_template(session: Session) -> None:
    by_hand = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    chat = session.generate("hi", chat=True, max_new_tokens=9)
    assert chat.token_ids == session.generate(by_hand, max_new_tokens=9).token_ids
    system = session.generate("hi", chat=True, system="be brief", max_new_tokens=9)
    assert system.stats.prompt_tokens > chat.stats.prompt_tokens


@pytest.mark.parametrize("fmt", FORMATS)
def test_generations_on_one_session_equal_those_on_fresh_ones(
    compiled: Compiled, fmt: Format
) -> None:
    folder = compiled(msgspec.structs.replace(RECIPE, format=fmt))
    prompts = ("the hat " * 12, "a", PROMPT)
    with Session(folder) as session:
        shared = [session.generate(prompt, max_new_tokens=50) for prompt in prompts]
    for prompt, found in zip(prompts, shared, strict=True):
        with Session(folder) as fresh:
            alone = fresh.generate(prompt, max_new_tokens=50)
        assert (found.token_ids, found.text) == (alone.token_ids, alone.text)
        assert found.stats.cycles == alone.stats.cycles


def test_the_hundredth_generation_equals_the_first(session: Session) -> None:
    first = session.generate(PROMPT, max_new_tokens=12, sampling=SAMPLED)
    for number in range(98):
        session.generate(PROMPT[: 1 + number % 30], max_new_tokens=1 + number % 9)
    hundredth = session.generate(PROMPT, max_new_tokens=12, sampling=SAMPLED)
    assert hundredth.token_ids == first.token_ids


def test_another_number_of_threads_gives_the_same_tokens(
    compiled: Compiled, session: Session
) -> None:
    expected = session.generate(PROMPT, max_new_tokens=40)
    with Session(compiled(RECIPE), threads=2) as other:
        assert other.generate(PROMPT, max_new_tokens=40).token_ids == expected.token_ids


def test_a_seed_decides_what_is_sampled(session: Session) -> None:
    texts = {
        session.generate(
            PROMPT, max_new_tokens=10, sampling=Sampling(temperature=1.0, seed=seed)
        ).token_ids
        for seed in (1, 1, 2, 3)
    }
    assert len(texts) == 3


def test_a_session_that_is_generating_refuses_a_second_request(session: Session) -> None:
    expected = session.generate(PROMPT, max_new_tokens=30)
    stream = session.stream_ids(session.tokens.encode_prompt(PROMPT), max_new_tokens=30)
    begun = next(stream)
    for refused in (
        lambda: session.generate("x"),
        lambda: list(session.stream("x")),
        lambda: list(session.stream_ids([5])),
    ):
        with pytest.raises(InputError, match="generating already"):
            refused()
    rest = [token for new in stream for token in new]
    assert (*begun, *rest) == expected.token_ids


def test_a_stream_that_is_given_up_frees_the_session(session: Session) -> None:
    expected = session.generate(PROMPT, max_new_tokens=30)
    stream = session.stream(PROMPT, max_new_tokens=30)
    next(stream)
    stream.close()
    assert session.generate(PROMPT, max_new_tokens=30).token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("ids", "count", "what"),
    [
        ([], 5, "no tokens"),
        ([5], 0, "nothing to generate"),
        ([5], -1, "nothing to generate"),
        ([5] * 256, 5, "does not fit"),
        ([5] * 1000, 5, "does not fit"),
    ],
)
def test_a_request_that_cannot_be_served_is_an_input_error_and_leaves_the_session_free(
    session: Session, ids: list[int], count: int, what: str
) -> None:
    with pytest.raises(InputError, match=what) as caught:
        list(session.stream_ids(ids, max_new_tokens=count))
    assert caught.value.exit_code == 2
    assert session.generate(PROMPT, max_new_tokens=2).token_ids


def test_the_longest_prompt_that_fits_gets_one_token(session: Session) -> None:
    assert session.plan.context == 256
    assert [len(new) for new in session.stream_ids([5] * 255)] == [1]
    assert session.last is not None
    assert session.last.finish_reason is FinishReason.CONTEXT


def test_a_plan_of_another_device_runs_only_emulated(compiled: Compiled, session: Session) -> None:
    folder = compiled(msgspec.structs.replace(PLAIN, soc="SM8650"))
    with pytest.raises(IncompatibleError, match="another device, tiny-device") as caught:
        Session(folder)
    assert caught.value.exit_code == 3
    assert caught.value.expected == "SM8650"
    assert "--emulate" in str(caught.value)
    with Session(folder, emulate=True) as phone:
        done = phone.generate(PROMPT, max_new_tokens=20)
    expected = session.generate(PROMPT, max_new_tokens=20, cycle=OFF)
    assert done.token_ids == expected.token_ids
    assert done.stats.simulated_us > 0


def test_closing_twice_does_no_harm(compiled: Compiled) -> None:
    with Session(compiled(RECIPE)) as session:
        session.close()
    session.close()


@pytest.mark.parametrize(
    ("ids", "cycle", "says"),
    [
        ([-1], None, "no such token"),
        ([10**6], None, "no such token"),
        ([1], Cycle(DraftSource.SKIP, 3, mask=99), "no such skip mask"),
    ],
)
def test_ids_and_masks_outside_the_plan_are_refused(
    compiled: Callable[[Recipe], Path], ids: list[int], cycle: Cycle | None, says: str
) -> None:
    with Session(compiled(Recipe())) as session, pytest.raises(InputError, match=says):
        list(session.stream_ids(ids, cycle=cycle))


@pytest.mark.parametrize("threads", [0, -1, 999])
def test_threads_beyond_the_cores_are_refused(
    compiled: Callable[[Recipe], Path], threads: int
) -> None:
    with pytest.raises(InputError, match=r"so many threads.*expected 1 to"):
        Session(compiled(RECIPE), threads=threads)


def test_a_draft_is_never_verified_row_by_row(compiled: Callable[[Recipe], Path]) -> None:
    with Session(compiled(RECIPE)) as session:
        cycle = Cycle(DraftSource.NGRAM, 4, ngram_min=1, ngram_max=3, lone=True)
        with pytest.raises(InputError, match="several rows"):
            session.generate("a b a b", max_new_tokens=4, cycle=cycle)


def test_a_closed_session_says_so(compiled: Callable[[Recipe], Path]) -> None:
    session = Session(compiled(Recipe()))
    session.close()
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.generate("a")


def test_a_short_text_pays_for_no_long_one_before(compiled: Callable[[Recipe], Path]) -> None:
    with Session(compiled(Recipe(attention=AttentionKernel.EXACT))) as session:
        first = session.generate("short", max_new_tokens=4)
        small = session._cache.capacity
        session.generate("long " * 30, max_new_tokens=4)
        assert session._cache.capacity > small
        assert session.generate("short", max_new_tokens=4).token_ids == first.token_ids
        assert session._cache.capacity == small
