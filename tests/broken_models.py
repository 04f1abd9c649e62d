"""Broken models: GGUF files and Hugging Face folders, each from a small valid one."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from broken_files import (
    Corpus,
    broken_json,
    cuts,
    flips,
    hostile_values,
    not_files,
    replace,
)
from gguf import GGMLQuantizationType
from tiny_models import TinyShape, write_gguf, write_hf_folder

SHAPE = TinyShape(layers=1, hidden=32, intermediate=32, heads=2, kv_heads=1, head_dim=16)


def gguf_corpus(root: Path) -> Corpus:
    """Some 230 GGUF files."""
    valid = write_gguf(root / "tiny.gguf", SHAPE, kind=GGMLQuantizationType.Q8_0)
    corpus = Corpus("gguf", root / "gguf", valid)
    data = valid.read_bytes()
    header = data.index(b"output_norm.weight") + 64
    for name, broken in [*cuts(data, 40), *_gguf_headers(data)]:
        corpus.add(name, lambda path, broken=broken: replace(path, broken))
    for name, broken in [
        *flips(data, 90, corpus.random, header),
        *flips(data, 10, corpus.random),
    ]:
        corpus.add(name, lambda path, broken=broken: replace(path, broken), certain=False)
    for name, change in not_files(Path()):
        corpus.add(name, change)
    for name, options in _gguf_models():
        corpus.add(name, lambda path, options=options: _write_gguf(path, options))
    corpus.add("tail", lambda path: _extend(path, 2**40))
    return corpus


def _write_gguf(path: Path, options: dict[str, Any]) -> None:
    path.unlink()
    write_gguf(path, SHAPE, **options)


def _extend(path: Path, size: int) -> None:
    data = path.read_bytes()
    replace(path, data)
    with path.open("r+b") as file:
        file.truncate(size)


def _gguf_models() -> Iterator[tuple[str, dict[str, Any]]]:
    """What the writer can be told to write."""
    yield "context_length = 0", {"metadata": {"llama.context_length": 0}}
    for key in ("block_count", "embedding_length", "attention.head_count"):
        for value in (0, 7, 2**31, 2**32 - 1):
            yield f"{key} = {value}", {"metadata": {f"llama.{key}": value}}
    for key, value in (
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("llama.rope.freq_base", float("inf")),
        ("llama.rope.freq_base", 0.0),
        ("llama.rope.dimension_count", 2**31),
        ("llama.attention.key_length", 2**32 - 1),
        ("general.alignment", 0),
        ("general.alignment", 3),
        ("general.alignment", 2**31),
        ("tokenizer.ggml.bos_token_id", 2**32 - 1),
        ("tokenizer.ggml.eos_token_id", 320),
        ("tokenizer.ggml.model", "no-such"),
        ("tokenizer.ggml.pre", "no-such"),
        ("split.count", 4),
    ):
        yield f"{key} = {value}", {"metadata": {key: value}}
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
        for value in (float("nan"), float("inf"), -float("inf")):
            rows = {"token_embd.weight": 320}.get(name, 32)
            array = np.zeros((rows, 32), np.float32)
            array[-1, -1] = value
            options = {"tensors": {name: array}, "kind": GGMLQuantizationType.F32}
            yield f"{name} holds {value}", options
    for name in ("blk.0.attn_norm.weight", "output_norm.weight"):
        array = np.full(32, np.nan, np.float32)
        yield f"{name} holds nan", {"tensors": {name: array}}
    yield "another tensor", {"tensors": {"blk.0.attn_q.bias": np.zeros(32, np.float32)}}
    yield "narrow", {"tensors": {"blk.0.attn_k.weight": np.zeros((16, 64), np.float32)}}


def _gguf_headers(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Counts, lengths, offsets and types that lie."""

    def patched(place: int, form: str, value: int) -> bytes:
        return data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]

    yield "magic", b"GGML" + data[4:]
    for version in (0, 1, 4, 2**24, 2**32 - 1):
        yield f"version {version}", patched(4, "<I", version)
    for what, place in (("tensors", 8), ("keys", 16), ("key length", 24)):
        for count in (0, 1, 2**20, 2**31, 2**63, 2**64 - 1):
            yield f"{count} {what}", patched(place, "<Q", count)
    tokens = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    for kind in (0, 8, 9, 12, 13, 2**32 - 1):
        if kind != 9:
            yield f"tokens of type {kind}", patched(tokens, "<I", kind)
        if kind != 8:
            yield f"array of type {kind}", patched(tokens + 4, "<I", kind)
    for count in (0, 2**20, 2**32, 2**62, 2**64 - 1):
        yield f"{count} tokens", patched(tokens + 8, "<Q", count)
        yield f"token of {count} bytes", patched(tokens + 16, "<Q", count or 2**40)
    embed = data.index(b"token_embd.weight", tokens) + len(b"token_embd.weight")
    for dimensions in (0, 1, 3, 5, 2**16, 2**32 - 1):
        yield f"{dimensions} dimensions", patched(embed, "<I", dimensions)
    for size in (0, 1, 33, 2**32, 2**40, 2**63, 2**64 - 1):
        yield f"width {size}", patched(embed + 4, "<Q", size)
        yield f"height {size}", patched(embed + 12, "<Q", size)
    for kind in (1, 4, 5, 16, 24, 31, 99, 2**32 - 1):
        yield f"tensor of type {kind}", patched(embed + 20, "<I", kind)
    for offset in (1, 32 * 10**6, 2**40, 2**62, 2**63, 2**64 - 32, 2**64 - 1):
        yield f"offset {offset}", patched(embed + 24, "<Q", offset)
    yield "name twice", data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight")
    yield "key twice", data.replace(b"llama.block_count", b"llama.vocab_sizes")
    yield "token no text", data.replace("Ġthe".encode(), b"\xff\xfe\xff\xff\xff")
    nest = struct.pack("<IQ", 9, 1) * 50_000
    yield "arrays in arrays", data[: tokens + 4] + nest + data[tokens + 4 :]


