"""Tiny random Llama models for tests: in memory, as Hugging Face folders and as GGUF files.

Weights depend on the shape and the seed alone, so the same model can be had in every form.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.torch import save_file

from lowering.source import ModelSource, PackedTensor, tensor_shapes
from runtime.model_spec import ModelSpec, RopeSpec, TokenizerSpec

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 320
_WORDS = ("Ġthe", "Ġand", "ing", "Ġof", "Ġto", "Ġin", "Ġfor", "Ġreturn", "Ġself", "ĠĠĠĠ", "Ġis")


class TinyShape(msgspec.Struct, frozen=True):
    """Dimensions of a tiny model; rows are multiples of 32, so that every block type fits."""

    layers: int = 3
    hidden: int = 64
    intermediate: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    tied: bool = True
    theta: float = 10_000.0
    max_context: int = 512


GQA = TinyShape()
MHA = TinyShape(kv_heads=4, theta=100_000.0)
UNTIED = TinyShape(layers=2, kv_heads=1, tied=False)
WIDE_HEADS = TinyShape(heads=2, kv_heads=1, head_dim=48, tied=False)
SHAPES = {"gqa": GQA, "mha": MHA, "untied": UNTIED, "wide_heads": WIDE_HEADS}


def tiny_spec(shape: TinyShape = GQA, name: str = "tiny") -> ModelSpec:
    """The ModelSpec of a tiny model that exists in memory only."""
    return ModelSpec(
        name=name,
        architecture="llama",
        layers=shape.layers,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=VOCAB,
        max_context=shape.max_context,
        norm_eps=1e-5,
        rope=RopeSpec(theta=shape.theta),
        tied_head=shape.tied,
        tokenizer=TokenizerSpec(1, False, (EOS_ID,), CHAT_TEMPLATE, "0" * 64),
        weights_digest="0" * 64,
    )


def tiny_weights(shape: TinyShape = GQA, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Canonical name -> float32 array; sub-layers weigh enough that output is not one token."""
    random = np.random.default_rng(seed)
    weights: dict[str, NDArray[np.float32]] = {}
    for name, dims in tensor_shapes(tiny_spec(shape)).items():
        if len(dims) == 1:
            array = 1 + 0.1 * random.standard_normal(dims)
        else:
            scale = 0.3 if name in ("embed", "head") else 1.5 / dims[1] ** 0.5
            array = scale * random.standard_normal(dims)
        weights[name] = array.astype(np.float32)
    return weights


class ArraySource:
    """A ModelSource over arrays in memory."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, NDArray[np.float32]]) -> None:
        self.spec = spec
        self.weights = dict(weights)

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name == "head" and self.spec.tied_head:
            name = "embed"
        return self.weights[name].copy()

    def packed(self, name: str) -> PackedTensor | None:  # noqa: ARG002
        return None

    def tokenizer_json(self) -> str:
        return tiny_tokenizer_json()


def tiny_source(shape: TinyShape = GQA, seed: int = 0) -> ArraySource:
    """A tiny model in memory."""
    return ArraySource(tiny_spec(shape), tiny_weights(shape, seed))


def byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE, as GPT-2 defined it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + rank) for rank, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def tiny_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (special, bytes, merged) and merges, both in order of rank."""
    tokens = [*SPECIALS, *byte_characters()]
    merges: list[str] = []
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
                tokens.append(word[:end])
    return tokens, merges


def tiny_tokenizer_json() -> str:
    """A byte-level BPE of fewer than VOCAB tokens, as ``tokenizer.json``."""
    tokens, merges = tiny_vocabulary()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    document = {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": token, "special": True, **flags}
            for index, token in enumerate(SPECIALS)
        ],
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    return json.dumps(document, sort_keys=True)


_HF_OUTER = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_HF_INNER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """A canonical tensor name as Hugging Face writes it."""
    if name in _HF_OUTER:
        return _HF_OUTER[name]
    _, index, part = name.split(".")
    return f"model.layers.{index}.{_HF_INNER[part]}.weight"


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """``config.json`` of a model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": spec.tied_head,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }


def write_hf_folder(
    folder: Path,
    shape: TinyShape = GQA,
    seed: int = 0,
    *,
    dtype: str = "float32",
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a Hugging Face folder; ``config`` overrides keys of config.json."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    spec = tiny_spec(shape)
    tensors = {
        hf_name(name): torch.from_numpy(array).to(getattr(torch, dtype))
        for name, array in tiny_weights(shape, seed).items()
    }
    _save_tensors(folder, tensors, shards)
    documents = {
        "config.json": {**hf_config(spec), **(config or {})},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": [EOS_ID]},
        "tokenizer_config.json": {
            "bos_token": "<|im_start|>",
            "eos_token": {"content": "<|im_end|>"},
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for file, document in documents.items():
        (folder / file).write_text(json.dumps(document))
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    return folder


def _save_tensors(folder: Path, tensors: Mapping[str, Any], shards: int) -> None:
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        where: dict[str, str] = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            where |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


_GGUF_OUTER = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
_GGUF_INNER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def write_gguf(
    path: Path,
    shape: TinyShape = GQA,
    seed: int = 0,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    metadata: Mapping[str, str | int | float] | None = None,
    tensors: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    """Writes a GGUF file as llama.cpp's converter does, with matrices of type ``kind``.

    ``metadata`` adds keys; ``tensors`` replaces or adds tensors by GGUF name, as float32.
    """
    spec = tiny_spec(shape)
    writer = gguf.GGUFWriter(path, architecture)
    _add_gguf_metadata(writer, spec)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    stored: dict[str, NDArray[Any]] = {}
    for name, array in tiny_weights(shape, seed).items():
        heads = {"q": spec.heads, "k": spec.kv_heads}.get(name.rpartition(".")[2])
        stored[gguf_name(name)] = permute(array, heads) if heads else array
    for name, array in {**stored, **(tensors or {})}.items():
        dtype = kind if array.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(array, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """A canonical tensor name as GGUF writes it."""
    if name in _GGUF_OUTER:
        return _GGUF_OUTER[name]
    _, index, part = name.split(".")
    return f"blk.{index}.{_GGUF_INNER[part]}.weight"


def permute(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Puts the rows of a rotation's pairs next to each other, as llama.cpp's converter does."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _add_gguf_metadata(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    tokens, merges = tiny_vocabulary()
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def transformers_shell(spec: ModelSpec) -> Any:
    """A ``LlamaForCausalLM`` of the dimensions of ``spec`` with eager attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = hf_config(spec)
    rope = {"rope_theta": keys.pop("rope_theta"), "rope_type": "default"}
    del keys["rope_scaling"], keys["model_type"]
    config = LlamaConfig(**keys, rope_parameters=rope, attn_implementation="eager")
    return LlamaForCausalLM(config).eval()


def transformers_model(source: ModelSource) -> Any:
    """transformers' float32 model with the tensors of a source."""
    import torch

    model = transformers_shell(source.spec)
    names = [*tensor_shapes(source.spec), "head"]
    state = {hf_name(name): torch.from_numpy(source.tensor(name)) for name in names}
    model.load_state_dict(state)
    return model
