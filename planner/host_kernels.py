"""What is timed on this machine: the plan's own operators, alone and as whole passes."""

import math
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lowering.linear_nodes import OFFSET_BLOCK
from lowering.operator_graphs import (
    OperatorGraph,
    attention_graph,
    exact_attention_graph,
    glue_graph,
    linear_graph,
    node_chain,
    probe_spec,
    streamed_linear_graph,
)
from planner.host_probe import probe_target
from planner.operator_session import OperatorSession, WeightPool, content
from planner.streamed_probe import CALLS, StreamedMlp
from profiles.measure import Kernel, Stamp, measure_reading_slowdown, measured
from profiles.points import AttentionShape, GlueShape, LinearShape, Quantity, Shape
from profiles.words import Format, Operator
from runtime.kv_cache import KvCache
from runtime.sampling import GREEDY, choose
from runtime.target import Target

CPU = "cpu"
PASS = "pass"
"""Stands for a processor in what times a whole pass; no such point goes into a profile."""

STREAM = "stream"
"""Likewise for sub-layers that run in a call of their own."""

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

STREAMED = {
    LinearShape(576, 576): 24,
    LinearShape(576, 960): 16,
    LinearShape(1536, 576): 10,
    LinearShape(576, 3072): 6,
    LinearShape(2048, 2048): 4,
    LinearShape(4096, 1024): 4,
    LinearShape(1024, 4096): 4,
    LinearShape(8192, 2048): 2,
    LinearShape(2048, 8192): 2,
    LinearShape(1536, 17920): 1,
}
"""Products whose weights are inputs: the time of a wide matrix and of a tall one differs."""

STREAMED_FORMATS = (Format.W8A16, Format.W8A8)
STREAM_WIDTHS = (1, 2, 4, 8)
POOL_BYTES = 2**28

ATTENTION = {AttentionShape(9, 3, 64): 16, AttentionShape(32, 8, 128): 6}
"""Layers of its graph at the shortest context; fewer at longer ones, where a layer reads more."""

CONTEXTS = (128, 512, 2048)
GLUE = (GlueShape(576), GlueShape(2048))

_LARGE_WEIGHTS = 2**24


class Timed(NamedTuple):
    """A kernel and how often its operator runs in one run."""

    kernel: Kernel
    repeats: int


@contextmanager
def host_kernels(threads: int) -> Generator[list[Timed]]:
    """All kernels of this machine; their sessions live as long as the ``with`` block."""
    with ExitStack() as stack:
        pool = WeightPool(POOL_BYTES)

        def opened(graph: OperatorGraph) -> OperatorSession:
            session = OperatorSession(graph, threads, pool)
            stack.callback(session.close)
            return session

        kernels = [*_linear(opened), *_streamed(opened), *_attention(opened), *_glue(opened)]
        mlp = StreamedMlp(PROBE, Format.W8A16, threads, pool)
        stack.callback(mlp.close)
        passes = _passes(stack.enter_context(probe_target(PROBE, threads)))
        yield [*kernels, *passes, *_stream_calls(mlp)]


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


def _streamed(opened: _Open) -> Iterator[Timed]:
    for fmt in STREAMED_FORMATS:
        for shape, repeats in STREAMED.items():
            session = opened(streamed_linear_graph(shape, fmt, repeats))
            for width in FEWER_WIDTHS:
                yield _timed(session, Operator.STREAMED_LINEAR, fmt, shape, width)


def _attention(opened: _Open) -> Iterator[Timed]:
    kernels = (
        (Operator.ATTENTION, attention_graph),
        (Operator.EXACT_ATTENTION, exact_attention_graph),
    )
    for operator, graph in kernels:
        for shape, most in ATTENTION.items():
            for context in CONTEXTS:
                # never one alone: the first in a run finds its code cold, the pass's cost
                layers = max(2, round(most * math.sqrt(min(CONTEXTS) / context)))
                session = opened(graph(shape, 2 * max(CONTEXTS), layers))
                for width in FEWER_WIDTHS:
                    if shape.heads * width * context <= 2**20 + 2**18:
                        yield _timed(session, operator, Format.F32, shape, width, context)


def _glue(opened: _Open) -> Iterator[Timed]:
    for shape in GLUE:
        session = opened(glue_graph(shape, PROBE_LAYERS))
        for width in FEWER_WIDTHS:
            yield _timed(session, Operator.GLUE, Format.F32, shape, width)


def _passes(target: Target) -> Iterator[Timed]:
    """Whole passes of ``PROBE``, all on and (context 0) all off."""
    spec = target.spec
    cache = KvCache(spec, PROBE_CONTEXT, PROBE_CONTEXT)
    cache.keys[:], cache.values[:] = (content(cache.keys.shape, cache.keys.dtype) for _ in "kv")
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


def _stream_calls(mlp: StreamedMlp) -> Iterator[Timed]:
    for width in STREAM_WIDTHS:
        kernel = Kernel(
            processor=STREAM,
            operator=Operator.GLUE,
            format=Format.W8A16,
            shape=GlueShape(PROBE.hidden),
            width=width,
            run=partial(mlp.run, width),
        )
        yield Timed(kernel, CALLS)


def cycle_time(stamp: Stamp, threads: int, repeats: int = 60) -> Quantity:
    """Microseconds of a cycle apart from its operators, embedding and choosing included.

    Taken with every switch off, at width 1, on a model of 24 layers.
    """
    spec = probe_spec(layers=24, hidden=64, vocab=32_768, max_context=1024)
    with probe_target(spec, threads) as target:
        cache = KvCache(spec, 256, 256)
        off = ~target.all_on
        logits = content((1, spec.vocab), np.dtype(np.float32))
        samples: list[float] = []
        for turn in range(repeats + 3):
            start = time.perf_counter()
            result = target.run_chain([turn], 128, cache, off)
            choose(logits, [129], GREEDY)
            cache.truncate(0)
            cache.commit(result.keys, result.values, slice(0, 1))
            samples.append((time.perf_counter() - start) * 1e6)
        return measured(samples[3:], stamp)


def reading_slowdown(
    stamp: Stamp, threads: int, folder: Path, block_bytes: int, budget_s: float
) -> Quantity:
    """How many times longer streamed sub-layers take while the reader works beside them."""
    mlp = StreamedMlp(PROBE, Format.W8A16, threads, WeightPool(POOL_BYTES))

    def work() -> None:
        for _ in range(4):
            mlp.run(4)

    try:
        return measure_reading_slowdown(
            folder, work, block_bytes=block_bytes, budget_s=budget_s, stamp=stamp
        )
    finally:
        mlp.close()


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
