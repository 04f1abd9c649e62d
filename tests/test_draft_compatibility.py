"""Which models may draft for which: tokens compared by what they stand for."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tiny_models import EOS_ID, ArraySource, tiny_source, tiny_tokenizer_json, tiny_vocabulary

from lowering.draft_compatibility import check_draft
from lowering.source import open_model
from profiles.errors import IncompatibleError

Document = dict[str, Any]
TOKENS, _ = tiny_vocabulary()
LAST = len(TOKENS) - 1
LETTER = TOKENS.index("a")


class Spelled(ArraySource):
    """A tiny model with a tokenizer of its own."""

    def __init__(self, change: Callable[[Document], object] | None = None, **facts: Any) -> None:
        source = tiny_source()
        tokenizer = {
            key: facts.pop(key) for key in ("bos_id", "eos_ids", "chat_template") if key in facts
        }
        spec = msgspec.structs.replace(source.spec, **facts)
        own = msgspec.structs.replace(spec.tokenizer, **tokenizer)
        super().__init__(msgspec.structs.replace(spec, tokenizer=own), source.weights)
        self.document: Document = json.loads(tiny_tokenizer_json())
        if change:
            change(self.document)

    def tokenizer_json(self) -> str:
        return json.dumps(self.document)


def rename(token: int, name: str) -> Callable[[Document], None]:
    """Spell a token otherwise; merges that need it go."""

    def change(document: Document) -> None:
        model = document["model"]
        old = next(piece for piece, at in model["vocab"].items() if at == token)
        model["vocab"] = {name if at == token else p: at for p, at in model["vocab"].items()}
        model["merges"] = [
            pair for pair in model["merges"] if old not in (*pair, "".join(pair)) or name in pair
        ]
        for entry in document["added_tokens"]:
            if entry["id"] == token:
                entry["content"] = name

    return change


def add(token: int, name: str, special: bool = False) -> Callable[[Document], None]:
    """One more token."""

    def change(document: Document) -> None:
        entry = {**document["added_tokens"][0], "id": token, "content": name, "special": special}
        document["added_tokens"].append(entry)
        document["model"]["vocab"][name] = token

    return change


def test_the_same_tokens_are_accepted_whatever_else_differs() -> None:
    check_draft(Spelled(), Spelled(chat_template=None, weights_digest="1" * 64, name="small"))


@pytest.mark.parametrize("vocab", [LAST + 1, 384, 1024])
def test_a_vocabulary_that_is_padded_otherwise_is_accepted(vocab: int) -> None:
    check_draft(Spelled(), Spelled(vocab=vocab))
    check_draft(Spelled(vocab=vocab), Spelled())


def test_padding_that_has_a_name_is_accepted() -> None:
    check_draft(Spelled(add(LAST + 1, "<think>")), Spelled())
    check_draft(Spelled(), Spelled(add(LAST + 1, "<think>", special=True)))

    def pad(document: Document) -> None:
        document["model"]["vocab"]["[PAD7]"] = LAST + 1

    check_draft(Spelled(add(LAST + 1, "<think>")), Spelled(pad))
    check_draft(Spelled(pad), Spelled(add(LAST + 1, "<think>")))


def test_control_tokens_that_nobody_begins_or_ends_with_may_differ() -> None:
    target = Spelled(bos_id=None, eos_ids=(EOS_ID,))
    check_draft(target, Spelled(rename(0, "<|reserved_7|>"), bos_id=None, eos_ids=(EOS_ID,)))


def test_another_end_that_both_spell_alike_is_accepted() -> None:
    check_draft(Spelled(eos_ids=(EOS_ID, 0)), Spelled(eos_ids=(0,)))


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_an_end_that_is_spelled_otherwise_is_refused(whose: str) -> None:
    ends = {"target": (EOS_ID, 0), "draft": (EOS_ID,)}
    other = {"target": (EOS_ID,), "draft": (EOS_ID, 0)}
    draft = Spelled(rename(0, "<|other|>"), eos_ids=other[whose])
    with pytest.raises(IncompatibleError, match="BOS or EOS, is 0") as caught:
        check_draft(Spelled(eos_ids=ends[whose]), draft)
    assert "<|other|>" in str(caught.value)


def test_the_first_text_that_differs_is_named_with_both_byte_strings_and_the_count() -> None:
    def swap(document: Document) -> None:
        vocab = document["model"]["vocab"]
        for one, other in (("a", "b"), ("y", "z")):
            vocab[one], vocab[other] = vocab[other], vocab[one]

    with pytest.raises(IncompatibleError) as caught:
        check_draft(Spelled(), Spelled(swap, name="small"))
    line = str(caught.value)
    for part in ("small", "4 ids differ", f"is {LETTER}", "b'b'", "b'a'", "--draft"):
        assert part in line


def test_one_merged_token_that_differs_is_enough() -> None:
    def replace(document: Document) -> None:
        vocab, merges = document["model"]["vocab"], document["model"]["merges"]
        last = TOKENS[LAST]
        del vocab[last]
        vocab["qx"] = LAST
        merges[:] = [pair for pair in merges if "".join(pair) != last] + [["q", "x"]]

    with pytest.raises(IncompatibleError, match="1 ids differ"):
        check_draft(Spelled(), Spelled(replace))


def test_a_tokenizer_of_pieces_is_no_match_for_one_of_bytes() -> None:
    def pieces(document: Document) -> None:
        document["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}

    with pytest.raises(IncompatibleError, match="another kind"):
        check_draft(Spelled(), Spelled(pieces))


def test_a_real_model_is_no_draft_for_a_tiny_one() -> None:
    with pytest.raises(IncompatibleError, match="ids differ"):
        check_draft(tiny_source(), open_model("smollm2-135m"))
