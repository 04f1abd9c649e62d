"""Tiny random models for tests: in memory, as Hugging Face folders and as GGUF files.

Weights depend on the shape and the seed alone, so the same model can be had in every form.
"""

import json
import math
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
    architecture: str = "llama"
    llama3: tuple[float, float, float, int] | None = None
    """Factor, low and high frequency factor and original context of a stretched rotation."""


GQA = TinyShape()
MHA = TinyShape(kv_heads=4, theta=100_000.0)
UNTIED = TinyShape(layers=2, kv_heads=1, tied=False)
WIDE_HEADS = TinyShape(heads=2, kv_heads=1, head_dim=48, tied=False)
LLAMA3 = TinyShape(layers=2, llama3=(8.0, 1.0, 4.0, 64))
MISTRAL = TinyShape(layers=2, architecture="mistral", head_dim=32, tied=False)
QWEN2 = TinyShape(layers=2, architecture="qwen2", tied=False)
QWEN3 = TinyShape(layers=2, heads=2, kv_heads=1, head_dim=128, architecture="qwen3")
K_BLOCKS = TinyShape(layers=1, hidden=256, intermediate=512, head_dim=64)
"""Rows of whole 256-blocks."""
SHAPES = {
    "gqa": GQA,
    "mha": MHA,
    "untied": UNTIED,
    "wide_heads": WIDE_HEADS,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}


def tiny_spec(shape: TinyShape = GQA, name: str = "tiny") -> ModelSpec:
    """The ModelSpec of a tiny model that exists in memory only."""
    return ModelSpec(
        name=name,
        architecture=shape.architecture,
        layers=shape.layers,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=VOCAB,
        max_context=shape.max_context,
        norm_eps=1e-5,
        rope=RopeSpec(shape.theta, rope_factors(shape)),
        tied_head=shape.tied,
        tokenizer=TokenizerSpec(1, False, (EOS_ID,), CHAT_TEMPLATE, "0" * 64),
        weights_digest="0" * 64,
        qkv_bias=shape.architecture == "qwen2",
        qk_norm=shape.architecture == "qwen3",
    )


def rope_factors(shape: TinyShape) -> tuple[float, ...]:
    """What Llama 3.1 divides its frequencies by: 1 for fast pairs, its factor for slow ones."""
    if shape.llama3 is None:
        return ()
    factor, low, high, original = shape.llama3
    turns = [
        f * original / (2 * math.pi) for f in RopeSpec(shape.theta).frequencies(shape.head_dim)
    ]
    between = [min(max((each - low) / (high - low), 0.0), 1.0) for each in turns]
    return tuple(1 / (share + (1 - share) / factor) for share in between)


