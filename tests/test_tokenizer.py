"""Tokenizers rebuilt from GGUF metadata, against transformers and against a byte-level BPE."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CHAT_TEMPLATE, SPECIALS, byte_characters, tiny_vocabulary, write_hf_folder
from tokenizers import Tokenizer, pre_tokenizers, processors

from lowering.source import bundled_path, open_model
from lowering.tokenizer import PRE_TOKENIZERS, from_folder, from_gguf
from profiles.errors import InputError, UnsupportedError

WHERE = Path("some.gguf")
TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing  ",
    "tabs\tand\r\nlines\n\n\n   indented",
    "def f(x: int) -> int:\n    return x ** 2 + 0x1F  # comment\n",
    "Prices: 1234567.89, 42 and ½ or ² and ٣",
    "It's, I'LL, we'Ve, they'd; don't",
    "naïve café über straße Ångström",
    "日本語のテキスト、中文文本。 한국어",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and text",
    "مرحبا بالعالم, שלום, Привет",
    "a<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "x" * 200 + " " * 50 + "\n" * 20,
    "https://example.org/?q=a+b&c=%20#top",
]


def metadata(pre: str = "smollm", **changes: object) -> dict[str, object]:
    """A byte-level BPE of all bytes and a few merges; a change to None removes the key."""
    tokens, merges = tiny_vocabulary()
    keys: dict[str, object] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": merges,
        "token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "bos_token_id": 1,
        "eos_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def rebuilt(pre: str = "smollm", **changes: object) -> Tokenizer:
    return Tokenizer.from_str(from_gguf(metadata(pre, **changes), WHERE).json)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_decoding_undoes_encoding(pre, text):
    tokenizer = rebuilt(pre)
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_varied_text_survives_a_round_trip(pre, text):
    tokenizer = rebuilt(pre)
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


def pieces(pre: str, text: str) -> list[str]:
    """How the pre-tokenizer cuts ``text``, in characters again."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    cut = rebuilt(pre).pre_tokenizer.pre_tokenize_str(text)
    return [bytes(byte_of[c] for c in piece).decode() for piece, _ in cut]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["It", "'s", "  ", "1", "2", "3", "4", "!!", "\n\n", " x"]),
        ("gpt2", ["It", "'s", " ", " 1234", "!!", "\n\n", " x"]),
        ("llama-bpe", ["It", "'s", " ", " ", "123", "4", "!!\n\n", " x"]),
        ("qwen2", ["It", "'s", " ", " ", "1", "2", "3", "4", "!!\n\n", " x"]),
        ("default", ["It", "'", "s", " ", " ", "123", "4", "!!", "\n\n", " x"]),
    ],
)
def test_each_pre_tokenizer_cuts_in_its_own_way(pre, expected):
    assert pieces(pre, "It's  1234!!\n\n x") == expected


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(), st.sampled_from(TEXTS)))
def test_smollm_cuts_as_its_published_tokenizer_does(text):
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    found = rebuilt("smollm").pre_tokenizer.pre_tokenize_str(text)
    assert [p for p, _ in found] == [p for p, _ in published.pre_tokenize_str(text)]


def reference_ids(text: str) -> list[int]:
    """Byte-level BPE the slow way: the pair of lowest rank merges first; no specials."""
    tokens, merges = tiny_vocabulary()
    table, rank = byte_characters(), {merge: i for i, merge in enumerate(merges)}
    found: list[int] = []
    for piece in pieces("smollm", text):
        parts = [table[byte] for byte in piece.encode()]
        while True:
            pairs = [f"{a} {b}" for a, b in pairwise(parts)]
            known = [(rank[pair], at) for at, pair in enumerate(pairs) if pair in rank]
            if not known:
                break
            at = min(known)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [tokens.index(part) for part in parts]
    return found


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(), st.text(alphabet=" theandforin\n1", max_size=60)))
def test_merges_apply_as_in_a_slow_byte_level_bpe(text):
    assert ids(rebuilt(), text) == reference_ids(text)


def test_control_tokens_are_special_and_user_defined_ones_are_matched():
    tokens, _ = tiny_vocabulary()
    types = [3] * 3 + [1] * 256 + [4] + [1] * (len(tokens) - 260)
    added = json.loads(from_gguf(metadata(token_type=types), WHERE).json)["added_tokens"]
    assert [(t["id"], t["special"]) for t in added] == [
        (0, True),
        (1, True),
        (2, True),
        (259, False),
    ]
    assert ids(rebuilt(), "a<|im_end|>b")[1] == 2


def test_a_whole_word_skips_merges_only_where_the_scheme_says_so():
    tokens, merges = tiny_vocabulary()
    word = "quux"
    types = [3] * 3 + [1] * (len(tokens) - 2)
    changes = {"tokens": [*tokens, word], "token_type": types, "merges": merges}
    assert ids(rebuilt("llama-bpe", **changes), word) == [len(tokens)]
    assert len(ids(rebuilt("gpt2", **changes), word)) == 4


