"""What a generation says of weights streamed from flash, cycle by cycle, and of its time."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from compiled_models import Recipe

from profiles.words import AttentionKernel, SubLayerId
from runtime import Session, load
from runtime.draft_model import CATCH_UP_ROWS
from runtime.flash import FlashCounters
from runtime.plan import Residency
from runtime.plan_cycles import OFF, Cycle, DraftSource
from runtime.stats import Stats
from runtime.weight_ranges import aligned, sub_layer_bytes

EXACT = AttentionKernel.EXACT
STREAMED = tuple(map(SubLayerId, (1, 2, 5)))
RECIPE = Recipe(
    attention=EXACT,
    masks=((3, 4), (1, 2, 5), (1, 4)),
    faint=(1, 2, 3, 4, 5),
    residency=Residency(STREAMED, 2, 4096),
)
CYCLES = {
    "off": OFF,
    "ngram": Cycle(DraftSource.NGRAM, 7, ngram_min=1, ngram_max=3),
    "skip none that streams": Cycle(DraftSource.SKIP, 4, mask=1),
    "skip all that streams": Cycle(DraftSource.SKIP, 4, mask=2),
    "skip some that streams": Cycle(DraftSource.SKIP, 4, mask=3),
}
MODEL = Cycle(DraftSource.MODEL, 3)
DRAFTING = Recipe(attention=EXACT, draft_seed=0, cycles=((0, MODEL),))
PROMPT = list(range(5, 5 + 4 * CATCH_UP_ROWS))
TOKENS = 40
PATIENCE_S = 20

Compiled = Callable[[Recipe], Path]


def streamed_bytes(session: Session) -> int:
    """Of a full pass, in whole blocks."""
    ranges = sub_layer_bytes(session.plan.tensors)
    return sum(aligned(ranges[sub_layer].bytes) for sub_layer in STREAMED)


def decoded(session: Session, cycle: Cycle | None = None) -> Stats:
    for _ in session.stream_ids(PROMPT, max_new_tokens=TOKENS, cycle=cycle, ignore_eos=True):
        pass
    return session.finished().stats


def wait_for_reader(session: Session) -> None:
    """Until the ring is full."""
    until, before = time.monotonic() + PATIENCE_S, FlashCounters()
    while session.flash != before and time.monotonic() < until:
        assert session.flash is not None
        before = session.flash
        time.sleep(0.1)


@pytest.mark.parametrize("rate", [None, 1e7])
@pytest.mark.parametrize("name", CYCLES)
def test_verify_passes_use_all_that_streams_and_nothing_else_counts(
    compiled: Compiled, name: str, rate: float | None
) -> None:
    with load(compiled(RECIPE), flash_rate=rate) as session:
        for _ in range(2):
            stats = decoded(session, CYCLES[name])
            assert stats.flash_bytes == stats.cycles * streamed_bytes(session)
            assert 0 <= stats.ahead_bytes <= stats.flash_bytes
            assert stats.exposed_io_us >= stats.stalled_us - 1e-3
            assert stats.read_us > 0
            assert session.flash is not None
            assert stats.read_us <= session.flash.reading_us + 1e-3
            assert stats.stalled_us <= session.flash.waited_us + 1e-3
            assert stats.exposed_io_us <= stats.verify_us


def test_what_the_ring_holds_when_a_pass_begins_is_ahead_of_it(compiled: Compiled) -> None:
    with load(compiled(RECIPE)) as session:
        stream = session.stream_ids(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
        next(stream)
        wait_for_reader(session)
        before = session.flash
        next(stream)
        after = session.flash
        stream.close()
        assert before is not None
        assert after is not None
        # One attention and two MLPs, two slots for each kind: all of a pass
        used = after.since(before)
        assert used.used_bytes == used.ahead_bytes == streamed_bytes(session)
        assert used.exposed_us == used.waited_us == 0


def test_nothing_is_ahead_of_a_pass_where_the_ring_was_given_up(compiled: Compiled) -> None:
    with load(compiled(RECIPE), flash_rate=1e6) as session:
        reader = session._target.reader
        assert reader is not None
        reader.restart(())
        before = reader.counters
        reader.restart(STREAMED)
        for sub_layer in STREAMED:
            reader.take(sub_layer)
            reader.release(sub_layer)
        used = reader.counters.since(before)
        assert used.used_bytes == streamed_bytes(session)
        assert used.ahead_bytes == 0
        assert 0 < used.waited_us <= used.exposed_us + 1e-3
        # Flash of 1 MB/s, which makes good 2 ms at most
        assert used.exposed_us >= used.used_bytes - 2000


def test_a_plan_in_memory_streams_nothing(compiled: Compiled) -> None:
    with load(compiled(msgspec.structs.replace(RECIPE, residency=None))) as session:
        stats = decoded(session)
        assert session.flash is None
    assert (stats.flash_bytes, stats.ahead_bytes) == (0, 0)
    assert (stats.read_us, stats.exposed_io_us, stats.stalled_us) == (0, 0, 0)


@pytest.mark.parametrize("cycle", [OFF, CYCLES["ngram"], CYCLES["skip all that streams"]])
def test_drafting_and_verifying_are_parts_of_the_decoding_time(
    compiled: Compiled, cycle: Cycle
) -> None:
    with load(compiled(RECIPE)) as session:
        stats = decoded(session, cycle)
    assert 0 < stats.draft_us + stats.verify_us <= stats.decode_us


def test_reading_the_prompt_is_no_drafting(compiled: Compiled) -> None:
    with load(compiled(DRAFTING)) as session:
        stats = decoded(session)
        assert session._draft is not None
        assert stats.drafted > 0
        assert stats.draft_passes == stats.drafted
        # A plain generation does not keep the draft model's rows up
        rows = session._draft[1]
        rows.keep([])
        decoded(session, OFF)
        assert not rows.tokens


def test_catching_up_after_plain_cycles_is_drafting(compiled: Compiled) -> None:
    begins = len(PROMPT) + 2 * CATCH_UP_ROWS
    later = msgspec.structs.replace(DRAFTING, cycles=((0, OFF), (begins, MODEL)))
    with load(compiled(later)) as session:
        stats = decoded(session)
    assert stats.drafted > 0
    assert stats.draft_passes == stats.drafted + 1


def test_counters_are_subtracted_one_by_one() -> None:
    many = FlashCounters(1, 2, 4, 8, 16, 32, 64)
    assert many.since(FlashCounters()) == many
    assert set(many.since(many)) == {0}
