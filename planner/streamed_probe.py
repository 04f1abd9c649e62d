"""A sub-layer whose weights are inputs, run as one that streams from flash: a call of its own."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowering.operator_graphs import streamed_mlp_graph
from planner.cost import sub_layer_parts
from planner.operator_session import WeightPool, content
from profiles.points import Point, Quantity
from profiles.words import Format, Operator, Provenance, SubLayerKind
from runtime.backends import open_session
from runtime.model_spec import ModelSpec

CALLS = 8
"""Sub-layers of one run."""

_DTYPES = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8}


class StreamedMlp:
    """The MLP of ``spec`` in ``fmt``, ``CALLS`` times, each with weights from other memory."""

    def __init__(self, spec: ModelSpec, fmt: Format, threads: int, pool: WeightPool) -> None:
        self._pool = pool
        self._small: dict[tuple[int, ...], Any] = {}
        self._bindings: dict[int, Any] = {}
        self._session = open_session(streamed_mlp_graph(spec, fmt).model, {}, threads)
        self._inputs = self._session.get_inputs()
        self._output = self._session.get_outputs()[0].name

    def run(self, width: int) -> None:
        """``CALLS`` sub-layers at ``width`` tokens; everything is bound anew for each."""
        bound = self._bindings.setdefault(width, self._session.io_binding())
        for _ in range(CALLS):
            for place in self._inputs:
                shape = tuple(width if size == "w" else int(size) for size in place.shape)
                self._bind(bound.bind_input, place.name, self._array(shape, place.type))
            rows = self._array((width, int(self._inputs[0].shape[1])), "tensor(float)")
            self._bind(bound.bind_output, self._output, rows)
            self._session.run_with_iobinding(bound)

    def close(self) -> None:
        """Release the bindings, then the session."""
        self._bindings.clear()
        del self._session

    def _array(self, shape: tuple[int, ...], kind: str) -> Any:
        if kind == "tensor(uint8)":
            return self._pool.take(shape)
        if shape not in self._small:
            self._small[shape] = content(shape, np.dtype(np.float32))
        return self._small[shape]

    @staticmethod
    def _bind(bind: Any, name: str, array: Any) -> None:
        bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def call_time(points: Sequence[Point], calls: Sequence[Point], spec: ModelSpec) -> Quantity | None:
    """What ``calls``, times of ``StreamedMlp`` by width, take beyond their operators.

    The median over widths; None where no width has points of all its operators.
    """
    times = {(p.operator, p.format, p.shape, p.width): p.time_us.value for p in points}
    operators = sub_layer_parts(spec, SubLayerKind.MLP, streamed=True)
    beyond: list[float] = []
    for call in calls:
        parts = [
            (operator, Format.F32 if operator is Operator.GLUE else call.format, shape, call.width)
            for operator, shape in operators
        ]
        if all(part in times for part in parts):
            beyond.append(call.time_us.value - sum(times[part] for part in parts))
    if not beyond:
        return None
    cite = "measured sub-layers with weights from outside, less their operators"
    value = max(0.0, float(np.median(beyond)))
    return Quantity(value=value, source=Provenance.DERIVED, cite=cite)
