"""What is timed on this machine: the plan's own operators, alone and as whole passes."""

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from lowering.emission import head_tensors, layer_tensors
from lowering.flash_image import write_weights
from lowering.linear_nodes import OFFSET_BLOCK
from lowering.onnx_graphs import head_graph, layers_graph
from lowering.operator_graphs import (
    OperatorGraph,
    attention_graph,
    glue_graph,
    linear_graph,
    node_chain,
    probe_spec,
)
from lowering.source import PackedTensor, tensor_shapes
from profiles.measure import Kernel, Stamp, measured
from profiles.points import AttentionShape, GlueShape, LinearShape, Quantity, Shape
from profiles.words import AttentionKernel, Format, Operator
from runtime.backends import open_session
from runtime.kv_cache import KvCache
from runtime.model_spec import ModelSpec
from runtime.plan import WEIGHTS_FILE, Artefact, Graph, GraphKind, TensorRef
from runtime.plan_writer import WeightsWriter
from runtime.sampling import GREEDY, choose
from runtime.target import Target

Array = np.ndarray[Any, Any]

CPU = "cpu"
PASS = "pass"
"""Stands for a processor in what times a whole pass; no such point goes into a profile."""

PROBE_LAYERS = 8
PROBE_CONTEXT = 512
PROBE = probe_spec(
    layers=PROBE_LAYERS, hidden=576, attention=AttentionShape(9, 3, 64), max_context=2048
)
"""A small model whose passes are held against the sum of their operators."""

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
FEWER_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
FEW_WIDTHS = (1, 4, 16, 64)
LINEAR = {
    LinearShape(576, 576): 64,
    LinearShape(576, 960): 40,
    LinearShape(1536, 576): 24,
    LinearShape(576, 3072): 12,
    LinearShape(2048, 2048): 8,
    LinearShape(4096, 4096): 3,
    LinearShape(576, 49152): 2,
}
"""The products of ``PROBE``, two of larger models, and a head; with 8-bit matrices in its graph.

20 to 60 MB a graph, more for the large ones, whose time is that of reading them.
"""

ATTENTION = {AttentionShape(9, 3, 64): 16, AttentionShape(32, 8, 128): 6}
"""Layers of its graph at the shortest context; fewer at longer ones, where a layer reads more."""

CONTEXTS = (128, 512, 2048)
GLUE = (GlueShape(576), GlueShape(2048))

_LARGE_WEIGHTS = 2**24
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


class Timed(NamedTuple):
    """A kernel and how often its operator runs in one run."""

    kernel: Kernel
    repeats: int