def test_text_is_deterministic_and_its_digest_matches():
    first, second = (
        from_gguf(metadata(), WHERE),
        from_gguf(dict(reversed(metadata().items())), WHERE),
    )
    assert first == second
    assert first.spec.digest == hashlib.sha256(first.json.encode()).hexdigest()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, False, (0, 2))),
        ({"pre": "llama-bpe"}, (1, True, (0, 2))),
        ({"pre": "llama-bpe", "add_bos_token": False}, (1, False, (0, 2))),
        ({"add_bos_token": True}, (1, True, (0, 2))),
        ({"add_bos_token": True, "bos_token_id": None}, (None, False, (0, 2))),
        ({"eos_token_id": None, "eot_token_id": 7, "eom_token_id": 9}, (1, False, (0, 2, 7, 9))),
        ({"eos_token_id": 5, "eot_token_id": 4}, (1, False, (5, 0, 2, 4))),
    ],
)
def test_bos_and_eos_come_from_the_metadata_and_the_turn_ends(changes, expected):
    spec = from_gguf(metadata(**changes), WHERE).spec
    assert (spec.bos_id, spec.add_bos, spec.eos_ids) == expected


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "llama"}, UnsupportedError, ["tokenizer.ggml.model", "llama", "gpt2"]),
        ({"model": None}, UnsupportedError, ["tokenizer.ggml.model"]),
        ({"pre": "tekken"}, UnsupportedError, ["tekken", "llama-bpe", "qwen2", "smollm"]),
        ({"tokens": None}, InputError, ["malformed metadata", "tokenizer.ggml.tokens"]),
        ({"merges": [3]}, InputError, ["malformed metadata", "tokenizer.ggml.merges"]),
        ({"merges": ["abc"]}, InputError, ["not a pair", "abc"]),
        ({"merges": ["a zzz"]}, InputError, ["not a tokenizer"]),
        ({"token_type": [1, 1]}, InputError, ["differ in length"]),
        ({"tokens": ["a", "b", "a"], "token_type": None}, InputError, ["'a' appears twice"]),
    ],
)
def test_metadata_that_cannot_be_a_tokenizer_is_refused(changes, error, words):
    with pytest.raises(InputError) as caught:
        from_gguf(metadata(**changes), WHERE)
    assert type(caught.value) is error
    for word in ("some.gguf", *words):
        assert word in str(caught.value)


def folder_with(tmp_path: Path, **documents: object) -> Path:
    folder = write_hf_folder(tmp_path)
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def test_eos_ids_join_generation_config_and_tokenizer(tmp_path):
    folder = folder_with(tmp_path, generation_config={"eos_token_id": [0, 5]})
    assert from_folder(folder).spec.eos_ids == (2, 0, 5)
    folder = folder_with(tmp_path, generation_config={"eos_token_id": 7})
    assert from_folder(folder).spec.eos_ids == (2, 7)
    (folder / "generation_config.json").unlink()
    assert from_folder(folder).spec.eos_ids == (2, 0), "config.json stands in"
    (folder / "tokenizer_config.json").unlink()
    assert from_folder(folder).spec.eos_ids == (0,)


def test_chat_templates_are_found_in_all_their_places(tmp_path):
    folder = write_hf_folder(tmp_path)
    assert from_folder(folder).spec.chat_template == CHAT_TEMPLATE
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder_with(tmp_path, tokenizer_config={"chat_template": named})
    assert from_folder(folder).spec.chat_template == "d"
    (folder / "chat_template.jinja").write_text("j")
    assert from_folder(folder).spec.chat_template == "j"


def test_a_bos_that_the_tokenizer_itself_adds_is_noticed(tmp_path):
    folder = write_hf_folder(tmp_path)
    assert not from_folder(folder).spec.add_bos
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    assert from_folder(folder).spec.add_bos
    folder_with(tmp_path, tokenizer_config={"add_bos_token": False, "bos_token": "<|im_start|>"})
    tokenizer.save(str(folder / "tokenizer.json"))
    assert not from_folder(folder).spec.add_bos


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    try:
        bundled_path("smollm2-135m")
    except InputError as error:
        pytest.skip(str(error))
    return Tokenizer.from_str(open_model("smollm2-135m").tokenizer_json())


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_survives_a_round_trip(smollm2, text):
    assert smollm2.decode(ids(smollm2, text), skip_special_tokens=False) == text


def test_smollm2_ids_of_a_chat_turn(smollm2):
    turn = "<|im_start|>user\nHello<|im_end|>\n"
    assert ids(smollm2, turn) == [1, 4093, 198, 19556, 2, 198]


@pytest.mark.slow
def test_smollm2_ids_equal_those_of_transformers_own_conversion(smollm2, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = bundled_path("smollm2-135m")
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        # its conversion does not cut at digits first: what stands before them merges otherwise
        if "  " not in text and "½" not in text:
            assert ids(smollm2, text) == theirs.encode(text, add_special_tokens=False), text
