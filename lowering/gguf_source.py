"""A model in one GGUF file: metadata, and weights that are dequantised one tensor at a time."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import DTypeLike, NDArray

from lowering.rope_scaling import linear_factors
from lowering.source import (
    BLOCK_BYTES,
    FAMILIES,
    Count,
    Family,
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
_ROPE_FACTORS = "rope_freqs.weight"
"""Beside the tensors of a decoder: what each frequency of the rotation is divided by."""
_PLAIN_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_BLOCK_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)
_MAX_TAIL_BYTES = 2**20
"""More than any alignment pads."""
_GET_AGAIN = "download or convert the file again"
_MALFORMED = (ValueError, KeyError, IndexError, TypeError, ArithmeticError, RecursionError)
"""What the reader raises on a broken file, beside OSError."""


class _Keys(msgspec.Struct, frozen=True):
    """The metadata that gives a model's dimensions, without the architecture's name in front."""

    layers: LayerCount = msgspec.field(name="block_count")
    hidden: Count = msgspec.field(name="embedding_length")
    intermediate: Count = msgspec.field(name="feed_forward_length")
    heads: Count = msgspec.field(name="attention.head_count")
    max_context: Count = msgspec.field(name="context_length")
    norm_eps: Scale = msgspec.field(name="attention.layer_norm_rms_epsilon")
    kv_heads: Count | None = msgspec.field(name="attention.head_count_kv", default=None)
    key_length: Count | None = msgspec.field(name="attention.key_length", default=None)
    value_length: Count | None = msgspec.field(name="attention.value_length", default=None)
    rope_dims: Count | None = msgspec.field(name="rope.dimension_count", default=None)
    rope_theta: Scale = msgspec.field(name="rope.freq_base", default=10_000.0)
    rope_scaling: str = msgspec.field(name="rope.scaling.type", default="linear")
    rope_factor: Scale = msgspec.field(name="rope.scaling.factor", default=1.0)


class GgufSource:
    """A ModelSource over one GGUF file of a supported architecture."""

    def __init__(self, path: Path, name: str) -> None:
        reader, metadata = _read(path)
        architecture, self._family = _family(metadata, path)
        _check_supported(metadata, reader, architecture, path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        tokenizer = from_gguf(metadata, path)
        self._tokenizer_json = tokenizer.json
        keys = _keys(metadata, architecture, path)
        self._spec = self._read_spec(keys, tokenizer, path, name)
        check_dimensions(self._spec, path)
        shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        shapes.pop(_ROPE_FACTORS, None)
        check_tensors(self._spec, shapes, _native_name, path)
        self._known = frozenset(tensor_shapes(self._spec)) | {"head"}

    @property
    def spec(self) -> ModelSpec:
        """Dimensions, tokens and digests."""
        return self._spec

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A fresh, contiguous float32 copy of a tensor; KeyError for an unknown name."""
        stored = self._stored(name)
        whole = np.empty(_shape(stored), np.float32)
        # Some rows at a time: gguf takes several times the size of what it dequantises
        step = max(1, BLOCK_BYTES // (4 * whole.shape[-1]))
        for first in range(0, len(whole), step):
            whole[first : first + step] = self.rows(name, first, first + step)
        return whole

    def rows(self, name: str, first: int, end: int) -> NDArray[np.float32]:
        """Rows ``first`` to ``end`` of a tensor, as ``tensor`` gives them."""
        stored = self._stored(name)
        some = self._unpermute(name, stored.data)[first:end]
        # Without the copy a float32 tensor would be a view of the mapped file
        plain = dequantize(some, stored.tensor_type)
        if np.shares_memory(plain, stored.data):
            plain = plain.copy()
        return np.ascontiguousarray(plain, np.float32)

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
        """Undoes the interleaving of ``q`` and ``k``: a pair's rows lie together in some files.

        Only whole rows move, so it holds for packed blocks as well.
        """
        part = name.rpartition(".")[2]
        heads = {"q": self._spec.heads, "k": self._spec.kv_heads}.get(part)
        if heads is None or not self._family.interleaved:
            return rows
        pairs = rows.reshape(heads, self._spec.head_dim // 2, 2, rows.shape[-1])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    def _read_spec(
        self, keys: _Keys, tokenizer: LoadedTokenizer, path: Path, name: str
    ) -> ModelSpec:
        head_dim = _head_dim(keys, path)
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
            architecture=str(self._family.gguf),
            layers=keys.layers,
            hidden=keys.hidden,
            intermediate=keys.intermediate,
            heads=keys.heads,
            kv_heads=keys.kv_heads or keys.heads,
            head_dim=head_dim,
            vocab=vocab,
            max_context=keys.max_context,
            norm_eps=_shortest(keys.norm_eps),
            rope=RopeSpec(_shortest(keys.rope_theta), self._rope_factors(keys, head_dim, path)),
            tied_head=_OUTER["head"] not in self._tensors,
            tokenizer=tokenizer.spec,
            weights_digest=digest_of([path]),
            qkv_bias=self._family.qkv_bias,
            qk_norm=self._family.qk_norm,
        )

    def _rope_factors(self, keys: _Keys, head_dim: int, path: Path) -> tuple[float, ...]:
        """What the frequencies are divided by: a tensor's elements times a factor for all."""
        factor = 1.0 if keys.rope_scaling == "none" else _shortest(keys.rope_factor)
        stored = self._tensors.get(_ROPE_FACTORS)
        if stored is None:
            return () if factor == 1.0 else linear_factors(head_dim, factor)
        if _shape(stored) != (head_dim // 2,) or stored.tensor_type != GGMLQuantizationType.F32:
            raise InputError(
                f"tensor {_ROPE_FACTORS} has the wrong shape or type",
                where=path,
                found=f"{list(_shape(stored))} {stored.tensor_type.name}",
                expected=f"[{head_dim // 2}] F32",
            )
        return tuple(_shortest(each) * factor for each in stored.data.tolist())


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


def _family(metadata: Mapping[str, object], path: Path) -> tuple[str, Family]:
    """The file's architecture; UnsupportedError if it is none of ours."""
    architecture = metadata.get("general.architecture")
    known = {family.gguf: family for family in FAMILIES.values() if family.gguf}
    if not isinstance(architecture, str) or architecture not in known:
        raise UnsupportedError(
            "unsupported architecture",
            where=path,
            found=architecture,
            expected=f"one of {', '.join(sorted(known))}",
        )
    return architecture, known[architecture]


def _keys(metadata: Mapping[str, object], architecture: str, path: Path) -> _Keys:
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    if own.get("rope.scale_linear") is not None:
        # The older name
        own.setdefault("rope.scaling.factor", own["rope.scale_linear"])
    try:
        return msgspec.convert(own, _Keys)
    except msgspec.ValidationError as error:
        # Name the key as it is in the file
        text = re.sub(r"`(\$\.)?(?=[a-z_.]+`$)", rf"`\1{prefix}", str(error))
        raise InputError(f"malformed metadata: {text}", where=path) from error


_PLAIN: Mapping[str, tuple[object, ...]] = {
    "expert_count": (None, 0),
    "attention.sliding_window": (None, 0),
    "attention.scale": (None, 0.0),
    "attention.clamp_kqv": (None, 0.0),
    "attention.max_alibi_bias": (None, 0.0),
    "attn_logit_softcapping": (None, 0.0),
    "final_logit_softcapping": (None, 0.0),
    "rope.scaling.type": (None, "linear", "none"),
    "embedding_scale": (None, 1.0),
    "residual_scale": (None, 1.0),
    "logit_scale": (None, 1.0),
}
"""Keys of the architecture, and their values in a decoder that we compute."""


def _check_supported(
    metadata: Mapping[str, object], reader: GGUFReader, architecture: str, path: Path
) -> None:
    """UnsupportedError for variants of an architecture and for types of tensors."""
    plain = {f"{architecture}.{key}": values for key, values in _PLAIN.items()}
    for key, values in {"split.count": (None, 0, 1), **plain}.items():
        if metadata.get(key) not in values:
            wanted = " or ".join(repr(value) for value in values[1:])
            raise UnsupportedError(
                f"{key} is not supported",
                where=path,
                found=metadata[key],
                expected=f"{wanted} or no such key",
            )
    for tensor in reader.tensors:
        if tensor.tensor_type not in _PLAIN_TYPES + _BLOCK_TYPES:
            names = [kind.name for kind in _PLAIN_TYPES + _BLOCK_TYPES]
            raise UnsupportedError(
                f"tensor {tensor.name} has an unsupported type",
                where=path,
                found=tensor.tensor_type.name,
                expected=f"one of {', '.join(names)}",
            )


def _head_dim(keys: _Keys, path: Path) -> int:
    if keys.key_length is None and keys.hidden % keys.heads:
        raise InputError(
            "embedding_length is no multiple of attention.head_count",
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
    return f"blk.{index}.{_INNER[part]}"


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """[out, in]; GGUF lists the fastest dimension first."""
    return tuple(reversed(tensor.shape.tolist()))


def _shortest(number: float) -> float:
    """The shortest decimal of a number stored as float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))
