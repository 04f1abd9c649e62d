"""Stop strings and EOS in a stream of tokens: where it ends and what may be shown."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokens import STREAMED, WHOLE, byte_level, every_decoder
from tokenizers import AddedToken, Tokenizer

from profiles.errors import InputError
from runtime.ending import Ending, FinishReason, StopStrings, check_stop
from runtime.tokens import Tokens

SHORT = st.text("ab", min_size=1, max_size=4)


def before_stop(text: str, stop: list[str]) -> str | None:
    """The text before the stop string that is complete first, character by character."""
    for end in range(len(text) + 1):
        sizes = [len(string) for string in stop if text[:end].endswith(string)]
        if sizes:
            return text[: end - max(sizes)]
    return None


@given(text=st.text("abc", max_size=30), stop=st.lists(SHORT, max_size=4), data=st.data())
def test_pieces_show_what_comes_before_the_first_stop_string(
    text: str, stop: list[str], data: Any
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    stops = StopStrings(stop)
    shown, read = "", ""
    for start, end in pairwise([0, *cuts, len(text)]):
        read += text[start:end]
        shown += stops.push(text[start:end])
        expected = before_stop(read, stop)
        assert stops.found == (expected is not None)
        # Never anything of what a longer text could turn into a stop string
        overhangs = [
            n for s in stop for n in range(1, len(s)) if expected is None and read.endswith(s[:n])
        ]
        assert (
            shown
            == (read if expected is None else expected)[
                : len(read) - max(overhangs, default=0) if expected is None else None
            ]
        )
    expected = before_stop(text, stop)
    assert shown + stops.flush() == (text if expected is None else expected)


def test_what_a_piece_would_complete_is_known_before_it_is_pushed() -> None:
    stops = StopStrings(["end"])
    assert stops.push("the e") == "the "
    assert stops.would_find("nd")
    assert not stops.would_find("n")
    assert stops.push("ndless") == ""
    assert stops.found
    assert stops.push("x") == stops.flush() == ""


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [None], [3], [b"a"]])
def test_what_is_no_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(InputError, match="not a stop string"):
        check_stop(stop)


def test_one_string_is_one_stop_string() -> None:
    assert check_stop("###") == ("###",)
    assert check_stop(["a", "b"]) == ("a", "b")


def read_all(tokens: Tokens, ids: list[int], stop: list[str], size: int) -> tuple[int, str, Any]:
    """(tokens kept, text, reason) of ids that come in groups of ``size``."""
    ending = Ending(tokens, stop)
    kept, text = 0, ""
    for start in range(0, len(ids), size):
        found = ending.read(ids[start : start + size])
        kept, text = kept + found.kept, text + found.text
        if found.reason is not None:
            return kept, text + ending.rest(), found.reason
    return kept, text + ending.rest(), None


@every_decoder
@given(data=st.data())
def test_a_generation_is_cut_at_the_first_token_whose_text_holds_a_stop_string(
    tokens: Tokens, data: Any
) -> None:
    ids = data.draw(st.lists(st.integers(0, 340).filter(lambda i: i != 1), max_size=20))
    whole = tokens.decode(ids).replace("\ufffd", "")
    starts = st.integers(0, max(0, len(whole) - 1))
    stop = [whole[at : at + 3] for at in data.draw(st.lists(starts, max_size=3))]
    stop = [string for string in stop if string]
    expected: tuple[int, str, Any] = (len(ids), tokens.decode(ids), None)
    for count in range(1, len(ids) + 1):
        if (text := before_stop(tokens.decode(ids[:count]), stop)) is not None:
            expected = (count, text, FinishReason.STOP)
            break
    for size in (1, 3, 100):
        assert read_all(tokens, ids, stop, size) == expected


def test_bytes_that_complete_a_stop_string_end_it_without_another_token() -> None:
    tokens = STREAMED["pieces"]
    newline = 3 + 0x0A
    assert read_all(tokens, [261, newline, 262], ["\n"], 1) == (2, "the", FinishReason.STOP)
    assert read_all(tokens, [261, newline, newline, 262], ["e\n\n"], 4)[:2] == (3, "th")


def test_a_character_in_two_tokens_can_be_a_stop_string() -> None:
    ids = WHOLE.encode_prompt("cat 🦊 dog")
    kept, text, reason = read_all(WHOLE, ids, ["🦊"], 1)
    assert (text, reason) == ("cat ", FinishReason.STOP)
    assert WHOLE.decode(ids[:kept]) == "cat 🦊"


def test_of_eos_and_stop_string_the_first_to_come_ends_it() -> None:
    ids = WHOLE.encode_prompt("the cat")
    assert read_all(WHOLE, [*ids, 1], ["cat"], 100)[1:] == ("the ", FinishReason.STOP)
    assert read_all(WHOLE, [1, *ids], ["cat"], 100) == (1, "", FinishReason.EOS)


def test_a_begun_stop_string_is_text_if_the_answer_ends_there() -> None:
    ids = WHOLE.encode_prompt("the ca")
    assert read_all(WHOLE, [*ids, 1], ["cat"], 1)[1:] == ("the ca", FinishReason.EOS)


def test_a_stop_string_can_be_a_control_token() -> None:
    ids = [*WHOLE.encode_prompt("the"), 3, *WHOLE.encode_prompt("cat")]
    kept, text, reason = read_all(WHOLE, ids, ["<|end|>"], 1)
    assert (ids[kept - 1], text, reason) == (3, "the", FinishReason.STOP)


def test_an_eos_that_is_no_control_token_does_not_show() -> None:
    tokenizer = Tokenizer.from_str(byte_level_text := STREAMED["byte-level"]._tokenizer.to_str())
    tokenizer.add_tokens([AddedToken("<done>")])
    done = tokenizer.token_to_id("<done>")
    assert "<done>" not in byte_level_text
    tokens = Tokens.from_files(tokenizer.to_str(), byte_level(eos_ids=(done,)).spec)
    ids = [*tokens.encode_prompt("the"), done]
    assert tokens.decode(ids) == "the<done>"
    assert read_all(tokens, ids, [], 1) == (len(ids), "the", FinishReason.EOS)


def test_an_ignored_eos_ends_nothing() -> None:
    ids = [*WHOLE.encode_prompt("the"), 1, *WHOLE.encode_prompt("cat")]
    found = Ending(WHOLE, ignore_eos=True).read(ids)
    assert found == (len(ids), "thecat", None)
