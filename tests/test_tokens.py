"""Prompts to tokens, tokens to text, whole and streamed, for both kinds of decoder."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from profiles.errors import InputError, UnsupportedError
from runtime.model_spec import TokenizerSpec
from runtime.tokens import StreamDecoder, Tokens

TEXT = "The naïve cat said: “Grüße, 世界!” — 👩‍👩‍👧 then it\n\tslept, and the other cat slept too. "
CHAT_ML = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    # Added, but not special; the second is spelled with characters that also stand for bytes
    tokenizer.add_tokens([AddedToken("<tab 世>"), AddedToken("éĠ")])
    return tokenizer


def pieces_tokenizer() -> Tokenizer:
    """As SentencePiece models are converted: spaces as U+2581, unknown characters as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "the", "▁cat", "at", "s", "▁世", "é", "!", "▁▁x", ""]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def spec(**changes: Any) -> TokenizerSpec:
    plain = TokenizerSpec(
        bos_id=0, add_bos=False, eos_ids=(1,), chat_template=CHAT_ML, digest="0" * 64
    )
    return msgspec.structs.replace(plain, **changes)


BYTE_LEVEL = byte_level_tokenizer().to_str()
PIECES = pieces_tokenizer().to_str()


def byte_level(**changes: Any) -> Tokens:
    return Tokens.from_files(BYTE_LEVEL, spec(**changes))


def with_decoder(decoder: dict[str, Any] | None) -> str:
    return json.dumps({**json.loads(PIECES), "decoder": decoder})


WHOLE = byte_level()
STREAMED = {
    "byte-level": WHOLE,
    "pieces": Tokens.from_files(PIECES, spec()),
    "metaspace": Tokens.from_files(
        with_decoder(
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
        ),
        spec(),
    ),
    "no-decoder": Tokens.from_files(with_decoder(None), spec()),
}
every_decoder = pytest.mark.parametrize("tokens", STREAMED.values(), ids=STREAMED)


def streamed(tokens: Tokens, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokens)
    return [*(decoder.push([token]) for token in ids), decoder.flush()]


@given(text=st.text())
def test_text_survives_encoding_and_decoding(text: str) -> None:
    prefixed = "x" + text
    assert WHOLE.decode(WHOLE.encode_prompt(prefixed)) == prefixed


@every_decoder
@given(data=st.data())
def test_streamed_pieces_of_any_tokens_add_up_to_the_whole(tokens: Tokens, data: Any) -> None:
    # Any ids: broken UTF-8, special, added and unknown tokens
    ids = data.draw(st.lists(st.integers(0, 340), max_size=30))
    assert "".join(streamed(tokens, ids)) == tokens.decode(ids)


@given(ids=st.lists(st.integers(256, 274), max_size=12))
def test_streamed_pieces_keep_their_spaces(ids: list[int]) -> None:
    tokens = STREAMED["pieces"]
    assert "".join(streamed(tokens, ids)) == tokens.decode(ids)


@every_decoder
@given(data=st.data())
def test_it_does_not_matter_how_tokens_are_grouped(tokens: Tokens, data: Any) -> None:
    groups = data.draw(st.lists(st.lists(st.integers(0, 340), max_size=5), max_size=6))
    ids = [token for group in groups for token in group]
    decoder = StreamDecoder(tokens)
    pieces = iter(streamed(tokens, ids))
    for group in groups:
        assert decoder.push(group) == "".join(next(pieces) for _ in group)


@given(text=st.text())
def test_no_piece_of_valid_text_shows_a_broken_character(text: str) -> None:
    ids = WHOLE.encode_prompt("x" + text.replace("\ufffd", ""))
    assert not any("\ufffd" in piece for piece in streamed(WHOLE, ids))


def test_a_character_appears_with_its_last_byte() -> None:
    ids = WHOLE.encode_prompt("🦊")
    assert len(ids) == 3
    assert streamed(WHOLE, ids) == ["", "", "🦊", ""]
    assert streamed(WHOLE, [*ids[:2], *ids]) == ["", "", "\ufffd", "", "🦊", ""]


def test_an_unfinished_character_is_shown_by_flush() -> None:
    ids = WHOLE.encode_prompt("x🦊")[:3]
    assert streamed(WHOLE, ids) == ["x", "", "", "\ufffd"]


def test_a_decoder_starts_afresh_after_a_flush() -> None:
    for tokens in STREAMED.values():
        decoder = StreamDecoder(tokens)
        ids = [261, 265, 200, 201]
        first = decoder.push(ids) + decoder.flush()
        assert decoder.push(ids) + decoder.flush() == first == tokens.decode(ids)
        assert decoder.flush() == ""


def test_text_is_shown_without_waiting_for_the_next_token() -> None:
    the, cat, at = 261, 263, 264
    assert streamed(STREAMED["pieces"], [the, cat, at]) == ["the", " cat", "at", ""]


@pytest.mark.parametrize("name", ["byte-level", "pieces"])
def test_the_work_per_token_does_not_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = STREAMED[name]
    decoded: list[int] = []

    def counting(self: Tokens, ids: list[int]) -> str:
        decoded.append(len(ids))
        return original(self, ids)

    original = Tokens.decode
    monkeypatch.setattr(Tokens, "decode", counting)
    decoder = StreamDecoder(tokens)
    for token in [261, 263, 100, 264] * 200:
        decoder.push([token])
    assert max(decoded, default=0) <= 3


