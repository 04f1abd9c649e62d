"""What a generation may be asked for: wrong values are refused, None is the usual."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_models import Recipe

from profiles.errors import InputError
from runtime.plan_cycles import Cycle, DraftShape, DraftSource
from runtime.session import Session

Compiled = Callable[[Recipe], Path]


@pytest.fixture(scope="module")
def session(compiled: Compiled) -> Iterator[Session]:
    with Session(compiled(Recipe())) as opened:
        yield opened


def test_none_stands_for_the_usual(session: Session) -> None:
    usual = session.generate("the", max_new_tokens=5)
    none: Any = {"stop": None, "sampling": None, "cycle": None, "progress": None}
    assert session.generate("the", max_new_tokens=5, **none).token_ids == usual.token_ids


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_tokens": 2.5, "ignore_eos": True}, "max_new_tokens.*whole number"),
        ({"max_new_tokens": "9"}, "max_new_tokens.*whole number"),
        ({"max_new_tokens": True}, "max_new_tokens.*whole number"),
        ({"cycle": "off"}, r"cycle.*runtime\.plan_cycles\.OFF"),
        ({"sampling": 0.7}, "sampling.*a Sampling"),
        ({"stop": 5}, "not a stop string"),
        ({"stop": ("a", None)}, "not a stop string"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(
    session: Session, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        session.generate("the", **options)


def test_a_count_from_numpy_is_a_whole_number(session: Session) -> None:
    count: Any = np.int64(4)
    assert len(session.generate("the", max_new_tokens=count).token_ids) == 4


@pytest.mark.parametrize(
    ("cycle", "says"),
    [
        (Cycle(DraftSource.MODEL, 4), "no draft model"),
        (Cycle(DraftSource.NGRAM, 4, 0, 1, 3, shape=DraftShape.STATIC), "no such static tree"),
        (Cycle(DraftSource.NGRAM, 4, 0, 1, 3, shape=DraftShape.ONLINE), "no such online tree"),
    ],
)
def test_a_cycle_needs_what_the_plan_carries(session: Session, cycle: Cycle, says: str) -> None:
    with pytest.raises(InputError, match=says):
        session.generate("the", cycle=cycle)


def test_a_stream_of_a_session_that_was_closed_says_so(compiled: Compiled) -> None:
    session = Session(compiled(Recipe()))
    stream = session.stream_ids([5, 6], max_new_tokens=9, ignore_eos=True)
    next(stream)
    session.close()
    with pytest.raises(InputError, match="closed"):
        next(stream)


def test_a_stream_that_is_complete_may_end_after_its_session(compiled: Compiled) -> None:
    session = Session(compiled(Recipe()))
    stream = session.stream_ids([5, 6], max_new_tokens=1)
    (token,) = next(stream)
    session.close()
    assert list(stream) == []
    assert session.finished().token_ids == (token,)