def tiny_weights(shape: TinyShape = GQA, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Canonical name -> float32 array; sub-layers weigh enough that output is not one token."""
    random = np.random.default_rng(seed)
    weights: dict[str, NDArray[np.float32]] = {}
    for name, dims in tensor_shapes(tiny_spec(shape)).items():
        if name.endswith("_bias"):
            array = 0.5 * random.standard_normal(dims)
        elif len(dims) == 1:
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

    def rows(self, name: str, first: int, end: int) -> NDArray[np.float32]:
        return self.tensor(name)[first:end]

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
_HF_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def hf_name(name: str) -> str:
    """A canonical tensor name as Hugging Face writes it."""
    if name in _HF_OUTER:
        return _HF_OUTER[name]
    _, index, part = name.split(".")
    return f"model.layers.{index}.{_HF_INNER[part]}"


def hf_config(spec: ModelSpec, shape: TinyShape | None = None) -> dict[str, Any]:
    """``config.json`` of a model; ``shape`` says how its rotation is stretched."""
    config = {
        "architectures": [_HF_CLASSES[spec.architecture]],
        "model_type": spec.architecture,
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
        "rope_scaling": hf_rope_scaling(shape) if shape else None,
        "tie_word_embeddings": spec.tied_head,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    family: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": False, "mlp_bias": False},
        "mistral": {"sliding_window": None},
        "qwen2": {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1},
        "qwen3": {"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
    }
    return config | family[spec.architecture]


def hf_rope_scaling(shape: TinyShape) -> dict[str, Any] | None:
    """``rope_scaling`` of ``config.json``."""
    if shape.llama3 is None:
        return None
    factor, low, high, original = shape.llama3
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
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
        "config.json": {**hf_config(spec, shape), **(config or {})},
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
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


def write_gguf(
    path: Path,
    shape: TinyShape = GQA,
    seed: int = 0,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    metadata: Mapping[str, str | int | float] | None = None,
    tensors: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    """Writes a GGUF file as llama.cpp's converter does, with matrices of type ``kind``.

    ``kinds`` gives some parts (``down``, ``embed``) another type; ``metadata`` adds keys;
    ``tensors`` replaces or adds tensors by GGUF name, as float32.
    """
    spec = tiny_spec(shape)
    # Mistral's files say llama
    architecture = "llama" if spec.architecture == "mistral" else spec.architecture
    writer = gguf.GGUFWriter(path, architecture)
    _add_gguf_metadata(writer, spec)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    stored: dict[str, NDArray[Any]] = {}
    special: dict[str, GGMLQuantizationType] = {}
    for name, array in tiny_weights(shape, seed).items():
        part = name.rpartition(".")[2]
        heads = {"q": spec.heads, "k": spec.kv_heads}.get(part) if architecture == "llama" else None
        stored[gguf_name(name)] = permute(array, heads) if heads else array
        special[gguf_name(name)] = (kinds or {}).get(part, kind)
    if spec.rope.factors:
        stored["rope_freqs.weight"] = np.array(spec.rope.factors, np.float32)
    for name, array in {**stored, **(tensors or {})}.items():
        dtype = special.get(name, kind) if array.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(array, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_K_SCALES = {
    GGMLQuantizationType.Q4_K: slice(0, 4),
    GGMLQuantizationType.Q5_K: slice(0, 4),
    GGMLQuantizationType.Q6_K: slice(-2, None),
}
"""Types that gguf reads but does not write -> bytes of a block that are its float16 scales."""


def quantize(array: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[Any]:
    """Blocks of type ``kind``; where gguf cannot make them, random ones of moderate numbers."""
    if kind not in _K_SCALES:
        return gguf.quants.quantize(array, kind)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(array.shape)
    blocks = random.integers(0, 256, (array.shape[0], array.shape[1] // weights, size), np.uint8)
    scales = blocks[:, :, _K_SCALES[kind]]
    moderate = random.uniform(0.0002, 0.001, (*scales.shape[:2], scales.shape[2] // 2))
    scales[:] = moderate.astype(np.float16).view(np.uint8)
    return blocks.reshape(array.shape[0], -1)


def gguf_name(name: str) -> str:
    """A canonical tensor name as GGUF writes it."""
    if name in _GGUF_OUTER:
        return _GGUF_OUTER[name]
    _, index, part = name.split(".")
    return f"blk.{index}.{_GGUF_INNER[part]}"


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


def transformers_shell(spec: ModelSpec, shape: TinyShape | None = None) -> Any:
    """transformers' model of the dimensions of ``spec``, with eager attention."""
    import transformers

    keys = hf_config(spec, shape)
    scaling = keys.pop("rope_scaling") or {"rope_type": "default"}
    rope = {"rope_theta": keys.pop("rope_theta"), **scaling}
    del keys["model_type"]
    family = getattr(transformers, keys["architectures"][0])
    config = family.config_class(**keys, rope_parameters=rope, attn_implementation="eager")
    return family(config).eval()


def transformers_model(source: ModelSource, shape: TinyShape | None = None) -> Any:
    """transformers' float32 model with the tensors of a source."""
    import torch

    model = transformers_shell(source.spec, shape)
    names = [*tensor_shapes(source.spec), "head"]
    state = {hf_name(name): torch.from_numpy(source.tensor(name)) for name in names}
    model.load_state_dict(state)
    return model
