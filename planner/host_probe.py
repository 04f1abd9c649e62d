"""A model of random weights, emitted and opened as a plan's is, to time its passes."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lowering.emission import head_tensors, layer_tensors
from lowering.flash_image import write_weights
from lowering.onnx_graphs import head_graph, layers_graph
from lowering.source import PackedTensor, tensor_shapes
from profiles.words import AttentionKernel, Format
from runtime.model_spec import ModelSpec
from runtime.plan import WEIGHTS_FILE, Artefact, Graph, GraphKind, TensorRef
from runtime.plan_writer import WeightsWriter
from runtime.target import Target

Array = np.ndarray[Any, Any]


class _RandomSource:
    """Weights of the right shapes and sizes for a model that only has to be timed."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._shapes = tensor_shapes(spec)
        self._noise = np.random.default_rng(0).standard_normal(65_521, np.float32)

    def tensor(self, name: str) -> Array:
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return np.resize(self._noise, shape) / np.float32(math.sqrt(shape[1]))

    def rows(self, name: str, first: int, end: int) -> Array:
        return self.tensor(name)[first:end]

    def packed(self, name: str) -> PackedTensor | None:
        del name
        return None

    def tokenizer_json(self) -> str:
        return "{}"


class _Kept:
    """Writes tensors to the plan's file and keeps them at hand, as a loaded plan would."""

    def __init__(self, writer: WeightsWriter) -> None:
        self._writer = writer
        self.arrays: dict[str, Array] = {}

    def add(self, name: str, array: Array) -> TensorRef:
        self.arrays[name] = array
        return self._writer.add(name, array)


@contextmanager
def probe_target(
    spec: ModelSpec,
    threads: int,
    fmt: Format = Format.W8A16,
    attention: AttentionKernel = AttentionKernel.FUSED,
) -> Generator[Target]:
    """A model of random weights, emitted and opened as a plan's is."""
    with TemporaryDirectory(prefix="fulcrum-") as name:
        folder, context = Path(name), min(spec.max_context, 2048)
        with WeightsWriter(folder / WEIGHTS_FILE) as writer:
            kept = _Kept(writer)
            refs = write_weights(_RandomSource(spec), fmt, context, kept)
        of_head, of_layers = head_tensors(refs), layer_tensors(refs, attention)
        emitted = (
            (GraphKind.LAYERS, of_layers, layers_graph(spec, fmt, context, attention, of_layers)),
            (GraphKind.HEAD, of_head, head_graph(spec, fmt, of_head)),
        )
        graphs = [_written(folder, kind, used, model) for kind, used, model in emitted]
        target = Target(folder, spec, graphs, kept.arrays, threads, attention)
        try:
            yield target
        finally:
            target.close()


def _written(folder: Path, kind: GraphKind, used: Sequence[TensorRef], model: Any) -> Graph:
    data = model.SerializeToString(deterministic=True)
    # beside the weights, where onnxruntime looks for them
    (folder / f"{kind}.onnx").write_bytes(data)
    artefact = Artefact(f"{kind}.onnx", len(data), "0" * 64)
    return Graph(kind, artefact, tuple(ref.name for ref in used))
