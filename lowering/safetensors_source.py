"""A model in a Hugging Face folder: config.json, safetensors weights, tokenizer.json."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from lowering.hf_config import Config, read_config, rope_spec
from lowering.source import (
    FAMILIES,
    PackedTensor,
    check_dimensions,
    check_tensors,
    digest_of,
    stored_name,
    tensor_shapes,
)
from lowering.tokenizer import LoadedTokenizer, from_folder, read_json
from profiles.errors import InputError, UnsupportedError
from runtime.model_spec import ModelSpec

_OUTER = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_DTYPES = frozenset({"F32", "F16", "BF16", "F64"})
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_GET_AGAIN = "download the model's folder again"


class _ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class SafetensorsSource:
    """A ModelSource over a Hugging Face folder of a supported architecture."""

    def __init__(self, folder: Path) -> None:
        family, config = read_config(folder / "config.json")
        self._file_of = _weight_files(folder)
        self._files = {path: _open(path) for path in sorted(set(self._file_of.values()))}
        tokenizer = from_folder(folder)
        self._tokenizer_json = tokenizer.json
        self._spec = _spec(family, config, tokenizer, folder, list(self._files))
        check_dimensions(self._spec, folder / "config.json")
        self._check_tensors(folder)
        self._known = frozenset(tensor_shapes(self._spec)) | {"head"}

    @property
    def spec(self) -> ModelSpec:
        """Dimensions, tokens and digests."""
        return self._spec

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A fresh, contiguous float32 copy of a tensor; KeyError for an unknown name."""
        return _widened(self._stored(name)[:])

    def rows(self, name: str, first: int, end: int) -> NDArray[np.float32]:
        """Rows ``first`` to ``end`` of a matrix, as ``tensor`` gives them."""
        return _widened(self._stored(name)[first:end])

    def packed(self, name: str) -> PackedTensor | None:
        """None: this format holds plain floats; KeyError for an unknown name."""
        if name not in self._known:
            raise KeyError(name)
        return None

    def tokenizer_json(self) -> str:
        """``tokenizer.json`` as it is."""
        return self._tokenizer_json

    def _stored(self, name: str) -> Any:
        """The tensor in its file, to be sliced; KeyError for an unknown name."""
        if name not in self._known:
            raise KeyError(name)
        native = _native_name(stored_name(name, self._spec.tied_head))
        return self._files[self._file_of[native]].get_slice(native)

    def _check_tensors(self, folder: Path) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, path in self._file_of.items():
            if _is_derived(name, self._spec.tied_head):
                continue
            try:
                stored = self._files[path].get_slice(name)
            except SafetensorError as error:
                raise InputError(f"tensor {name} is missing", where=path) from error
            if stored.get_dtype() not in _DTYPES:
                raise UnsupportedError(
                    f"tensor {name} has an unsupported type",
                    where=path,
                    found=stored.get_dtype(),
                    expected=f"one of {', '.join(sorted(_DTYPES))}",
                )
            shapes[name] = tuple(stored.get_shape())
        where = next(iter(self._files)) if len(self._files) == 1 else folder / _INDEX
        check_tensors(self._spec, shapes, _native_name, where)


def _spec(
    name: str, config: Config, tokenizer: LoadedTokenizer, folder: Path, files: list[Path]
) -> ModelSpec:
    path, family = folder / "config.json", FAMILIES[name]
    if tokenizer.vocab > config.vocab_size:
        raise InputError(
            "vocab_size is smaller than the tokenizer's vocabulary",
            where=path,
            found=config.vocab_size,
            expected=tokenizer.vocab,
        )
    head_dim = config.head_dim or family.head_dim
    if head_dim is None and config.hidden_size % config.num_attention_heads:
        raise InputError(
            "hidden_size is no multiple of num_attention_heads",
            where=path,
            found=f"{config.hidden_size} and {config.num_attention_heads}",
        )
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return ModelSpec(
        name=folder.resolve().name,
        architecture=name,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        max_context=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rope=rope_spec(config, head_dim, path),
        tied_head=config.tie_word_embeddings,
        tokenizer=tokenizer.spec,
        weights_digest=digest_of(files),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def _weight_files(folder: Path) -> Mapping[str, Path]:
    """Tensor -> the file that holds it, from the index of a sharded model or the one header."""
    single, index_path = folder / _WEIGHTS, folder / _INDEX
    if single.is_file():
        return dict.fromkeys(_open(single).keys(), single)
    index = read_json(index_path, _ShardIndex)
    if index is None:
        raise InputError(
            "no weights", where=folder, expected=f"{_WEIGHTS} or {_INDEX}", hint=_other(folder)
        )
    for tensor, name in index.weight_map.items():
        if not name:
            raise InputError(f"tensor {tensor} has no shard", where=index_path)
    for name in sorted(set(index.weight_map.values())):
        if Path(name).name != name:
            raise InputError("a shard lies outside the folder", where=index_path, found=name)
        if not os.path.isfile(folder / name):
            raise InputError(f"shard {name[:80]} is missing", where=folder, hint=_GET_AGAIN)
    return {tensor: folder / name for tensor, name in index.weight_map.items()}


def _other(folder: Path) -> str | None:
    """What to do about a folder that holds its weights in another form."""
    for path in sorted(folder.glob("*.gguf")):
        return f"to use the GGUF file in it, give {path}"
    return "weights saved with pickle are not read" if any(folder.glob("*.bin")) else None


def _open(path: Path) -> Any:
    """An open safetensors file; the header is checked against the file's length."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        what = f"truncated or malformed safetensors: {error}"
        raise InputError(what, where=path, hint=_GET_AGAIN) from error
    except MemoryError as error:
        raise InputError("too large to be mapped into memory", where=path) from error
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror or error}", where=path) from error


def _is_derived(name: str, tied_head: bool) -> bool:
    """Tensors that some files repeat although the configuration implies them."""
    return name.endswith(".rotary_emb.inv_freq") or (tied_head and name == _OUTER["head"])


def _widened(stored: torch.Tensor) -> NDArray[np.float32]:
    # the file is mapped: without the copy a float32 tensor would be a view of it
    return stored.to(torch.float32, copy=True).contiguous().numpy()


def _native_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, index, part = name.split(".")
    return f"model.layers.{index}.{_INNER[part]}"
