"""A target whose sub-layers partly stream from flash: a pass as a sequence of segments.

Runs of resident sub-layers run in the session of the layers, streamed ones one by one in the
session of their kind, on weights in the slot of the ring that they were read into.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from profiles.errors import FlashError
from profiles.words import SubLayerId, SubLayerKind, kind_of, layer_of
from runtime.backends import MAX_BOUND_ROWS, PassResult, bind_input, bind_output, open_session
from runtime.flash import FlashReader
from runtime.kv_cache import KvCache
from runtime.model_spec import ModelSpec
from runtime.plan import GraphKind, Residency, TensorRef
from runtime.weight_ranges import sub_layer_bytes

Array = np.ndarray[Any, Any]


class GraphFile(NamedTuple):
    """A graph and its constants."""

    path: Path
    constants: Mapping[str, Array]


def open_reader(
    file: Path,
    tensors: Iterable[TensorRef],
    residency: Residency,
    rate_bytes_per_s: float | None = None,
) -> FlashReader:
    """The reader of a plan's streamed sub-layers; ``tensors`` are all that lie in ``file``."""
    ranges = sub_layer_bytes(tensors)
    streamed = {sub_layer: ranges[sub_layer] for sub_layer in residency.streamed}
    return FlashReader(file, streamed, residency.slots, residency.read_bytes, rate_bytes_per_s)


class _Pass:
    """Buffers of passes of one width over one cache, and the bindings that point at them."""

    def __init__(self, spec: ModelSpec, width: int, cache: KvCache) -> None:
        rows = (spec.layers, spec.kv_heads, width, spec.head_dim)
        self.keys, self.values = cache.keys, cache.values
        self.positions = np.zeros((1, width), np.int64)
        self.mask = np.zeros((width, cache.capacity + width), np.float32)
        self.hidden = np.zeros((width, spec.hidden), np.float32)
        self.after = np.zeros((width, spec.hidden), np.float32)
        """What a segment makes of ``hidden``."""
        self.result = PassResult(
            self.hidden, np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        )
        self.segments: dict[tuple[SubLayerId, ...], ort.IOBinding] = {}
        self.slots: dict[tuple[SubLayerKind, int], ort.IOBinding] = {}
        """By kind and address of the slot."""

    def serves(self, cache: KvCache) -> bool:
        """Whether the bound addresses are still the cache's."""
        return self.keys is cache.keys and self.values is cache.values


