"""Tokenizers: taken over from a Hugging Face folder, rebuilt from the metadata of a GGUF file."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from profiles.errors import InputError, UnsupportedError
from runtime.model_spec import TokenizerSpec

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDS = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"),
        *("<|endoftext|>", "<|end_of_text|>"),
    }
)
"""Control tokens that end a turn or a text even where a GGUF file's metadata names only one."""


MAX_TEXT_BYTES = 256 * 2**20
"""A longer document of a model is refused; the largest tokenizers have 30 MB."""
_GET_AGAIN = "download the model's folder again"

_Document = TypeVar("_Document")


class LoadedTokenizer(msgspec.Struct, frozen=True):
    """What a source hands on: ids and template for the plan, and the tokenizer's own text."""

    spec: TokenizerSpec
    json: str
    vocab: int
    """Largest token id plus one."""


class _PreTokenizer(msgspec.Struct, frozen=True):
    """How one ``tokenizer.ggml.pre`` cuts text before the merges."""

    steps: tuple[dict[str, Any], ...]
    """Pre-tokenizers of the tokenizers library, before the byte mapping."""
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    """A piece that is a token as a whole is not built up from merges."""
    add_bos: bool = False
    """Unless the file says otherwise."""


def _split(pattern: str) -> dict[str, Any]:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


_DIGITS: dict[str, Any] = {"type": "Digits", "individual_digits": True}
_SMOLLM = _PreTokenizer((_DIGITS, _split(_GPT2)))
_LLAMA_3 = _PreTokenizer((_split(_CASELESS % "{1,3}"),), ignore_merges=True, add_bos=True)
_PLAIN = _PreTokenizer((_split(_GPT2),))
_QWEN_2 = _PreTokenizer((_split(_CASELESS % ""),), normalizer={"type": "NFC"})
# llama.cpp's fallback cuts punctuation and digits more finely than GPT-2 does
_DEFAULT = _PreTokenizer(
    (
        _split(r"[\p{P}\$\+<=>\^~\|]+"),
        _split(_GPT2),
        _split(r"\p{N}+"),
        _split(r"[0-9][0-9][0-9]"),
    )
)

PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "default": _DEFAULT,
    "gpt2": _PLAIN,
    "gpt-2": _PLAIN,
    "llama-bpe": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "llama3": _LLAMA_3,
    "qwen2": _QWEN_2,
    "smollm": _SMOLLM,
}
"""``tokenizer.ggml.pre`` -> how it cuts; the names are llama.cpp's."""


class _TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


_ADDED = frozenset({_TokenType.UNKNOWN, _TokenType.CONTROL, _TokenType.USER_DEFINED})


class _GgufKeys(msgspec.Struct, frozen=True):
    """The metadata that describes a byte-level BPE."""

    tokens: list[str] = msgspec.field(name="tokenizer.ggml.tokens")
    merges: list[str] = msgspec.field(name="tokenizer.ggml.merges")
    token_type: list[int] | None = msgspec.field(name="tokenizer.ggml.token_type", default=None)
    pre: str = msgspec.field(name="tokenizer.ggml.pre", default="default")
    bos: int | None = msgspec.field(name="tokenizer.ggml.bos_token_id", default=None)
    eos: int | None = msgspec.field(name="tokenizer.ggml.eos_token_id", default=None)
    eot: int | None = msgspec.field(name="tokenizer.ggml.eot_token_id", default=None)
    eom: int | None = msgspec.field(name="tokenizer.ggml.eom_token_id", default=None)
    add_bos: bool | None = msgspec.field(name="tokenizer.ggml.add_bos_token", default=None)
    chat_template: str | None = msgspec.field(name="tokenizer.chat_template", default=None)