class OperatorSession:
    """A session of one operator's graph with bindings by width and context, made once each."""

    def __init__(self, graph: OperatorGraph, threads: int) -> None:
        # Bindings must go before the session, and attributes go in the order that they came
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
        sizes = {"w": width, "t": context}
        bound = self._session.io_binding()
        for place in self._session.get_inputs():
            array = self._array(place, sizes, "in")
            bound.bind_input(place.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for place in self._session.get_outputs():
            past = self._arrays.get((place.name.removeprefix("new_"), context))
            array = self._array(place, sizes, "out") if past is None else past
            bound.bind_output(place.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        return bound

    def _array(self, place: Any, sizes: dict[str, int], side: str) -> Array:
        """One buffer for all repeats, as an arena gives; but every layer has a past of its own."""
        shape = tuple(sizes[size] if isinstance(size, str) else int(size) for size in place.shape)
        dtype = np.dtype(_DTYPES[place.type])
        counts = {"slots": sizes["t"], "last_slot": sizes["t"] - 1}
        of_past = place.name in counts or place.name.startswith(("key.", "value."))
        own = (place.name, sizes["t"]) if of_past else (side, place.type, shape)
        if own not in self._arrays:
            count = counts.get(place.name)
            filled = _content(shape, dtype) if count is None else np.full(shape, count, dtype)
            self._arrays[own] = filled
        return self._arrays[own]


def _content(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    if dtype == np.int64:
        return np.arange(math.prod(shape)).reshape(shape)
    return np.resize(np.random.default_rng(0).standard_normal(4096, np.float32), shape)


@contextmanager
def host_kernels(threads: int) -> Generator[list[Timed]]:
    """All kernels of this machine; their sessions live as long as the ``with`` block."""
    with ExitStack() as stack:

        def opened(graph: OperatorGraph) -> OperatorSession:
            session = OperatorSession(graph, threads)
            stack.callback(session.close)
            return session

        kernels = [*_linear(opened), *_attention(opened), *_glue(opened)]
        yield [*kernels, *_passes(stack.enter_context(probe_target(PROBE, threads)))]


_Open = Callable[[OperatorGraph], OperatorSession]


def _timed(
    session: OperatorSession,
    operator: Operator,
    fmt: Format,
    shape: Shape,
    width: int,
    context: int = 0,
) -> Timed:
    kernel = Kernel(
        processor=CPU,
        operator=operator,
        format=fmt,
        shape=shape,
        width=width,
        context=context,
        run=partial(session.run, width, context),
    )
    return Timed(kernel, session.repeats)


def _linear(opened: _Open) -> Iterator[Timed]:
    for fmt in (Format.W8A16, Format.W4, Format.W8, Format.F32, Format.W8A8):
        for shape, repeats in LINEAR.items():
            if fmt is Format.F32 and shape.k * shape.n > _LARGE_WEIGHTS:
                continue
            if fmt in (Format.W4, Format.W8) and shape.k % OFFSET_BLOCK:
                continue
            few = {Format.F32: 4, Format.W8A8: 2}.get(fmt, 1)
            session = opened(linear_graph(shape, fmt, max(1, round(repeats / few))))
            for width in _linear_widths(shape, fmt):
                yield _timed(session, Operator.LINEAR, fmt, shape, width)


def _linear_widths(shape: LinearShape, fmt: Format) -> tuple[int, ...]:
    if fmt in (Format.F32, Format.W8A8, Format.W8):
        return FEW_WIDTHS
    # large ones take long, and are bound by computing at width 32 already
    return WIDTHS if shape.k * shape.n < _LARGE_WEIGHTS else FEWER_WIDTHS[:-1]


def _attention(opened: _Open) -> Iterator[Timed]:
    for shape, most in ATTENTION.items():
        for context in CONTEXTS:
            # never one alone: the first in a run finds its code cold, which is the pass's cost
            layers = max(2, round(most * math.sqrt(min(CONTEXTS) / context)))
            session = opened(attention_graph(shape, 2 * max(CONTEXTS), layers))
            for width in FEWER_WIDTHS:
                if shape.heads * width * context <= 2**20 + 2**18:
                    yield _timed(session, Operator.ATTENTION, Format.F32, shape, width, context)


def _glue(opened: _Open) -> Iterator[Timed]:
    for shape in GLUE:
        session = opened(glue_graph(shape, PROBE_LAYERS))
        for width in FEWER_WIDTHS:
            yield _timed(session, Operator.GLUE, Format.F32, shape, width)


def _passes(target: Target) -> Iterator[Timed]:
    """Whole passes of ``PROBE``, all on and (context 0) all off."""
    spec = target.spec
    cache = KvCache(spec, PROBE_CONTEXT, PROBE_CONTEXT)
    cache.keys[:], cache.values[:] = (_content(cache.keys.shape, cache.keys.dtype) for _ in "kv")
    off = ~target.all_on
    for context, active in ((PROBE_CONTEXT, target.all_on), (0, off)):
        for width in FEWER_WIDTHS[:-1]:
            ids = [index % spec.vocab for index in range(width)]
            start = PROBE_CONTEXT - width
            kernel = Kernel(
                processor=PASS,
                operator=Operator.GLUE,
                format=Format.W8A16,
                shape=GlueShape(spec.hidden),
                width=width,
                context=context,
                run=partial(target.run_chain, ids, start, cache, active),
            )
            yield Timed(kernel, 1)


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
def probe_target(spec: ModelSpec, threads: int, fmt: Format = Format.W8A16) -> Generator[Target]:
    """A model of random weights, emitted and opened as a plan's is."""
    with TemporaryDirectory(prefix="fulcrum-") as name:
        folder, context = Path(name), min(spec.max_context, 2048)
        with WeightsWriter(folder / WEIGHTS_FILE) as writer:
            kept = _Kept(writer)
            refs = write_weights(_RandomSource(spec), fmt, context, kept)
        fused = AttentionKernel.FUSED
        of_head, of_layers = head_tensors(refs), layer_tensors(refs, fused)
        emitted = (
            (GraphKind.LAYERS, of_layers, layers_graph(spec, fmt, context, fused, of_layers)),
            (GraphKind.HEAD, of_head, head_graph(spec, fmt, of_head)),
        )
        graphs = [_written(folder, kind, used, model) for kind, used, model in emitted]
        target = Target(folder, spec, graphs, kept.arrays, threads, fused)
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


def cycle_time(stamp: Stamp, threads: int, repeats: int = 60) -> Quantity:
    """Microseconds of a cycle apart from its operators, embedding and choosing included.

    Taken with every switch off, at width 1, on a model of 24 layers.
    """
    spec = probe_spec(layers=24, hidden=64, vocab=32_768, max_context=1024)
    with probe_target(spec, threads) as target:
        cache = KvCache(spec, 256, 256)
        off = ~target.all_on
        logits = _content((1, spec.vocab), np.dtype(np.float32))
        samples: list[float] = []
        for turn in range(repeats + 3):
            start = time.perf_counter()
            result = target.run_chain([turn], 128, cache, off)
            choose(logits, [129], GREEDY)
            cache.truncate(0)
            cache.commit(result.keys, result.values, slice(0, 1))
            samples.append((time.perf_counter() - start) * 1e6)
        return measured(samples[3:], stamp)


def launch_time(stamp: Stamp, threads: int, nodes: int = 256, repeats: int = 30) -> Quantity:
    """Microseconds of an operator that computes next to nothing, in a row of such."""
    return _session_time(node_chain(nodes), stamp, threads, repeats)


def call_time(stamp: Stamp, threads: int, repeats: int = 30) -> Quantity:
    """Microseconds of calling a session that computes next to nothing."""
    return _session_time(node_chain(1), stamp, threads, repeats)


def _session_time(graph: OperatorGraph, stamp: Stamp, threads: int, repeats: int) -> Quantity:
    session = OperatorSession(graph, threads)
    samples: list[float] = []
    try:
        for _ in range(repeats + 3):
            start = time.perf_counter()
            session.run(1)
            samples.append((time.perf_counter() - start) * 1e6 / session.repeats)
    finally:
        session.close()
    return measured(samples[3:], stamp)


def memory_bandwidth(stamp: Stamp, threads: int, array_bytes: int = 2**28) -> Quantity:
    """Bytes a second that ``threads`` threads read together, each from memory of its own."""
    numbers = np.ones((threads, array_bytes // 8 // threads), np.int64)
    rates: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(9):
            start = time.perf_counter()
            # numpy lets other threads run while it reduces
            for _ in pool.map(np.max, numbers):
                pass
            rates.append(numbers.nbytes / (time.perf_counter() - start))
    return measured(rates[1:], stamp)
