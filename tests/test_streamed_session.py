"""Sessions of streamed plans: the tokens of those in memory, and faults that end in an error."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from broken_plans import seal
from compiled_models import Recipe
from tiny_models import MHA, QWEN2

from profiles.errors import FlashError, InputError
from profiles.words import AttentionKernel, SubLayerId
from runtime import load
from runtime.plan import Residency
from runtime.plan_cycles import OFF, Cycle, DraftSource
from runtime.sampling import Sampling

EXACT = AttentionKernel.EXACT
CYCLES = {
    "off": OFF,
    "ngram": Cycle(DraftSource.NGRAM, 7, ngram_min=1, ngram_max=3),
    "skip": Cycle(DraftSource.SKIP, 4, mask=1),
    "skip all that streams": Cycle(DraftSource.SKIP, 4, mask=2),
}
RESIDENT = Recipe(
    attention=EXACT, masks=((3, 4), (1, 2, 5)), faint=(1, 2, 3, 4, 5), cycles=((0, OFF),)
)
STREAMED = msgspec.structs.replace(
    RESIDENT, residency=Residency(tuple(map(SubLayerId, (1, 2, 5))), 1, 8192)
)
PROMPT = "return self for the and of"
SLOW = 2e6
PATIENCE_S = 20

Compiled = Callable[[Recipe], Path]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    # Other modules keep sessions open
    before = threading.enumerate()
    yield
    left = [t for t in threading.enumerate() if t not in before]
    assert not [t for t in left if t.name == "fulcrum-flash"]


def tokens(folder: Path, **options: Any) -> tuple[int, ...]:
    with load(folder) as session:
        return session.generate(PROMPT, max_new_tokens=40, **options).token_ids


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=3)])
@pytest.mark.parametrize("shape", [RESIDENT.shape, MHA, QWEN2])
def test_a_streamed_plan_says_what_the_one_in_memory_says(
    compiled: Compiled, shape: Any, sampling: Sampling
) -> None:
    sub_layers = 2 * shape.layers
    plain = Recipe(shape=shape, attention=EXACT)
    expected = tokens(compiled(plain), sampling=sampling)
    for streamed in (range(sub_layers), range(0, sub_layers, 3)):
        residency = Residency(tuple(map(SubLayerId, streamed)), 2, 4096)
        folder = compiled(msgspec.structs.replace(plain, residency=residency))
        assert tokens(folder, sampling=sampling) == expected


@pytest.mark.parametrize("name", CYCLES)
def test_drafts_of_every_kind_keep_the_tokens(compiled: Compiled, name: str) -> None:
    expected = tokens(compiled(RESIDENT))
    with load(compiled(STREAMED)) as session:
        found = session.generate(PROMPT, max_new_tokens=40, cycle=CYCLES[name])
        assert found.token_ids == expected
        assert session.flash is not None
        assert session.flash.bytes > 0
    with load(compiled(RESIDENT)) as session:
        assert session.flash is None


def test_a_second_generation_and_two_sessions_share_nothing(compiled: Compiled) -> None:
    folder = compiled(STREAMED)
    expected = tokens(folder)
    with load(folder) as one, load(folder) as other:
        streams = [each.stream_ids([1, 2, 3], max_new_tokens=12) for each in (one, other)]
        found = [[*a, *b] for a, b in zip(*streams, strict=True)]
        assert all(pair[: len(pair) // 2] == pair[len(pair) // 2 :] for pair in found)
        assert one.generate(PROMPT, max_new_tokens=40).token_ids == expected
        one.close()
        assert other.generate(PROMPT, max_new_tokens=40).token_ids == expected


def test_closing_in_mid_stream_joins_the_reader(compiled: Compiled) -> None:
    session = load(compiled(STREAMED))
    stream = session.stream(PROMPT, max_new_tokens=40)
    next(stream)
    session.close()
    session.close()
    with pytest.raises(InputError, match="closed"):
        next(stream)
    with pytest.raises(InputError, match="closed"):
        session.generate(PROMPT)


def test_closing_from_another_thread_ends_a_generation_with_an_error(compiled: Compiled) -> None:
    session = load(compiled(STREAMED), flash_rate=SLOW)
    found: list[BaseException] = []

    def generate() -> None:
        try:
            session.generate(PROMPT, max_new_tokens=200)
        except InputError as error:
            found.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    time.sleep(0.3)
    session.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert "closed" in str(found[0])


def test_an_interrupt_leaves_the_session_usable(compiled: Compiled) -> None:
    expected = tokens(compiled(RESIDENT))
    with load(compiled(STREAMED), flash_rate=SLOW) as session:
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            session.generate(PROMPT, max_new_tokens=200)
        timer.join()
        assert session.generate(PROMPT, max_new_tokens=40).token_ids == expected


def test_a_read_error_ends_a_generation_and_the_next_one_works(compiled: Compiled) -> None:
    expected = tokens(compiled(RESIDENT))
    with load(compiled(STREAMED)) as session:
        reader: Any = session._target.reader
        right, wrong = os.dup(reader._descriptor), os.open("/", os.O_RDONLY)
        stream = session.stream_ids([1, 2, 3], max_new_tokens=60)
        next(stream)
        os.dup2(wrong, reader._descriptor)
        with pytest.raises(FlashError):
            list(stream)
        with pytest.raises(FlashError):
            session.generate(PROMPT, max_new_tokens=40)
        os.dup2(right, reader._descriptor)
        os.close(right)
        os.close(wrong)
        assert session.generate(PROMPT, max_new_tokens=40).token_ids == expected


def test_a_file_cut_off_under_a_session_is_an_error(compiled: Compiled, tmp_path: Path) -> None:
    folder = tmp_path / "x.plan"
    shutil.copytree(compiled(STREAMED), folder)
    weights = (folder / "weights.bin").read_bytes()
    with load(folder) as session:
        stream = session.stream_ids([1, 2, 3], max_new_tokens=60)
        next(stream)
        # Nothing may touch mapped pages from now on
        os.truncate(folder / "weights.bin", 0)
        with pytest.raises(FlashError, match=r"cut off|end early"):
            list(stream)
        (folder / "weights.bin").write_bytes(weights)
        assert session.generate(PROMPT, max_new_tokens=5).token_ids


def test_a_slow_disk_costs_time_and_no_token(compiled: Compiled) -> None:
    with load(compiled(STREAMED), flash_rate=5e6) as session:
        assert (
            session.generate(PROMPT, max_new_tokens=20).token_ids == tokens(compiled(RESIDENT))[:20]
        )
        assert session.flash is not None
        assert session.flash.waited_us > 0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_nothing_is_read_at_is_refused(compiled: Compiled, rate: float) -> None:
    with pytest.raises(InputError, match="rate"):
        load(compiled(STREAMED), flash_rate=rate)


def test_a_plan_that_does_not_load_leaves_no_thread(compiled: Compiled, tmp_path: Path) -> None:
    folder = tmp_path / "x.plan"
    shutil.copytree(compiled(STREAMED), folder)
    (folder / "mlp.onnx").write_bytes(b"")
    seal(folder)
    with pytest.raises(InputError):
        load(folder)
