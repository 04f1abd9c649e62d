"""ONNX Runtime sessions of a plan: one for the layers, one for the head, bindings made once."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from profiles.errors import IncompatibleError
from profiles.measure import usable_cores
from profiles.words import AttentionKernel
from runtime.kv_cache import KvCache
from runtime.model_spec import ModelSpec

Array = np.ndarray[Any, Any]

_FOLDER = "session.model_external_initializers_file_folder_path"
HIDDEN = np.float32(-1e30)
"""Mask value of a slot that a row may not look at."""

MAX_BOUND_ROWS = 1024
"""Rows of all bindings that are kept: prompts of every length would leave one for each width."""


class PassResult(NamedTuple):
    """What a pass computed; the arrays are reused by the next pass of the same width."""

    hidden: Array
    """[w, hidden]"""
    keys: Array | None
    """[layers, kv_heads, w, head_dim]; None where the pass wrote them into the cache itself."""
    values: Array | None
    """Likewise."""


def open_session(
    graph: Path | bytes, constants: Mapping[str, Array], threads: int
) -> ort.InferenceSession:
    """An ONNX Runtime CPU session of a graph file, or of a graph in memory.

    ``constants`` are its external initializers; the arrays must outlive the session.

    ``IncompatibleError`` when the graph does not load; the plan's digests were right, so the
    installed onnxruntime is the likely reason.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    # Waking a worker takes longer than most operators do; one that still spins after the pass would
    # steal the core that the caller needs then.
    spin = "1" if threads <= usable_cores() else "0"
    options.add_session_config_entry("session.intra_op.allow_spinning", spin)
    options.add_session_config_entry("session.force_spinning_stop", "1")
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in constants.items()}
    for name, value in values.items():
        options.add_initializer(name, value)
    try:
        source = graph if isinstance(graph, bytes) else graph.read_bytes()
        if isinstance(graph, Path):
            # As bytes: the library takes text for UTF-8, whatever the locale is
            options.add_session_config_entry(_FOLDER, os.fsencode(graph.parent))
        # Trying again elsewhere would be announced on stdout
        session = ort.InferenceSession(
            source, options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception as error:
        raise IncompatibleError(
            "onnxruntime refused the graph",
            where=None if isinstance(graph, bytes) else graph,
            found=str(error).partition("\n")[0] or type(error).__name__,
            hint=f"this is onnxruntime {ort.__version__}; compile the plan again",
        ) from error
    return session


def bind_input(binding: ort.IOBinding, name: str, array: Array) -> None:
    """Let input ``name`` be ``array``'s memory, which must outlive the binding."""
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def bind_output(binding: ort.IOBinding, name: str, array: Array) -> None:
    """Let output ``name`` be written into ``array``, which must outlive the binding."""
    binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


class _Binding:
    """Buffers of one pass width over one cache, and the ORT binding that points at them."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: ModelSpec,
        width: int,
        cache: KvCache,
        on: Array,
        attention: AttentionKernel,
    ) -> None:
        exact = attention is AttentionKernel.EXACT
        rows = (spec.layers, spec.kv_heads, width, spec.head_dim)
        self.hidden = np.zeros((width, spec.hidden), np.float32)
        self.positions = np.zeros((1, width), np.int64)
        self.mask = np.zeros((width, cache.capacity + width if exact else 0), np.float32)
        self.slots, self.last_slot = np.zeros((), np.int32), np.zeros(1, np.int32)
        self.result = PassResult(
            np.zeros((width, spec.hidden), np.float32),
            np.zeros(rows, np.float32) if exact else None,
            np.zeros(rows, np.float32) if exact else None,
        )
        self.keys, self.values = cache.keys, cache.values
        self.ort = session.io_binding()
        inputs = {"hidden": self.hidden, "positions": self.positions}
        if exact:
            inputs["mask"] = self.mask
        else:
            inputs |= {"slots": self.slots, "last_slot": self.last_slot}
        outputs = {"hidden_out": self.result.hidden}
        for kind, past, new in (
            ("key", cache.keys, self.result.keys),
            ("value", cache.values, self.result.values),
        ):
            for layer in range(spec.layers):
                # In place: one buffer is input and output
                held = past[layer] if exact else past[layer : layer + 1]
                inputs[f"{kind}.{layer}"] = held
                outputs[f"new_{kind}.{layer}"] = held if new is None else new[layer]
        inputs |= {f"on.{i}": on[i : i + 1].reshape(()) for i in range(spec.sub_layers)}
        for name, array in inputs.items():
            bind_input(self.ort, name, array)
        for name, array in outputs.items():
            bind_output(self.ort, name, array)

    def serves(self, cache: KvCache) -> bool:
        """Whether the bound addresses are still the cache's."""
        return self.keys is cache.keys and self.values is cache.values


class LayersSession:
    """All sub-layers of the target behind switches: every pass of a cycle runs here."""

    def __init__(
        self,
        graph: Path,
        constants: Mapping[str, Array],
        spec: ModelSpec,
        threads: int,
        attention: AttentionKernel,
    ) -> None:
        self.attention = attention
        self._spec = spec
        self._session = open_session(graph, constants, threads)
        self._bindings: dict[int, _Binding] = {}
        self._on = np.ones(spec.sub_layers, np.bool_)
        self._biased = any(entry.name == "bias" for entry in self._session.get_inputs())
        self._no_bias = np.zeros(0, np.float32)

    def run(
        self, hidden: Array, positions: Array, mask: Array, cache: KvCache, active: Array
    ) -> PassResult:
        """One pass over ``cache`` with exact attention.

        ``hidden`` [w, hidden] f32, ``positions`` [w] int64, ``mask`` [w, capacity + w] f32 (0 or
        ``HIDDEN``), ``active`` [2L] bool. The cache is only read.
        """
        bound = self._bound(hidden.shape[0], cache)
        bound.mask[:] = mask
        return self._run(bound, hidden, positions, active)

    def run_in_place(
        self,
        hidden: Array,
        positions: Array,
        start: int,
        cache: KvCache,
        active: Array,
        bias: Array | None = None,
    ) -> PassResult:
        """One pass with fused attention; its rows lie in slots ``start`` onwards.

        Each sees all slots up to its own. ``bias`` [w, start + w] f32 is added to the scores, where
        the graph takes one: ``HIDDEN`` for a slot of another branch. Keys and values of the
        sub-layers that are on are written into the cache.
        """
        width = hidden.shape[0]
        bound = self._bound(width, cache)
        if self._biased:
            shape = 1, 1, width, start + width
            given = self._zeros(width * (start + width)) if bias is None else bias
            bound.ort.bind_input("bias", "cpu", 0, np.float32, shape, given.ctypes.data)
        bound.slots[()] = start + width
        bound.last_slot[0] = start + width - 1
        return self._run(bound, hidden, positions, active)

    def _zeros(self, count: int) -> Array:
        """At least ``count`` zeros: the bias of a chain."""
        if len(self._no_bias) < count:
            self._no_bias = np.zeros(2 * count, np.float32)
        return self._no_bias

    def _bound(self, width: int, cache: KvCache) -> _Binding:
        bound = self._bindings.get(width)
        if bound is None or not bound.serves(cache):
            # Those of an outgrown cache would keep its memory
            self._bindings = {w: b for w, b in self._bindings.items() if b.serves(cache)}
            while self._bindings and sum(self._bindings) + width > MAX_BOUND_ROWS:
                del self._bindings[next(iter(self._bindings))]
            bound = _Binding(
                *(self._session, self._spec, width, cache, self._on), attention=self.attention
            )
        else:
            del self._bindings[width]
        # Those used latest are last
        self._bindings[width] = bound
        return bound

    def _run(self, bound: _Binding, hidden: Array, positions: Array, active: Array) -> PassResult:
        bound.hidden[:] = hidden
        bound.positions[0] = positions
        self._on[:] = active
        self._session.run_with_iobinding(bound.ort)
        return bound.result

    def close(self) -> None:
        """Release bindings, then the session: the other order crashes inside ONNX Runtime."""
        self._bindings.clear()
        if hasattr(self, "_session"):
            del self._session


class HeadSession:
    """Final norm and LM head."""

    def __init__(self, graph: Path, constants: Mapping[str, Array], threads: int) -> None:
        self._session = open_session(graph, constants, threads)

    def logits(self, hidden: Array) -> Array:
        """[w, hidden] -> [w, vocab] float32."""
        return np.asarray(self._session.run(["logits"], {"hidden": hidden})[0])

    def close(self) -> None:
        """Release the session; a second call does nothing."""
        if hasattr(self, "_session"):
            del self._session