class StreamedLayers:
    """All sub-layers of the target, those of ``reader`` being streamed; with exact attention.

    ``graphs`` are those of the layers and of each streamed kind. Owns the reader.
    """

    def __init__(
        self,
        graphs: Mapping[GraphKind, GraphFile],
        spec: ModelSpec,
        threads: int,
        reader: FlashReader,
    ) -> None:
        self.reader = reader
        self._spec, self._ranges = spec, reader.ranges
        self._streamed = tuple(sorted(reader.ranges))
        self._passes: dict[int, _Pass] = {}
        self._on = np.zeros(spec.sub_layers, np.bool_)
        self._sessions = {
            kind: open_session(graph.path, graph.constants, threads)
            for kind, graph in graphs.items()
        }
        reader.restart(self._streamed)

    def run(
        self, hidden: Array, positions: Array, mask: Array, cache: KvCache, active: Array
    ) -> PassResult:
        """One pass over ``cache``; see ``LayersSession.run``.

        Raises:
            FlashError: Weights could not be read; the next pass tries again.
        """
        held = self._pass(hidden.shape[0], cache)
        held.hidden[:], held.positions[0], held.mask[:] = hidden, positions, mask
        for sub_layer in range(0, self._spec.sub_layers, 2):
            if not active[sub_layer]:
                for rows in (held.result.keys, held.result.values):
                    if rows is not None:
                        rows[sub_layer // 2] = 0
        needed = tuple(sub_layer for sub_layer in self._streamed if active[sub_layer])
        if needed:
            self.reader.restart(needed)
        for segment in segments(active, self._ranges.keys()):
            if segment[0] in self._ranges:
                self._run_streamed(held, segment[0])
            else:
                self._run_resident(held, segment)
            held.hidden[:] = held.after
        if needed != self._streamed and needed:
            # The ring fills for the next full pass
            self.reader.restart(self._streamed)
        return held.result

    def _pass(self, width: int, cache: KvCache) -> _Pass:
        held = self._passes.get(width)
        if held is None or not held.serves(cache):
            # Those of an outgrown cache would keep its memory
            self._passes = {w: b for w, b in self._passes.items() if b.serves(cache)}
            while self._passes and sum(self._passes) + width > MAX_BOUND_ROWS:
                del self._passes[next(iter(self._passes))]
            held = _Pass(self._spec, width, cache)
        else:
            del self._passes[width]
        # Those used latest are last
        self._passes[width] = held
        return held

    def _run_resident(self, held: _Pass, segment: tuple[SubLayerId, ...]) -> None:
        if self.reader.closed:
            raise FlashError("the reader was closed")
        self._on[:] = False
        self._on[list(segment)] = True
        bound = held.segments.get(segment)
        if bound is None:
            bound = held.segments[segment] = self._bind_segment(held, segment)
        self._sessions[GraphKind.LAYERS].run_with_iobinding(bound)

    def _bind_segment(self, held: _Pass, segment: Sequence[SubLayerId]) -> ort.IOBinding:
        """New rows are bound for the segment's own attentions: others would be written as zeros."""
        bound = self._sessions[GraphKind.LAYERS].io_binding()
        bind_input(bound, "hidden", held.hidden)
        bind_input(bound, "positions", held.positions)
        bind_input(bound, "mask", held.mask)
        bind_output(bound, "hidden_out", held.after)
        for sub_layer in map(SubLayerId, range(self._spec.sub_layers)):
            if sub_layer in self._ranges:
                continue
            bind_input(bound, f"on.{sub_layer}", self._on[sub_layer : sub_layer + 1].reshape(()))
            if kind_of(sub_layer) is SubLayerKind.ATTENTION:
                new = sub_layer in segment
                _bind_rows(bound, held, layer_of(sub_layer), f".{layer_of(sub_layer)}", new)
        return bound

    def _run_streamed(self, held: _Pass, sub_layer: SubLayerId) -> None:
        kind = kind_of(sub_layer)
        weights = self.reader.take(sub_layer)
        key = kind, weights.ctypes.data
        bound = held.slots.get(key)
        if bound is None:
            bound = held.slots[key] = self._bind_slot(held, sub_layer, weights)
        if kind is SubLayerKind.ATTENTION:
            _bind_rows(bound, held, layer_of(sub_layer), "", True)
        self._sessions[GraphKind(kind)].run_with_iobinding(bound)
        self.reader.release(sub_layer)

    def _bind_slot(self, held: _Pass, sub_layer: SubLayerId, weights: Array) -> ort.IOBinding:
        """Weights lie at the same places in the slot for all sub-layers of a kind."""
        kind = kind_of(sub_layer)
        bound = self._sessions[GraphKind(kind)].io_binding()
        bind_input(bound, "hidden", held.hidden)
        if kind is SubLayerKind.ATTENTION:
            bind_input(bound, "positions", held.positions)
            bind_input(bound, "mask", held.mask)
        for part in self._ranges[sub_layer].parts:
            bind_input(bound, f"layer.{part.name}", part.view(weights))
        bind_output(bound, "hidden_out", held.after)
        return bound

    def close(self) -> None:
        """Join the reader, release bindings, then the sessions; a second call does nothing."""
        self.reader.close()
        self._passes.clear()
        self._sessions.clear()


def segments(active: Array, streamed: Collection[SubLayerId]) -> Iterator[tuple[SubLayerId, ...]]:
    """The sub-layers that are on, in order: each streamed one alone, resident ones in runs."""
    run: list[SubLayerId] = []
    for sub_layer in map(SubLayerId, np.flatnonzero(active).tolist()):
        if sub_layer not in streamed:
            run.append(sub_layer)
            continue
        if run:
            yield tuple(run)
            run = []
        yield (sub_layer,)
    if run:
        yield tuple(run)


def _bind_rows(bound: ort.IOBinding, held: _Pass, layer: int, suffix: str, new: bool) -> None:
    """Past keys and values of a layer and, if ``new``, where its new ones go."""
    past = ("key", held.keys, held.result.keys), ("value", held.values, held.result.values)
    for name, rows, made in past:
        bind_input(bound, f"{name}{suffix}", rows[layer])
        if new and made is not None:
            bind_output(bound, f"new_{name}{suffix}", made[layer])
