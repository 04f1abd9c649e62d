"""The key-value cache: a cursor over rows; growing, committing and rolling back lose no bit."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import GQA, tiny_spec

from profiles.errors import FulcrumError, InputError
from runtime.kv_cache import KvCache

SPEC = tiny_spec(GQA)
ROW = (SPEC.layers, SPEC.kv_heads, SPEC.head_dim)

Array = np.ndarray[Any, Any]


def rows(count: int, seed: int = 0) -> tuple[Array, Array]:
    """Keys and values [layers, kv_heads, count, head_dim] as a pass returns them."""
    random = np.random.default_rng(seed)
    shape = (SPEC.layers, SPEC.kv_heads, count, SPEC.head_dim)
    keys, values = (random.standard_normal(shape).astype(np.float32) for _ in range(2))
    return keys, values


def filled(count: int, growth_tokens: int = 8, limit: int = 64) -> KvCache:
    cache = KvCache(SPEC, growth_tokens, limit)
    cache.reserve(count)
    cache.commit(*rows(count), slice(0, count))
    return cache


def committed(cache: KvCache) -> tuple[bytes, bytes]:
    """All bits in front of the cursor."""
    parts = (cache.keys, cache.values)
    return tuple(part[:, :, : cache.length].tobytes() for part in parts)  # type: ignore[return-value]


def test_a_new_cache_is_empty_and_zero() -> None:
    cache = KvCache(SPEC, 8, 64)
    assert (cache.length, cache.capacity, cache.limit) == (0, 8, 64)
    assert cache.keys.shape == cache.values.shape == (*ROW[:2], 8, ROW[2])
    assert cache.keys.dtype == cache.values.dtype == np.float32
    assert not cache.keys.any()
    assert not cache.values.any()


@pytest.mark.parametrize(
    ("slots", "capacity"), [(0, 8), (1, 8), (8, 8), (9, 16), (16, 16), (17, 24), (64, 64)]
)
def test_capacity_grows_by_whole_steps(slots: int, capacity: int) -> None:
    cache = KvCache(SPEC, 8, 64)
    cache.reserve(slots)
    assert cache.capacity == capacity
    cache.reserve(1)
    assert cache.capacity == capacity


def test_growth_keeps_every_committed_row_and_zeroes_the_rest() -> None:
    cache = filled(7)
    before = committed(cache)
    cache.write(7, *rows(1, seed=1), slice(0, 1))
    for slots in (9, 30, 64):
        cache.reserve(slots)
        assert cache.length == 7
        assert committed(cache) == before
        assert not cache.keys[:, :, 7:].any()
        assert not cache.values[:, :, 7:].any()


def test_without_growth_the_arrays_stay_where_they_are() -> None:
    cache = filled(3)
    keys, values = cache.keys, cache.values
    cache.reserve(8)
    cache.commit(*rows(2, seed=1), slice(0, 2))
    cache.truncate(1)
    assert cache.keys is keys
    assert cache.values is values


def test_a_commit_takes_the_rows_asked_for_in_their_order() -> None:
    cache, (keys, values) = filled(2), rows(6, seed=3)
    cache.commit(keys, values, np.array([4, 0, 5]))
    assert cache.length == 5
    assert np.array_equal(cache.keys[:, :, 2:5], keys[:, :, [4, 0, 5]])
    assert np.array_equal(cache.values[:, :, 2:5], values[:, :, [4, 0, 5]])


def test_a_commit_of_no_rows_changes_nothing() -> None:
    cache = filled(4)
    before = committed(cache)
    cache.commit(*rows(3), slice(0, 0))
    assert (cache.length, committed(cache)) == (4, before)


def test_writing_behind_the_cursor_commits_nothing() -> None:
    cache = filled(4)
    before = committed(cache)
    cache.write(4, *rows(3, seed=2), slice(0, 3))
    assert (cache.length, committed(cache)) == (4, before)


def test_a_rollback_is_bit_equal_to_never_having_gone_on() -> None:
    cache = filled(5)
    before = committed(cache)
    cache.reserve(40)
    cache.commit(*rows(30, seed=9), slice(0, 30))
    cache.truncate(5)
    assert (cache.length, committed(cache)) == (5, before)
    cache.commit(*rows(2, seed=4), slice(0, 2))
    straight = filled(5)
    straight.commit(*rows(2, seed=4), slice(0, 2))
    assert committed(cache) == committed(straight)


@settings(deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from("cwrt"), st.integers(0, 12)), max_size=30))
def test_any_history_equals_a_list_of_rows(steps: list[tuple[str, int]]) -> None:
    cache, model = KvCache(SPEC, 4, 10_000), []
    for number, (what, count) in enumerate(steps):
        keys, values = rows(count, seed=number)
        if what == "c":
            cache.reserve(cache.length + count)
            cache.commit(keys, values, slice(0, count))
            model += [(keys[:, :, row], values[:, :, row]) for row in range(count)]
        elif what == "w":
            cache.reserve(cache.length + count)
            cache.write(cache.length, keys, values, slice(0, count))
        elif what == "r":
            cache.reserve(count * 5)
        else:
            del model[count:]
            cache.truncate(min(count, cache.length))
    assert cache.length == len(model)
    for slot, (key, value) in enumerate(model):
        assert np.array_equal(cache.keys[:, :, slot], key)
        assert np.array_equal(cache.values[:, :, slot], value)


def test_room_beyond_the_limit_is_refused_and_nothing_changes() -> None:
    cache = filled(7, limit=20)
    before = committed(cache)
    cache.reserve(20)
    with pytest.raises(InputError, match=r"the context is full \(found 21 positions, .*20\)"):
        cache.reserve(21)
    assert (cache.length, committed(cache)) == (7, before)


def test_rows_outside_the_cache_are_refused_and_nothing_changes() -> None:
    cache = filled(7)
    before = cache.keys.tobytes(), cache.values.tobytes()
    for slot in (-1, 7, 9):
        with pytest.raises(FulcrumError, match="rows outside the cache"):
            cache.write(slot, *rows(2), slice(0, 2))
    with pytest.raises(FulcrumError, match="slots 7 to 9"):
        cache.commit(*rows(2), slice(0, 2))
    assert cache.length == 7
    assert (cache.keys.tobytes(), cache.values.tobytes()) == before


@pytest.mark.parametrize("length", [-1, 6, 100])
def test_a_rollback_goes_backwards_only(length: int) -> None:
    cache = filled(5)
    with pytest.raises(FulcrumError, match="expected 0 to 5"):
        cache.truncate(length)
    assert cache.length == 5
