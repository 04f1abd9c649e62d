"""Prompt files: what is read, what is refused and where the error points."""

import contextlib
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import prompt_file
from planner.prompt_file import Prompt, Split, bundled_prompts, load_prompts
from profiles.errors import InputError

CATEGORIES = {"code", "chat", "summary", "translation", "maths", "story"}
GOOD = b'{"id": "a", "category": "chat", "prompt": "Hello"}\n'


def write(folder: Path, data: bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(data)
    return path


def error_of(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        load_prompts(path)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return caught.value


def test_prompts_keep_file_order_and_split(tmp_path: Path) -> None:
    line = b'{"id": "b", "category": "code", "prompt": "Gr\xc3\xbc\xc3\x9fe", "split": "report"}\n'
    assert load_prompts(write(tmp_path, line + GOOD)) == [
        Prompt("b", "code", "Grüße", Split.REPORT),
        Prompt("a", "chat", "Hello"),
    ]


@pytest.mark.parametrize(
    "data",
    [
        GOOD.rstrip(b"\n"),
        b"\xef\xbb\xbf" + GOOD,
        GOOD.replace(b"\n", b"\r\n"),
        b"\n  \n" + GOOD + b"\n",
        b'{"id": "a", "category": "chat", "prompt": "Hello", "answer": [1, {"x": null}]}',
    ],
    ids=["no-final-newline", "byte-order-mark", "crlf", "blank-lines", "further-keys"],
)
def test_harmless_variations_are_read_alike(tmp_path: Path, data: bytes) -> None:
    assert load_prompts(write(tmp_path, data)) == [Prompt("a", "chat", "Hello")]


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path) -> None:
    data = '{"id": "a", "category": "chat", "prompt": "one\u2028two\x85"}'.encode()
    assert load_prompts(write(tmp_path, data))[0].prompt == "one\u2028two\x85"


@pytest.mark.parametrize(
    "line",
    [
        b"hello",
        b"{",
        b"[]",
        b"null",
        b'{"id": "b", "category": "chat"}',
        b'{"id": 7, "category": "chat", "prompt": "x"}',
        b'{"id": "", "category": "chat", "prompt": "x"}',
        b'{"id": "b", "category": "", "prompt": "x"}',
        b'{"id": "b", "category": "chat", "prompt": " \\n\\t "}',
        b'{"id": "b", "category": "chat", "prompt": "x", "split": "train"}',
        b'{"id": "b", "category": "chat", "prompt": "\\ud800"}',
        b'{"id": "b", "category": "chat", "prompt": "x"} {}',
        b'{"id": "b", "category": "chat", "prompt": "x", "y": ' + b"[" * 100_000 + b"}",
        b'{"id": "b", "category": "chat", "prompt": "\xff"}',
        b'{"id": "b", "category": "chat", "prompt": "cut off \xc3"}',
        GOOD.rstrip(),
    ],
    ids=lambda line: line[-40:].decode("latin-1"),
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path, GOOD + b"\n" + line + b"\n")
    error = error_of(path)
    assert error.where == f"{path}:3"
    assert error.found is not None
    assert error.expected is not None


def test_a_duplicate_id_names_both_lines(tmp_path: Path) -> None:
    error = error_of(write(tmp_path, GOOD + b"\n" + GOOD))
    assert str(error).count("'a', also on line 1") == 1


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, data: bytes) -> None:
    assert "no prompts" in str(error_of(write(tmp_path, data)))


def test_a_file_above_the_size_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, GOOD)
    monkeypatch.setattr(prompt_file, "MAX_BYTES", len(GOOD))
    assert len(load_prompts(path)) == 1
    monkeypatch.setattr(prompt_file, "MAX_BYTES", len(GOOD) - 1)
    assert f"at most {len(GOOD) - 1} bytes" in str(error_of(path))


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    assert "no such file" in str(error_of(tmp_path / "absent.jsonl"))
    assert "a folder" in str(error_of(tmp_path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_give_prompts_or_an_input_error(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path, data)
    with contextlib.suppress(InputError):
        assert load_prompts(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_any_text_survives_a_round_trip(tmp_path: Path, texts: list[str]) -> None:
    prompts = [Prompt(str(n), "chat", text) for n, text in enumerate(texts)]
    data = b"\n".join(msgspec.json.encode(prompt) for prompt in prompts)
    assert load_prompts(write(tmp_path, data)) == prompts


def test_an_unknown_bundled_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'calibration'"):
        bundled_prompts("calibrate")


def test_bundled_calibration_covers_each_category_and_split_alike() -> None:
    counts = Counter((p.category, p.split) for p in bundled_prompts("calibration"))
    assert counts == {(category, split): 2 for category in CATEGORIES for split in Split}


def test_bundled_verify_covers_each_category_alike_and_has_no_split() -> None:
    prompts = bundled_prompts("verify")
    assert Counter(p.category for p in prompts) == dict.fromkeys(CATEGORIES, 4)
    assert all(p.split is None for p in prompts)


def test_summaries_and_edits_bring_a_text_to_copy_from() -> None:
    prompts = bundled_prompts("calibration") + bundled_prompts("verify")
    summaries = [len(p.prompt.split()) for p in prompts if p.category == "summary"]
    assert all(120 <= words <= 220 for words in summaries)
    for split in Split:
        code = [p for p in prompts if p.category == "code" and p.split is split]
        assert any(len(p.prompt.split()) >= 120 for p in code), split


def test_no_bundled_prompt_borrows_from_another() -> None:
    seen: dict[tuple[str, ...], str] = {}
    for prompt in bundled_prompts("calibration") + bundled_prompts("verify"):
        words = prompt.prompt.lower().split()
        for start in range(len(words) - 7):
            owner = seen.setdefault(tuple(words[start : start + 8]), prompt.id)
            assert owner == prompt.id


def test_bundled_files_are_plain_json_lines_with_documented_keys() -> None:
    folder = Path(prompt_file.__file__).parent / "prompts"
    for name in prompt_file.BUNDLED:
        for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            assert (
                {"id", "category", "prompt"} <= json.loads(line).keys() <= {*Prompt.__match_args__}
            )