def test_special_tokens_do_not_show() -> None:
    ids = [0, *WHOLE.encode_prompt("cat<|end|>"), 1]
    assert WHOLE.decode(ids) == "".join(streamed(WHOLE, ids)) == "cat"


@pytest.mark.parametrize("text", ["cat", "<s>cat"])
@pytest.mark.parametrize("chat", [False, True])
def test_bos_comes_once(text: str, chat: bool) -> None:
    tokens = byte_level(add_bos=True, chat_template="{{ messages[0].content }}")
    ids = tokens.encode_prompt(text, chat=chat)
    assert ids[0] == 0
    assert ids.count(0) == 1


def test_bos_of_a_template_is_not_doubled() -> None:
    tokens = byte_level(add_bos=True, chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert tokens.encode_prompt("cat", chat=True) == tokens.encode_prompt("cat")


def test_no_bos_where_the_model_wants_none() -> None:
    assert 0 not in byte_level().encode_prompt("cat")
    assert 0 not in byte_level(add_bos=True, bos_id=None).encode_prompt("cat")


def test_a_post_processor_adds_nothing_of_its_own() -> None:
    tokenizer = Tokenizer.from_str(BYTE_LEVEL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokens = Tokens.from_files(tokenizer.to_str(), spec(add_bos=True))
    assert tokens.encode_prompt("cat") == byte_level(add_bos=True).encode_prompt("cat")


def test_limits_in_the_file_do_not_cut_or_pad_a_prompt() -> None:
    tokenizer = Tokenizer.from_str(BYTE_LEVEL)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokens = Tokens.from_files(tokenizer.to_str(), spec())
    assert tokens.encode_prompt(TEXT) == WHOLE.encode_prompt(TEXT)


def test_a_chat_prompt_ends_where_the_assistant_speaks() -> None:
    expected = "<|start|>system\nBe kind.<|end|>\n<|start|>user\nHi!<|end|>\n<|start|>assistant\n"
    ids = WHOLE.encode_prompt("Hi!", chat=True, system="Be kind.")
    assert ids == WHOLE.encode_prompt(expected)
    assert ids.count(2) == 3


def test_a_template_is_given_the_spelling_of_bos_and_eos() -> None:
    template = "[{{ bos_token }}|{{ eos_token }}]"
    tokens = byte_level(chat_template=template, eos_ids=(3, 1))
    assert tokens.encode_prompt("", chat=True) == tokens.encode_prompt("[<s>|<|end|>]")
    without = byte_level(chat_template=template, eos_ids=(), bos_id=None)
    assert without.encode_prompt("", chat=True) == without.encode_prompt("[|]")


def test_a_failing_template_is_an_input_error() -> None:
    tokens = byte_level(chat_template="{{ raise_exception('users only') }}")
    with pytest.raises(InputError, match="users only"):
        tokens.encode_prompt("Hi", chat=True)


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(InputError, match="no chat template"):
        byte_level(chat_template=None).encode_prompt("Hi", chat=True)


def test_a_system_message_without_chat_is_refused() -> None:
    with pytest.raises(InputError, match="chat"):
        WHOLE.encode_prompt("Hi", system="Be kind.")


def test_a_prompt_without_tokens_is_refused_but_bos_is_one() -> None:
    with pytest.raises(InputError, match="no tokens"):
        WHOLE.encode_prompt("")
    assert byte_level(add_bos=True).encode_prompt("") == [0]


@pytest.mark.parametrize("chat", [False, True])
def test_an_unpaired_surrogate_is_refused(chat: bool) -> None:
    with pytest.raises(InputError, match="not Unicode"):
        WHOLE.encode_prompt("a\udcffb", chat=chat)


def test_an_unpaired_surrogate_of_a_template_is_refused() -> None:
    tokens = byte_level(chat_template="{{ '\\ud800' }}")
    with pytest.raises(InputError, match="not Unicode"):
        tokens.encode_prompt("Hi", chat=True)


@pytest.mark.parametrize(
    ("eos_ids", "ids", "expected"),
    [
        ((1,), [5, 6, 1, 7, 1], 2),
        ((1, 7), [5, 7, 1], 1),
        ((1,), [5, 6], None),
        ((1,), [], None),
        ((), [5, 1], None),
    ],
)
def test_a_generation_ends_at_the_first_eos(
    eos_ids: tuple[int, ...], ids: list[int], expected: int | None
) -> None:
    assert byte_level(eos_ids=eos_ids).finish(ids) == expected


def test_a_file_reads_as_its_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(BYTE_LEVEL, encoding="utf-8")
    assert Tokens.from_files(path, spec()).encode_prompt(TEXT) == WHOLE.encode_prompt(TEXT)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        BYTE_LEVEL.encode()[: len(BYTE_LEVEL) // 2],
        b"[" * 100_000,
    ],
    ids=lambda content: content[:20].decode("latin-1"),
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a tokenizer") as caught:
        Tokens.from_files(path, spec())
    assert caught.value.where == path


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.json: cannot read"):
        Tokens.from_files(tmp_path / "absent.json", spec())


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder("</w>"),
        decoders.WordPiece("##"),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "")]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=["suffix", "cleanup", "strip-end", "replace-fused", "strip-bytes"],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: decoders.Decoder) -> None:
    tokenizer = pieces_tokenizer()
    tokenizer.decoder = decoder
    with pytest.raises(UnsupportedError, match="cannot stream"):
        Tokens.from_files(tokenizer.to_str(), spec())