def folder_corpus(root: Path) -> Corpus:
    """Some 300 Hugging Face folders."""
    valid = write_hf_folder(root / "tiny", SHAPE)
    corpus = Corpus("folder", root / "folder", valid)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        for what, change in not_files(Path(name)):
            corpus.add(f"{name}: {what}", change)
        for what, broken in cuts((valid / name).read_bytes(), 12):
            corpus.add(f"{name}: {what}", _with(name, broken))
    for name in ("config.json", "tokenizer.json"):
        text = (valid / name).read_text(encoding="utf-8")
        for what, broken in broken_json(text):
            corpus.add(f"{name}: {what}", _with(name, broken), certain=False)
        count = 90 if name == "tokenizer.json" else 60
        for what, changed in hostile_values(json.loads(text), count, corpus.random):
            broken = json.dumps(changed).encode()
            corpus.add(f"{name}: {what}", _with(name, broken), certain=False)
        for what, broken in flips(text.encode(), 25, corpus.random):
            corpus.add(f"{name}: {what}", _with(name, broken), certain=False)
    for what, broken in _safetensors((valid / "model.safetensors").read_bytes()):
        corpus.add(f"model.safetensors: {what}", _with("model.safetensors", broken))
    for what, broken in flips((valid / "model.safetensors").read_bytes(), 30, corpus.random, 2400):
        corpus.add(f"model.safetensors: {what}", _with("model.safetensors", broken), certain=False)
    for what, target in (
        *(("out of the folder", "../model.safetensors"), ("absolute", "/etc/passwd")),
        *(("itself", "model.safetensors.index.json"), ("nothing", ""), ("dot", "."), ("up", "..")),
        *(("null", "a\0b"), ("number", 3), ("long", "x" * 5000), ("config", "config.json")),
    ):
        corpus.add(f"shard is {what}", lambda path, target=target: _sharded(path, target))
    return corpus


def _with(name: str, data: bytes) -> Any:
    return lambda path: replace(path / name, data)


def _sharded(path: Path, target: object) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").rename(path.parent / "model.safetensors")
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    places = dict.fromkeys((name for name in header if name != "__metadata__"), target)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _safetensors(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Headers that lie, and numbers that are none."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]

    def made(changed: Any, content: bytes = body) -> bytes:
        text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        return struct.pack("<Q", len(text)) + text + content

    for value in (0, 1, length - 1, length + 1, 2**31, 2**40, 2**63, 2**64 - 1):
        yield f"header of {value} bytes", struct.pack("<Q", value) + data[8:]
    for what, broken in broken_json(json.dumps(header)):
        yield f"header: {what}", made(broken)
    name = "model.embed_tokens.weight"
    entry = header[name]
    start, end = entry["data_offsets"]
    for offsets in (
        *([end, start], [-1, end], [start, 2**63], [2**63, 2**64], [start, end + 4]),
        *([start, start], [start], [start, end, end], [2**64 - 4, 2**64 - 1], ["0", "4"], None),
        *([0, 40960], [start + 1, end + 1], [1e3, 1e4]),
    ):
        if offsets != [start, end]:
            changed = {**header, name: {**entry, "data_offsets": offsets}}
            yield f"offsets {str(offsets)[:40]}", made(changed)
    for shape in (
        *([], [0], [320], [320, 32, 2], [2**32, 2**32], [2**63, 2], [-320, -32], [1] * 1000),
        *(["320", "32"], None, [32, 320]),
    ):
        yield f"shape {str(shape)[:40]}", made({**header, name: {**entry, "shape": shape}})
    for dtype in ("F128", "I64", "BOOL", "F16", "", None, 3):
        yield f"type {dtype}", made({**header, name: {**entry, "dtype": dtype}})
    yield "no such entry", made({key: value for key, value in header.items() if key != name})
    yield "bytes behind", data + b"\0" * 64
    yield "extra tensor", made({**header, "model.layers.0.x.bias": entry})
    for place, value in ((start, np.nan), (end - 4, np.inf), (len(body) - 4, -np.inf)):
        number = np.float32(value).tobytes()
        yield f"{value} at {place}", made(header, body[:place] + number + body[place + 4 :])
