"""What the process says of its own memory."""

from pathlib import Path

import numpy as np
import pytest

from runtime import memory
from runtime.memory import peak_rss_bytes, reset_peak, rss_bytes

SIZE = 64 * 2**20


def test_the_peak_counts_from_the_reset_on() -> None:
    block = np.ones(SIZE, np.uint8)
    before, held = peak_rss_bytes(), rss_bytes()
    del block
    if before is None or held is None or not reset_peak():
        pytest.skip("this system does not tell")
    after = peak_rss_bytes()
    assert after is not None
    assert after < before - SIZE // 2
    block = np.ones(SIZE, np.uint8)
    again = peak_rss_bytes()
    assert again is not None
    assert again > after + SIZE // 2
    assert block.nbytes == SIZE


def test_a_system_that_does_not_tell_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_FOLDER", tmp_path / "nothing")
    assert peak_rss_bytes() is None
    assert rss_bytes() is None
    assert not reset_peak()
    monkeypatch.setattr(memory, "_FOLDER", tmp_path)
    (tmp_path / "status").write_text("Name: x\n")
    assert peak_rss_bytes() is None
