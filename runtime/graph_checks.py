"""What an ONNX graph of a plan may hold, looked at before ONNX Runtime gets to see it.

Digests say that a graph is the one that the plan was made with, not that its maker means well. A
graph of a plan is arithmetic over the plan's own weights: it has no operators but those of
``graph_operators``, no loops, no functions of its own, and reads no file but ``weights.bin``. What
is checked here takes the protobuf encoding alone; no onnx package is needed. See ``docs/trust.md``.
"""

import posixpath
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from profiles.errors import IncompatibleError, InputError
from runtime.graph_operators import CONTRIB, OPERATORS, Form
from runtime.plan import ExecutionPlan, Graph, TensorRef, TensorType

MAX_GRAPH_BYTES = 64 * 2**20
"""A longer graph is refused before it is read; that of 30 layers has 400 KB."""
_MAX_DEPTH = 8
"""Graphs in branches of graphs."""
_ELEMENT = {TensorType.F32: 1, TensorType.U8: 2}
"""Types of elements as onnx.proto numbers them."""
_RECOMPILE = "make the plan again with `plan compile`"

_FAILURES = ("Error in execution", "Error when binding", "Failed to find NodeArg")

# Numbers of the fields in onnx.proto
_MODEL_GRAPH, _MODEL_OPSET, _MODEL_TRAINING, _MODEL_FUNCTION = 7, 8, 20, 25
_OPSET_DOMAIN = 1
_GRAPH_NODE, _GRAPH_TENSOR, _GRAPH_SPARSE = 1, 5, 15
_NODE_INPUT, _NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 4, 5, 7
_ATTRIBUTE_NAME = 1
_ATTRIBUTE_TENSOR, _ATTRIBUTE_GRAPH, _ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS = 5, 6, 10, 11
_ATTRIBUTE_SPARSE = (22, 23)
_TENSOR_DIMENSION, _TENSOR_TYPE = 1, 2
_TENSOR_NAME, _TENSOR_EXTERNAL, _TENSOR_LOCATION = 8, 13, 14
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _Field(NamedTuple):
    number: int
    value: memoryview | int
    """Bytes of a text or message; a number."""


class _Files(NamedTuple):
    """What the tensors of a graph may refer to."""

    folder: str
    """Of the graph, relative to the plan's."""
    weights: str
    """The one file that tensors may lie in, relative to the plan's."""
    tensors: Mapping[str, TensorRef]
    """That the plan lists for it."""


class _RefusedError(ValueError):
    """What is wrong with a graph."""


def check_graphs(folder: Path, plan: ExecutionPlan) -> None:
    """Look at the graphs of a plan; reads them whole, one at a time.

    Raises:
        InputError: A graph is no ONNX file, is too large, or holds what no plan's graph does.
    """
    for graph, files in _all_graphs(plan):
        file = folder / graph.artefact.path
        if graph.artefact.bytes > MAX_GRAPH_BYTES:
            expected = f"at most {MAX_GRAPH_BYTES} bytes"
            raise InputError("graph is too large", where=file, expected=expected, hint=_RECOMPILE)
        try:
            _check_model(memoryview(file.read_bytes()), files)
        except OSError as error:
            raise InputError("cannot read graph", where=file, found=error.strerror) from error
        except _RefusedError as error:
            raise InputError(
                f"not a graph that a plan has: {error}", where=file, hint=_RECOMPILE
            ) from error


@contextmanager
def reported_failures(folder: Path) -> Generator[None]:
    """Names the plan when ONNX Runtime fails on one of its graphs.

    Raises:
        IncompatibleError: ONNX Runtime raised an error of its own.
    """
    try:
        yield
    except Exception as error:
        # With buffers bound, it raises plain errors that tell where they are from
        told = any(words in str(error) for words in _FAILURES)
        if not (told or type(error).__module__.startswith("onnxruntime")):
            raise
        raise IncompatibleError(
            "a graph of the plan failed",
            where=folder,
            found=str(error).partition("\n")[0],
            hint=_RECOMPILE,
        ) from error


def _all_graphs(plan: ExecutionPlan) -> Iterator[tuple[Graph, _Files]]:
    """The target's and the draft model's."""
    for part in (plan, plan.draft) if plan.draft else (plan,):
        tensors = {tensor.name: tensor for tensor in part.tensors}
        for graph in part.graphs:
            listed = {name: tensors[name] for name in graph.tensors}
            yield graph, _Files(posixpath.dirname(graph.artefact.path), part.weights.path, listed)


def _check_model(data: memoryview, files: _Files) -> None:
    found = 0
    for field in _fields(data):
        if field.number == _MODEL_GRAPH:
            found += 1
            _check_graph(_message(field), files, _MAX_DEPTH)
        elif field.number == _MODEL_OPSET:
            for entry in _fields(_message(field)):
                if entry.number == _OPSET_DOMAIN:
                    _check_domain(_text(entry))
        elif field.number in (_MODEL_FUNCTION, _MODEL_TRAINING):
            raise _RefusedError("it has functions of its own")
    if found != 1:
        raise _RefusedError(f"it holds {found} graphs, not 1")


