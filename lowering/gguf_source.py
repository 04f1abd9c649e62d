"""A model in one GGUF file: metadata, and weights that are dequantised one tensor at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import DTypeLike, NDArray

from lowering.source import (
    SUPPORTED_ARCHITECTURE,
    Count,
    LayerCount,
    PackedTensor,
    Scale,
    check_dimensions,
    check_tensors,
    digest_of,
    stored_name,
    tensor_shapes,
)
from lowering.tokenizer import LoadedTokenizer, from_gguf
from profiles.errors import InputError, UnsupportedError
from runtime.model_spec import ModelSpec, RopeSpec

_OUTER = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
_INNER = {
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
_PLAIN_TYPES = frozenset(
    {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
)
_MAX_TAIL_BYTES = 2**20
"""More than any alignment pads."""
_GET_AGAIN = "download or convert the file again"
_MALFORMED = (ValueError, KeyError, IndexError, TypeError, ArithmeticError, RecursionError)
"""What the reader raises on a broken file, beside OSError."""


class _LlamaKeys(msgspec.Struct, frozen=True):
    """The metadata of a ``llama`` file that gives its dimensions."""

    layers: LayerCount = msgspec.field(name="llama.block_count")
    hidden: Count = msgspec.field(name="llama.embedding_length")
    intermediate: Count = msgspec.field(name="llama.feed_forward_length")
    heads: Count = msgspec.field(name="llama.attention.head_count")
    max_context: Count = msgspec.field(name="llama.context_length")
    norm_eps: Scale = msgspec.field(name="llama.attention.layer_norm_rms_epsilon")
    kv_heads: Count | None = msgspec.field(name="llama.attention.head_count_kv", default=None)
    key_length: Count | None = msgspec.field(name="llama.attention.key_length", default=None)
    value_length: Count | None = msgspec.field(name="llama.attention.value_length", default=None)
    rope_dims: Count | None = msgspec.field(name="llama.rope.dimension_count", default=None)
    rope_theta: Scale = msgspec.field(name="llama.rope.freq_base", default=10_000.0)


class GgufSource:
    """A ModelSource over one GGUF file of architecture ``llama``."""

    def __init__(self, path: Path, name: str) -> None:
        reader, metadata = _read(path)
        _check_supported(metadata, reader, path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        tokenizer = from_gguf(metadata, path)
        self._tokenizer_json = tokenizer.json
        self._spec = self._read_spec(metadata, tokenizer, path, name)
        check_dimensions(self._spec, path)
        shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        check_tensors(self._spec, shapes, _native_name, path)
        self._known = frozenset(tensor_shapes(self._spec)) | {"head"}

    @property
    def spec(self) -> ModelSpec:
        """Dimensions, tokens and digests."""
        return self._spec

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A fresh, contiguous float32 copy of a tensor; KeyError for an unknown name."""
        stored = self._stored(name)
        rows = dequantize(stored.data, stored.tensor_type).reshape(_shape(stored))
        return np.array(self._unpermute(name, rows), dtype=np.float32, order="C")

    def packed(self, name: str) -> PackedTensor | None:
        """The tensor in its file's own quantised blocks; None if the file has plain floats."""
        stored = self._stored(name)
        if stored.tensor_type in _PLAIN_TYPES:
            return None
        rows = np.array(self._unpermute(name, stored.data), dtype=np.uint8, order="C")
        return PackedTensor(stored.tensor_type.name, rows, _shape(stored)[-1])

    def tokenizer_json(self) -> str:
        """The tokenizer, rebuilt from the metadata; see ``lowering.tokenizer``."""
        return self._tokenizer_json

    def _stored(self, name: str) -> ReaderTensor:
        if name not in self._known:
            raise KeyError(name)
        return self._tensors[_native_name(stored_name(name, self._spec.tied_head))]

    def _unpermute(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        """Undoes the interleaving of ``q`` and ``k``: a pair's rows lie together in the file.

        Only whole rows move, so it holds for packed blocks as well.
        """
        part = name.rpartition(".")[2]
        heads = {"q": self._spec.heads, "k": self._spec.kv_heads}.get(part)
        if heads is None:
            return rows
        pairs = rows.reshape(heads, self._spec.head_dim // 2, 2, rows.shape[-1])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    def _read_spec(
        self, metadata: Mapping[str, object], tokenizer: LoadedTokenizer, path: Path, name: str
    ) -> ModelSpec:
        try:
            keys = msgspec.convert(dict(metadata), _LlamaKeys)
        except msgspec.ValidationError as error:
            raise InputError(f"malformed metadata: {error}", where=path) from error
        embed = self._tensors.get(_OUTER["embed"])
        vocab = _shape(embed)[0] if embed is not None else tokenizer.vocab
        if tokenizer.vocab > vocab:
            raise InputError(
                f"tensor {_OUTER['embed']} has fewer rows than there are tokens",
                where=path,
                found=vocab,
                expected=tokenizer.vocab,
            )
        return ModelSpec(
            name=name,
            architecture=SUPPORTED_ARCHITECTURE,
            layers=keys.layers,
            hidden=keys.hidden,
            intermediate=keys.intermediate,
            heads=keys.heads,
            kv_heads=keys.kv_heads or keys.heads,
            head_dim=_head_dim(keys, path),
            vocab=vocab,
            max_context=keys.max_context,
            norm_eps=_shortest(keys.norm_eps),
            rope=RopeSpec(theta=_shortest(keys.rope_theta)),
            tied_head=_OUTER["head"] not in self._tensors,
            tokenizer=tokenizer.spec,
            weights_digest=digest_of([path]),
        )


class _BoundedReader(GGUFReader):
    """gguf's reader, but it stops at the end of the file.

    The base class takes short slices there, and then loops as often as a broken length says.
    """

    def _get(
        self,
        offset: int,
        dtype: DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,  # noqa: ARG002
    ) -> NDArray[Any]:
        if self.byte_order == "S":
            raise ValueError("big-endian file")
        if isinstance(self.data, np.memmap):
            # slicing a plain view is four times faster, and there are 100,000 small fields
            self.data = self.data.view(np.ndarray)
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > self.data.size:
            raise ValueError(f"the file ends at byte {self.data.size}, before byte {end}")
        return self.data[offset:end].view(dtype)


def _read(path: Path) -> tuple[GGUFReader, dict[str, object]]:
    """The file's tensors, mapped, and its metadata as plain values."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise InputError(
                "not a GGUF file", where=path, found=magic, expected=b"GGUF", hint=_GET_AGAIN
            )
        with np.errstate(over="raise"):
            reader = _BoundedReader(path)
            _check_length(reader, path)
        return reader, {key: field.contents() for key, field in reader.fields.items()}
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", where=path) from error
    except _MALFORMED as error:
        what = f"truncated or malformed GGUF: {error}"
        raise InputError(what, where=path, hint=_GET_AGAIN) from error


def _check_length(reader: GGUFReader, path: Path) -> None:
    """InputError for a file that goes on behind its tensors: all of it would be read."""
    end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    size = path.stat().st_size
    if reader.tensors and size > end + _MAX_TAIL_BYTES:
        raise InputError(
            "the file goes on behind its tensors",
            where=path,
            found=f"{size} bytes",
            expected=f"about {end}",
            hint=_GET_AGAIN,
        )


def _check_supported(metadata: Mapping[str, object], reader: GGUFReader, path: Path) -> None:
    """UnsupportedError for another architecture, and for what a plain ``llama`` lacks."""
    architecture = metadata.get("general.architecture")
    if architecture != SUPPORTED_ARCHITECTURE:
        raise UnsupportedError(
            "unsupported architecture",
            where=path,
            found=architecture,
            expected=SUPPORTED_ARCHITECTURE,
        )
    plain: Mapping[str, tuple[object, ...]] = {
        "split.count": (None, 0, 1),
        "llama.expert_count": (None, 0),
        "llama.attention.sliding_window": (None, 0),
        "llama.attention.scale": (None, 0.0),
        "llama.rope.scaling.type": (None, "none"),
        "llama.rope.scale_linear": (None, 1.0),
        "llama.rope.scaling.factor": (None, 1.0),
        "llama.embedding_scale": (None, 1.0),
        "llama.residual_scale": (None, 1.0),
        "llama.logit_scale": (None, 1.0),
    }
    for key, values in plain.items():
        if metadata.get(key) not in values:
            raise UnsupportedError(
                f"{key} is not supported",
                where=path,
                found=metadata[key],
                expected=f"{values[-1]!r} or no such key",
            )
    types: dict[GGMLQuantizationType, str] = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            raise UnsupportedError(f"rope scaling ({tensor.name}) is not supported", where=path)
        types.setdefault(tensor.tensor_type, tensor.name)
    for kind, name in types.items():
        _check_type(kind, name, path)


def _check_type(kind: GGMLQuantizationType, name: str, path: Path) -> None:
    """UnsupportedError if gguf cannot dequantise the type: tried on one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"tensor {name} has an unsupported type",
            where=path,
            found=kind.name,
            expected="F32, F16, BF16 or a block type that gguf can dequantise, such as Q8_0",
        ) from error


def _head_dim(keys: _LlamaKeys, path: Path) -> int:
    if keys.key_length is None and keys.hidden % keys.heads:
        raise InputError(
            "llama.embedding_length is no multiple of attention.head_count",
            where=path,
            found=f"{keys.hidden} and {keys.heads}",
        )
    head_dim = keys.key_length or keys.hidden // keys.heads
    for what, value in (("value heads", keys.value_length), ("rotation", keys.rope_dims)):
        if value not in (None, head_dim):
            raise UnsupportedError(
                f"{what} of another width than the key heads are not supported",
                where=path,
                found=value,
                expected=head_dim,
            )
    return head_dim


def _native_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, index, part = name.split(".")
    return f"blk.{index}.{_INNER[part]}.weight"


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """[out, in]; GGUF lists the fastest dimension first."""
    return tuple(reversed(tensor.shape.tolist()))


def _shortest(number: float) -> float:
    """The shortest decimal of a number stored as float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))