def from_gguf(metadata: Mapping[str, object], where: Path) -> LoadedTokenizer:
    """Rebuilds a tokenizer from GGUF metadata, as deterministic text.

    Raises UnsupportedError for anything but a byte-level BPE with a known pre-tokenizer and
    InputError for metadata that is missing or contradicts itself.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedError(
            "unsupported tokenizer.ggml.model",
            where=where,
            found=kind,
            expected="gpt2 (byte-level BPE)",
        )
    try:
        keys = msgspec.convert(dict(metadata), _GgufKeys)
    except msgspec.ValidationError as error:
        raise InputError(f"malformed metadata: {error}", where=where) from error
    pre = _pre_tokenizer(keys.pre, where)
    types = keys.token_type or [int(_TokenType.NORMAL)] * len(keys.tokens)
    if len(types) != len(keys.tokens):
        raise InputError(
            "tokenizer.ggml.token_type and tokens differ in length",
            where=where,
            found=f"{len(types)} and {len(keys.tokens)}",
        )
    text = _bpe_json(keys, types, pre, where)
    spec = TokenizerSpec(
        bos_id=keys.bos,
        add_bos=keys.bos is not None and (pre.add_bos if keys.add_bos is None else keys.add_bos),
        eos_ids=_gguf_eos_ids(keys, types),
        chat_template=keys.chat_template,
        digest=_digest(text),
    )
    _parse(text, where)
    return LoadedTokenizer(spec, text, len(keys.tokens))


def _pre_tokenizer(name: str, where: Path) -> _PreTokenizer:
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            "unsupported tokenizer.ggml.pre",
            where=where,
            found=name,
            expected=f"one of {', '.join(sorted(PRE_TOKENIZERS))}",
        )
    return PRE_TOKENIZERS[name]


def _bpe_json(keys: _GgufKeys, types: list[int], pre: _PreTokenizer, where: Path) -> str:
    vocab = {token: index for index, token in enumerate(keys.tokens)}
    if len(vocab) != len(keys.tokens):
        twice = next(t for i, t in enumerate(keys.tokens) if vocab[t] != i)
        raise InputError(f"token {twice!r} appears twice", where=where)
    merges = [merge.split(" ") for merge in keys.merges]
    for merge in merges:
        if len(merge) != 2:
            raise InputError("a merge is not a pair", where=where, found=repr(" ".join(merge)))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [*pre.steps, {**byte_level, "use_regex": False}]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(keys.tokens, types),
        "normalizer": pre.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Tokens that are matched in the text before it is cut; control tokens are special."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _TokenType.USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in _ADDED
    ]


def _gguf_eos_ids(keys: _GgufKeys, types: list[int]) -> tuple[int, ...]:
    ends = [
        index
        for index, (token, kind) in enumerate(zip(keys.tokens, types, strict=True))
        if kind == _TokenType.CONTROL and token in _ENDS
    ]
    return _in_order(keys.eos, [keys.eot, keys.eom, *ends])


def _in_order(own: int | None, others: Iterable[int | None]) -> tuple[int, ...]:
    """The tokenizer's own EOS, which a chat template means by ``eos_token``, then the others."""
    ids = dict.fromkeys([own, *sorted({token for token in others if token is not None})])
    return tuple(token for token in ids if token is not None)


class _Added(msgspec.Struct, frozen=True):
    content: str


class _Template(msgspec.Struct, frozen=True):
    name: str
    template: str


class _FolderConfig(msgspec.Struct, frozen=True):
    """The part of ``tokenizer_config.json`` that matters here."""

    bos_token: str | _Added | None = None
    eos_token: str | _Added | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[_Template] | None = None


class TokenIds(msgspec.Struct, frozen=True):
    """BOS and EOS as ``config.json`` and ``generation_config.json`` give them."""

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


def from_folder(folder: Path) -> LoadedTokenizer:
    """Takes ``tokenizer.json`` as it is, and BOS, EOS and chat template from beside it.

    EOS ids are those of ``generation_config.json`` (else ``config.json``) and the tokenizer's
    own. Raises InputError for a file that is missing or malformed.
    """
    path = folder / "tokenizer.json"
    text = read_text(path)
    tokenizer = _parse(text, path)
    config = read_json(folder / "tokenizer_config.json", _FolderConfig) or _FolderConfig()
    model = read_json(folder / "config.json", TokenIds) or TokenIds()
    generation = read_json(folder / "generation_config.json", TokenIds) or TokenIds()
    bos = _token_id(tokenizer, config.bos_token)
    bos = model.bos_token_id if bos is None else bos
    eos = generation.eos_token_id if generation.eos_token_id is not None else model.eos_token_id
    named = eos if isinstance(eos, list) else [eos]
    add_bos = config.add_bos_token
    if add_bos is None:
        add_bos = tokenizer.encode("a").ids[:1] == [bos]
    spec = TokenizerSpec(
        bos_id=bos,
        add_bos=add_bos and bos is not None,
        eos_ids=_in_order(_token_id(tokenizer, config.eos_token), named),
        chat_template=_chat_template(folder, config),
        digest=_digest(text),
    )
    vocab: dict[str, int] = tokenizer.get_vocab()
    return LoadedTokenizer(spec, text, max(vocab.values(), default=-1) + 1)


def _token_id(tokenizer: Tokenizer, token: str | _Added | None) -> int | None:
    if token is None:
        return None
    return tokenizer.token_to_id(token.content if isinstance(token, _Added) else token)


def _chat_template(folder: Path, config: _FolderConfig) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    if isinstance(config.chat_template, list):
        named = {entry.name: entry.template for entry in config.chat_template}
        return named.get("default")
    return config.chat_template


def read_text(path: Path) -> str:
    """A UTF-8 file; InputError if it cannot be read."""
    try:
        # Opening a named pipe would wait for ever
        if path.exists() and not path.is_file():
            raise InputError("not a file", where=path, expected="a regular file", hint=_GET_AGAIN)
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError as error:
        raise InputError("file is missing", where=path, hint=_GET_AGAIN) from error
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", where=path) from error
    if len(data) > MAX_TEXT_BYTES:
        expected = f"at most {MAX_TEXT_BYTES} bytes"
        raise InputError("file is too large", where=path, expected=expected, hint=_GET_AGAIN)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text: {error.reason}", where=path, hint=_GET_AGAIN) from error


def read_json(path: Path, kind: type[_Document]) -> _Document | None:
    """A JSON file as ``kind``, None if there is no such file; InputError if it is malformed."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(read_text(path), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"malformed JSON: {error}", where=path, hint=_GET_AGAIN) from error


def _parse(text: str, where: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"not a tokenizer: {error}", where=where, hint=_GET_AGAIN) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