def _check_graph(data: memoryview, files: _Files, depth: int) -> None:
    if not depth:
        raise _RefusedError("its graphs are nested too deeply")
    for field in _fields(data):
        if field.number == _GRAPH_NODE:
            _check_node(_message(field), files, depth)
        elif field.number == _GRAPH_TENSOR:
            _check_tensor(_message(field), files)
        elif field.number == _GRAPH_SPARSE:
            raise _RefusedError("it has sparse tensors")


def _check_node(data: memoryview, files: _Files, depth: int) -> None:
    operator, domain = "", ""
    inputs: list[bytes] = []
    attributes: list[memoryview] = []
    for field in _fields(data):
        if field.number == _NODE_INPUT:
            inputs.append(bytes(_message(field)))
        elif field.number == _NODE_OPERATOR:
            operator = _text(field)
        elif field.number == _NODE_DOMAIN:
            domain = _text(field)
        elif field.number == _NODE_ATTRIBUTE:
            attributes.append(_message(field))
    form = OPERATORS.get((domain, operator))
    name = f"operator {f'{domain}.{operator}'.lstrip('.')[:60]!r}"
    if form is None:
        raise _RefusedError(f"{name} is not one that plans use")
    if len(inputs) not in form.inputs:
        raise _RefusedError(f"{name} has {len(inputs)} inputs")
    if any(not given and place not in form.may_lack for place, given in enumerate(inputs)):
        raise _RefusedError(f"{name} lacks an input")
    for attribute in attributes:
        _check_attribute(attribute, form, name, files, depth)


def _check_attribute(
    data: memoryview, form: Form, operator: str, files: _Files, depth: int
) -> None:
    for field in _fields(data):
        if field.number == _ATTRIBUTE_NAME and _text(field) not in form.attributes:
            raise _RefusedError(f"{operator} has the attribute {_text(field)[:60]!r}")
        if field.number in (_ATTRIBUTE_TENSOR, _ATTRIBUTE_TENSORS):
            _check_tensor(_message(field), files)
        elif field.number in (_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS):
            # The one operator that may hold graphs has attributes of these names alone
            if "then_branch" not in form.attributes:
                raise _RefusedError(f"{operator} runs a graph of its own")
            _check_graph(_message(field), files, depth - 1)
        elif field.number in _ATTRIBUTE_SPARSE:
            raise _RefusedError("it has sparse tensors")


def _check_domain(domain: str) -> None:
    if domain not in ("", CONTRIB):
        raise _RefusedError(f"operators of {domain[:60]!r} are not allowed")


class _Tensor(NamedTuple):
    """What an encoded tensor says of itself."""

    name: str
    shape: tuple[int, ...]
    type: int
    external: bool
    locations: tuple[str, ...]


def _tensor(data: memoryview) -> _Tensor:
    name, kind, external = "", 0, False
    shape: list[int] = []
    locations: list[str] = []
    for field in _fields(data):
        if field.number == _TENSOR_NAME:
            name = _text(field)
        elif field.number == _TENSOR_DIMENSION:
            shape.extend(_numbers(field))
        elif field.number == _TENSOR_TYPE and isinstance(field.value, int):
            kind = field.value
        elif field.number == _TENSOR_LOCATION:
            external = external or field.value != 0
        elif field.number == _TENSOR_EXTERNAL:
            external = True
            entry = {part.number: part for part in _fields(_message(field))}
            if _ENTRY_KEY in entry and _text(entry[_ENTRY_KEY]) == "location":
                value = entry.get(_ENTRY_VALUE)
                locations.append("" if value is None else _text(value))
    return _Tensor(name, tuple(shape), kind, external, tuple(locations))


def _check_tensor(data: memoryview, files: _Files) -> None:
    """A tensor lies in the graph, or is one that the plan lists, and lies in ``weights.bin``."""
    tensor = _tensor(data)
    if not tensor.external:
        return
    paths = {posixpath.normpath(posixpath.join(files.folder, at)) for at in tensor.locations}
    if paths != {files.weights}:
        raise _RefusedError(f"tensor {tensor.name[:60]!r} lies elsewhere than in {files.weights}")
    listed = files.tensors.get(tensor.name)
    if listed is None:
        raise _RefusedError(f"tensor {tensor.name[:60]!r} is not in the plan's list")
    if (tensor.shape, tensor.type) != (listed.shape, _ELEMENT[listed.type]):
        raise _RefusedError(f"tensor {tensor.name[:60]!r} has another shape or type than listed")


def _numbers(field: _Field) -> list[int]:
    """Of a repeated number, which may be packed."""
    if isinstance(field.value, int):
        return [field.value]
    found: list[int] = []
    position = 0
    while position < len(field.value):
        number, position = _varint(field.value, position)
        found.append(number)
    return found


def _text(field: _Field) -> str:
    return bytes(_message(field)).decode(errors="replace")


def _message(field: _Field) -> memoryview:
    if isinstance(field.value, int):
        raise _RefusedError("malformed")
    return field.value


def _fields(data: memoryview) -> Iterator[_Field]:
    """The fields of an encoded message, in the order of the file."""
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        kind = key & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield _Field(key >> 3, value)
            continue
        if kind == _BYTES:
            length, position = _varint(data, position)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise _RefusedError("malformed")
        if length > end - position:
            raise _RefusedError("cut off or malformed")
        yield _Field(key >> 3, data[position : position + length])
        position += length


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """A number of variable length, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise _RefusedError("cut off or malformed")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _RefusedError("malformed")
