"""A graph of one operator, opened and bound so that running it is nothing but running it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowering.operator_graphs import OperatorGraph
from runtime.backends import open_session
from runtime.plan import ALIGNMENT_BYTES

Array = np.ndarray[Any, Any]

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
    "tensor(uint8)": np.uint8,
}


class WeightPool:
    """Memory that stands for slots just read from flash: every window is other memory.

    Windows follow one another and begin again when all was handed out.
    """

    def __init__(self, size_bytes: int) -> None:
        noise = np.random.default_rng(0).integers(1, 256, 65_521, np.uint8)
        self._bytes = np.resize(noise, size_bytes)
        self._at = 0

    def take(self, shape: Sequence[int]) -> Array:
        """u8 weights, aligned as tensors of a plan are among each other."""
        count = math.prod(shape)
        if self._at + count > len(self._bytes):
            self._at = 0
        window = self._bytes[self._at : self._at + count]
        self._at += -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return window.reshape(shape)


class OperatorSession:
    """A session of one operator's graph with bindings by width and context, made once each."""

    def __init__(self, graph: OperatorGraph, threads: int, pool: WeightPool | None = None) -> None:
        # Bindings must go before the session, and attributes go in the order that they came
        self._bindings: dict[tuple[int, int], Any] = {}
        self._arrays: dict[object, Array] = {}
        self.repeats = graph.repeats
        self._pool = pool
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
            # what has the size of the past is the past, written in place
            past = self._arrays.get((place.name.removeprefix("new_"), context))
            array = past if past is not None and "t" in place.shape else None
            array = self._array(place, sizes, "out") if array is None else array
            bound.bind_output(place.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        return bound

    def _array(self, place: Any, sizes: dict[str, int], side: str) -> Array:
        """One buffer for all repeats, as an arena gives; but every layer has a past of its own.

        Weights that are inputs are other memory each time.
        """
        shape = tuple(sizes[size] if isinstance(size, str) else int(size) for size in place.shape)
        dtype = np.dtype(_DTYPES[place.type])
        if dtype == np.uint8 and self._pool is not None:
            array = self._arrays[place.name, sizes["w"]] = self._pool.take(shape)
            return array
        counts = {"slots": sizes["t"], "last_slot": sizes["t"] - 1}
        of_past = place.name in counts or place.name.startswith(("key.", "value."))
        own = (place.name, sizes["t"]) if of_past else (side, place.type, shape)
        if own not in self._arrays:
            count = counts.get(place.name)
            filled = content(shape, dtype) if count is None else np.full(shape, count, dtype)
            self._arrays[own] = filled
        return self._arrays[own]


def content(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Values to be timed with: switches on, positions ascending, noise."""
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    if dtype == np.int64:
        return np.arange(math.prod(shape)).reshape(shape)
    return np.resize(np.random.default_rng(0).standard_normal(4096, np.float32), shape)
