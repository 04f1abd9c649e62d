"""What is timed on this machine: kernels of the plan's own operators, and the runtime's cycle."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lowering.flash_image import write_weights
from lowering.onnx_graphs import head_graph, layers_graph
from lowering.operator_graphs import (
    OperatorGraph,
    WeightPool,
    attention_graph,
    glue_graph,
    linear_graph,
    node_chain,
    probe_spec,
)
from lowering.source import PackedTensor, tensor_shapes
from profiles.measure import Kernel
from profiles.points import AttentionShape, GlueShape, LinearShape
from profiles.words import Format, Operator
from runtime.backends import open_session
from runtime.kv_cache import KvCache
from runtime.model_spec import ModelSpec
from runtime.plan import Artefact, Graph, GraphKind
from runtime.sampling import GREEDY, choose
from runtime.target import Target

Array = np.ndarray[Any, Any]

_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


class OperatorSession:
    """A session of one operator's graph with bindings by width and context, made once each."""

    def __init__(self, graph: OperatorGraph, threads: int) -> None:
        # Bindings must go before the session, and attributes go in the order they came
        self._bindings: dict[tuple[int, int], Any] = {}
        self._arrays: dict[object, Array] = {}
        self.repeats = graph.repeats
        self._session = open_session(graph.model, {}, threads)

    def run(self, width: int, context: int = 0) -> None:
        """Run the graph once at ``width`` tokens over ``context`` positions of cache."""
        bound = self._bindings.get((width, context))
        if bound is None:
            bound = self._bindings[width, context] = self._bind(width, context)
        self._session.run_with_iobinding(bound)

    def close(self) -> None:
        """Release the bindings, then the session."""
        self._bindings.clear()
        del self._session

    def _bind(self, width: int, context: int) -> Any:
        sizes = {"w": width, "t": context, "slots": context + width}
        bound = self._session.io_binding()
        for place in self._session.get_inputs():
            array = self._array(place, sizes, "in")
            bound.bind_input(place.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for place in self._session.get_outputs():
            array = self._array(place, sizes, "out")
            bound.bind_output(place.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        return bound

    def _array(self, place: Any, sizes: dict[str, int], side: str) -> Array:
        """One buffer for all repeats, as an arena gives; but every layer has a past of its own."""
        shape = tuple(sizes.get(size, size) for size in place.shape)
        own = place.name if place.name.startswith(("key.", "value.")) else side
        key = (own, place.type, shape)
        if key not in self._arrays:
            self._arrays[key] = _content(shape, np.dtype(_DTYPES[place.type]))
        return self._arrays[key]


def _content(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    if dtype == np.int64:
        return np.arange(math.prod(shape)).reshape(shape)
    # a mask of small numbers hides nothing
    noise = np.random.default_rng(0).standard_normal(4096, np.float32)
    return np.resize(noise, shape)
