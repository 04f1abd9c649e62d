"""Broken plans whose sub-layers stream from flash, each from a small valid one and sealed again."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
from broken_files import Corpus, cuts, flips, replace
from broken_plans import SHAPE, seal, seal_text
from compiled_models import Recipe, compile_recipe
from onnx import TensorProto, helper

from profiles.words import AttentionKernel, SubLayerId
from runtime.plan import Residency

RECIPE = Recipe(
    shape=SHAPE,
    attention=AttentionKernel.EXACT,
    residency=Residency((SubLayerId(0), SubLayerId(1)), 1, 4096),
)
GRAPHS = ("attention.onnx", "mlp.onnx", "layers.onnx")


def streamed_corpus(root: Path) -> Corpus:
    """Some 130 plan folders."""
    valid = root / "tiny.plan"
    compile_recipe(RECIPE, valid)
    corpus = Corpus("plan", root / "streamed", valid)
    for file in GRAPHS:
        data = (valid / file).read_bytes()
        for what, broken in [*cuts(data, 6), *flips(data, 12, corpus.random)]:
            corpus.add(f"sealed {file}: {what}", _resealed(file, broken), certain=False)
        corpus.add(f"{file}: missing", lambda path, name=file: (path / name).unlink())
    for what, file, model in _graphs(valid):
        corpus.add(f"sealed {file}: {what}", _resealed(file, model.SerializeToString()))
    text = (valid / "plan.json").read_text(encoding="utf-8")
    for name, values in (
        ("streamed", ([], [0], [1], [1, 0], [0, 0], [-1], [0, 1, 2], [2**63], None, "0")),
        ("slots", (0, -1, 3, 2**48, None)),
        ("read_bytes", (0, 1, 4095, 2**40, 2**64)),
    ):
        for value in values:
            document = json.loads(text)
            document["residency"][name] = value
            broken = json.dumps(document).encode()
            corpus.add(f"{name} = {str(value)[:20]}", lambda p, b=broken: seal_text(p, b))
    for what, change in _documents():
        document = json.loads(text)
        change(document)
        broken = json.dumps(document).encode()
        corpus.add(what, lambda p, b=broken: seal_text(p, b))
    return corpus


def _resealed(name: str, data: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        replace(path / name, data)
        seal(path)

    return change


def _documents() -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Documents that fit the schema and lie."""

    def tensor(document: Any, name: str) -> Any:
        return next(each for each in document["tensors"] if each["name"] == name)

    yield "no residency", lambda d: d.update(residency=None)
    yield "no tables", lambda d: d["tables"].update(streams=[])
    yield "f32", lambda d: d.update(target_format="f32", formats=None)
    yield "fused", lambda d: d["numerics"][0].update(attention="fused")
    for name in ("layers.0.qkv", "layers.0.down.scale", "layers.0.mlp_norm"):
        yield f"no {name}", lambda d, n=name: tensor(d, n).update(name="layers.0.other")
        yield f"{name} is narrow", lambda d, n=name: tensor(d, n).update(shape=[1])
        yield f"{name} is of no layer", lambda d, n=name: tensor(d, n).update(name="other")


def _graphs(valid: Path) -> Iterator[tuple[str, str, onnx.ModelProto]]:
    """Graphs that ONNX Runtime would load."""

    def loaded(file: str) -> onnx.ModelProto:
        return onnx.load(valid / file, load_external_data=False)

    for file, names in (
        ("attention.onnx", ("hidden", "layer.qkv", "layer.o.scale", "mask", "key")),
        ("mlp.onnx", ("hidden", "layer.down", "layer.mlp_norm")),
    ):
        for name in names:
            model = loaded(file)
            entry = next(value for value in model.graph.input if value.name == name)
            entry.type.tensor_type.shape.dim[0].dim_value = 7
            yield f"input {name} of another shape", file, model
            model = loaded(file)
            entry = next(value for value in model.graph.input if value.name == name)
            entry.type.tensor_type.elem_type = TensorProto.INT32
            yield f"input {name} of another type", file, model
        for what, node in (
            ("narrow", helper.make_node("ReduceMax", ["hidden", "last"], ["hidden_out"])),
            ("long", helper.make_node("Concat", ["hidden"] * 5, ["hidden_out"], axis=0)),
            (
                "of bytes",
                helper.make_node("Cast", ["hidden"], ["hidden_out"], to=TensorProto.UINT8),
            ),
        ):
            model = loaded(file)
            model.graph.initializer.append(helper.make_tensor("last", TensorProto.INT64, [1], [1]))
            del model.graph.node[:]
            model.graph.node.append(node)
            kind = TensorProto.UINT8 if what == "bytes" else TensorProto.FLOAT
            del model.graph.output[:]
            model.graph.output.append(helper.make_tensor_value_info("hidden_out", kind, None))
            yield f"rows {what}", file, model
