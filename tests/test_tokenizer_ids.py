"""Token ids of 375 varied strings against llama.cpp's and transformers' own tokenizers.

``smollm2_tokens.jsonl`` holds what llama.cpp's tokenizer makes of each string with SmolLM2's GGUF
file, control tokens parsed and no BOS added.
"""

import inspect
import json
from pathlib import Path

import pytest
from test_tokenizer import ids, rebuilt
from tiny_models import SPECIALS, tiny_vocabulary, write_hf_folder
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from lowering.source import bundled_path, open_model
from lowering.tokenizer import from_folder
from profiles.errors import InputError
from runtime.tokens import StreamDecoder, Tokens

LINES = (Path(__file__).parent / "smollm2_tokens.jsonl").read_text().splitlines()
GOLDEN = [(entry["text"], entry["ids"]) for entry in map(json.loads, LINES)]
TEXTS = [text for text, _ in GOLDEN]


def test_smollm2_ids_equal_those_of_llama_cpp():
    try:
        bundled_path("smollm2-135m")
    except InputError as error:
        pytest.skip(str(error))
    tokenizer = Tokenizer.from_str(open_model("smollm2-135m").tokenizer_json())
    assert len(GOLDEN) >= 200
    assert [text for text, expected in GOLDEN if ids(tokenizer, text) != expected] == []


def test_qwen2_ids_equal_those_of_transformers():
    """llama.cpp leaves out the normal form C that the published tokenizer applies first."""
    tokens, merges = tiny_vocabulary()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(m.split(" ")) for m in merges])
    theirs.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    ours = rebuilt("qwen2")
    for text in TEXTS:
        assert ids(ours, text) == theirs.encode(text, add_special_tokens=False), repr(text)


def test_llama_3_cuts_as_its_published_tokenizer_does():
    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    published = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    ours = rebuilt("llama-bpe").pre_tokenizer
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == published.pre_tokenize_str(text), repr(text)


def sentence_piece_like() -> Tokenizer:
    """A BPE as Llama 2 and Mistral have it in ``tokenizer.json``: spaces as U+2581, bytes last."""
    vocabulary = {token: index for index, token in enumerate(("<unk>", "<s>", "</s>"))}
    words = ["▁the", "▁and", "▁of", "ing", "▁▁▁▁", "▁return", "日本"]
    merges: list[tuple[str, str]] = []
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *map(chr, range(97, 123)), *"日本"]
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                merges.append((word[: end - 1], word[end - 1]))
                pieces.append(word[:end])
    vocabulary |= {piece: index + 3 for index, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
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


@pytest.mark.parametrize("kind", ["byte-level", "sentence-piece-like"])
def test_ids_of_a_folder_equal_those_of_transformers_and_decode_to_the_text(tmp_path, kind):
    folder = write_hf_folder(tmp_path)
    if kind != "byte-level":
        sentence_piece_like().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    loaded = from_folder(folder)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokens = Tokens.from_files(loaded.json, loaded.spec)
    for text in filter(None, TEXTS):
        found = tokens.encode_prompt(text)
        assert found == theirs.encode(text, add_special_tokens=False), repr(text)
        stream = StreamDecoder(tokens)
        assert stream.push(found) + stream.flush() == tokens.decode(found), repr(text)
