"""Broken plans, device profiles and prompt files, each from a small valid one.

A plan's digests would catch most changes, so that nothing behind them were tried: most of these
plans are sealed again, as somebody does who breaks them on purpose.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from broken_files import Corpus, broken_json, cuts, flips, hostile_values, not_files, replace
from compiled_models import Recipe, compile_recipe
from onnx import TensorProto, helper
from tiny_models import TinyShape

from profiles.profile import load_profile, save_profile
from runtime.plan_cycles import Cycle, DraftSource

SHAPE = TinyShape(layers=1, hidden=32, intermediate=32, heads=2, kv_heads=1, head_dim=16)
RECIPE = Recipe(
    shape=SHAPE,
    masks=((1,),),
    cycles=((0, Cycle(DraftSource.SKIP, 2, mask=1)), (64, Cycle(DraftSource.NGRAM, 3, 0, 1, 3))),
)
FILES = ("plan.json", "plan.sha256", "weights.bin", "layers.onnx", "head.onnx", "tokenizer.json")


def seal(path: Path, document: Any = None) -> None:
    """Record lengths and digests of all files anew, so that the plan is of one piece."""
    document = document or json.loads((path / "plan.json").read_bytes())
    entries = [graph["artefact"] for graph in document["graphs"]]
    entries += [document["weights"], document["tokenizer"]]
    if draft := document.get("draft"):
        entries += [*(graph["artefact"] for graph in draft["graphs"]), draft["weights"]]
    for entry in entries:
        data = (path / entry["path"]).read_bytes()
        entry["bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    seal_text(path, json.dumps(document).encode())


def seal_text(path: Path, data: bytes) -> None:
    """A ``plan.json`` with its seal."""
    replace(path / "plan.json", data)
    replace(path / "plan.sha256", f"{hashlib.sha256(data).hexdigest()}  plan.json\n".encode())


def plan_corpus(root: Path) -> Corpus:
    """Some 500 plan folders."""
    valid = root / "tiny.plan"
    compile_recipe(RECIPE, valid)
    corpus = Corpus("plan", root / "plan", valid)
    for file in FILES:
        data = (valid / file).read_bytes()
        for what, change in not_files(Path(file)):
            corpus.add(f"{file}: {what}", change)
        for what, broken in [*cuts(data, 5), *flips(data, 5, corpus.random)]:
            corpus.add(f"{file}: {what}", _with(file, broken), certain=False)
        outside = root / f"outside-{file}"
        outside.write_bytes(data)
        corpus.add(f"{file}: out of the folder", _linked(file, outside))
    text = (valid / "plan.json").read_text(encoding="utf-8")
    for what, broken in [*broken_json(text), *cuts(text.encode(), 12)]:
        corpus.add(f"sealed plan.json: {what}", lambda p, b=broken: seal_text(p, b), certain=False)
    document = json.loads(text)
    for what, changed in hostile_values(document, 150, corpus.random):
        broken = json.dumps(changed).encode()
        corpus.add(f"sealed {what}", lambda p, b=broken: seal_text(p, b), certain=False)
    for what, change in _documents():
        changed = json.loads(text)
        change(changed)
        broken = json.dumps(changed).encode()
        corpus.add(f"sealed plan.json: {what}", lambda p, b=broken: seal_text(p, b))
    _add_resealed(corpus, valid)
    return corpus


def _add_resealed(corpus: Corpus, valid: Path) -> None:
    for file in ("layers.onnx", "head.onnx", "tokenizer.json"):
        data = (valid / file).read_bytes()
        for what, broken in [*cuts(data, 8), *flips(data, 40, corpus.random)]:
            corpus.add(f"sealed {file}: {what}", _resealed(file, broken), certain=False)
    for what, file, model in _graphs(valid):
        data = model.SerializeToString()
        corpus.add(f"sealed {file}: {what}", _resealed(file, data))
    tokenizer = (valid / "tokenizer.json").read_text(encoding="utf-8")
    for what, broken in broken_json(tokenizer):
        change = _resealed("tokenizer.json", broken)
        corpus.add(f"sealed tokenizer.json: {what}", change, certain=False)
    for what, changed in hostile_values(json.loads(tokenizer), 60, corpus.random):
        change = _resealed("tokenizer.json", json.dumps(changed).encode())
        corpus.add(f"sealed tokenizer.json: {what}", change, certain=False)
    weights = (valid / "weights.bin").read_bytes()
    for what, number in (("nan", np.nan), ("inf", np.inf), ("huge", 3e38)):
        filled = np.full(len(weights) // 4, number, np.float32).tobytes()
        corpus.add(f"sealed weights.bin: {what}", _resealed("weights.bin", filled), certain=False)


def _with(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda path: replace(path / name, data)


def _linked(name: str, target: Path) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(target)

    return change


def _resealed(name: str, data: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        replace(path / name, data)
        seal(path)

    return change


def _documents() -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Documents that fit the schema and lie."""

    def put(*steps: Any) -> Callable[[Any], None]:
        *path, last, value = steps

        def change(document: Any) -> None:
            for step in path:
                document = document[step]
            document[last] = value

        return change

    for path in ("../weights.bin", "/etc/passwd", "a/../../b", "plan.json", "plan.sha256", ""):
        yield f"graph at {path}", put("graphs", 0, "artefact", "path", path)
        yield f"weights at {path}", put("weights", "path", path)
        yield f"tokenizer at {path}", put("tokenizer", "path", path)
    for offset in (1, 2**40 * 4096, 2**48, 2**63, 2**64):
        yield f"offset {offset}", put("tensors", 2, "offset_bytes", offset)
    yield "tensors overlap", put("tensors", 2, "offset_bytes", 0)
    for shape in ([2**24, 2**24], [2**48] * 8, [0], [1] * 9, [2**63], [-1]):
        yield f"shape {str(shape)[:20]}", put("tensors", 0, "shape", shape)
    for name in ("embed", "gone"):
        yield f"graph wants {name}", put("graphs", 0, "tensors", [name])
    yield "no embedding", put("tensors", 0, "name", "other")
    yield "no tensors", put("tensors", [])
    for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "max_context"):
        for value in (0, 2**23, 2**63):
            if (field, value) != ("max_context", 2**23):
                yield f"{field} = {value}", put("model", field, value)
    for field in ("layers", "hidden", "head_dim", "vocab"):
        yield f"{field} = 48", put("model", field, 48)
    yield "version 2", put("format", "2.0")
    yield "version 1e9", put("format", "1000000000.0")
    yield "mask of itself", put("buckets", 0, "cycle", "mask", 9)
    yield "endless context", put("context", 2**24 + 1)


def _graphs(valid: Path) -> Iterator[tuple[str, str, onnx.ModelProto]]:
    """Graphs that ONNX Runtime would load, or would be made to do something else by."""

    def loaded(file: str) -> onnx.ModelProto:
        return onnx.load(valid / file, load_external_data=False)

    for place in ("../x", "/etc/passwd", "plan.json", "./../../etc/passwd", "weights.bin/", ""):
        model = loaded("head.onnx")
        external = next(t for t in model.graph.initializer if t.external_data)
        external.external_data[0].value = place
        if place != "weights.bin/":
            yield f"tensor in {place!r}", "head.onnx", model
    model = loaded("head.onnx")
    next(t for t in model.graph.initializer if t.external_data).name = "secret"
    yield "another tensor", "head.onnx", model
    for what, domain, operator in (
        *(("custom operator", "evil.ops", "Run"), ("unknown operator", "", "NoSuchThing")),
        *(("context binary", "com.microsoft", "EPContext"), ("Python", "ai.onnx.ml", "PyOp")),
    ):
        model = loaded("head.onnx")
        model.graph.node.append(helper.make_node(operator, ["hidden"], ["y"], domain=domain))
        yield what, "head.onnx", model
    yield "loop", "head.onnx", _looping(loaded("head.onnx"))
    model = loaded("head.onnx")
    model.functions.append(
        helper.make_function(
            "", "Relu", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], model.opset_import
        )
    )
    yield "functions", "head.onnx", model
    yield "nothing", "head.onnx", onnx.ModelProto()
    for file, names in (("head.onnx", ("hidden",)), ("layers.onnx", ("hidden", "slots", "on.1"))):
        for name in names:
            model = loaded(file)
            next(value for value in model.graph.input if value.name == name).name = "other"
            yield f"no input {name}", file, model
    yield from _shapes(loaded)


def _looping(model: onnx.ModelProto) -> onnx.ModelProto:
    """With a loop that counts to 2**62."""
    values = [helper.make_tensor_value_info(n, k, []) for n, k in (("i", 7), ("c", 9), ("d", 9))]
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"])], "body", values[:2], values[2:]
    )
    count = helper.make_tensor("count", TensorProto.INT64, [], [2**62])
    model.graph.initializer.append(count)
    model.graph.node.append(helper.make_node("Loop", ["count", ""], [], body=body))
    return model


def _shapes(
    loaded: Callable[[str], onnx.ModelProto],
) -> Iterator[tuple[str, str, onnx.ModelProto]]:
    """Results of another shape than the runtime expects."""
    for what, nodes in (
        ("narrow", [helper.make_node("ReduceMax", ["hidden"], ["logits"])]),
        ("wide", [helper.make_node("Concat", ["hidden"] * 50, ["logits"], axis=1)]),
        ("more rows", [helper.make_node("Concat", ["hidden"] * 5, ["logits"], axis=0)]),
        ("bytes", [helper.make_node("Cast", ["hidden"], ["logits"], to=TensorProto.UINT8)]),
        ("flat", [helper.make_node("Shape", ["hidden"], ["logits"])]),
    ):
        model = loaded("head.onnx")
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        del model.graph.output[:]
        kind = {"bytes": TensorProto.UINT8, "flat": TensorProto.INT64}.get(what, TensorProto.FLOAT)
        model.graph.output.append(helper.make_tensor_value_info("logits", kind, None))
        yield f"logits {what}", "head.onnx", model


def profile_corpus(root: Path) -> Corpus:
    """Some 200 device profiles."""
    valid = root / "tiny.toml"
    save_profile(load_profile("oneplus12"), valid)
    corpus = Corpus("profile", root / "profile", valid)
    text = valid.read_text(encoding="utf-8")
    for what, change in not_files(Path()):
        corpus.add(what, change)
    for what, broken in [*cuts(text.encode(), 30), *flips(text.encode(), 60, corpus.random)]:
        corpus.add(what, lambda p, b=broken: replace(p, b), certain=False)
    lines = text.splitlines()
    numbered = [index for index, line in enumerate(lines) if " = " in line]
    values = ("nan", "-1", "inf", "1e400", "9" * 400, "''", "[]", "{}", "2020-01-01", "true")
    for index in corpus.random.sample(numbered, min(60, len(numbered))):
        key, value = lines[index].split(" = ", 1)[0], corpus.random.choice(values)
        changed = "\n".join([*lines[:index], f"{key} = {value}", *lines[index + 1 :]])
        name = f"{key} = {value[:12]} in line {index + 1}"
        corpus.add(name, lambda p, t=changed: replace(p, t.encode()), certain=False)
        twice = "\n".join([*lines[: index + 1], *lines[index:]])
        corpus.add(f"line {index + 1} twice", lambda p, t=twice: replace(p, t.encode()))
    for what, broken in _hostile_toml(text):
        corpus.add(what, lambda p, b=broken: replace(p, b))
    return corpus


def _hostile_toml(text: str) -> Iterator[tuple[str, bytes]]:
    yield "deep lists", b"x = " + b"[" * 100_000 + b"]" * 100_000
    yield "deep tables", b"[" + b"a." * 50_000 + b"a]\nb = 1\n"
    yield "deep inline", b"x = " + b"{a=" * 50_000 + b"1" + b"}" * 50_000
    yield "UTF-16", text.encode("utf-16")
    yield "Latin-1", text.encode("latin-1", "replace") + b"\n# \xe9"
    yield "null bytes", text.encode() + b"\0"
    yield "version 9", text.replace('format = "1', 'format = "9', 1).encode()
    yield "an unknown key", b"surprise = 1\n" + text.encode()
    yield "a million keys", b"".join(b"k%d = 1\n" % i for i in range(200_000))
    yield "digits without end", b"x = " + b"9" * 500_000


def prompt_corpus(root: Path) -> Corpus:
    """Some 120 prompt files."""
    valid = root / "prompts.jsonl"
    line = {"id": "a", "category": "chat", "prompt": "Why?", "split": "report"}
    entries = [{**line, "id": str(index)} for index in range(6)]
    valid.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    corpus = Corpus("prompts", root / "prompts", valid)
    data = valid.read_bytes()
    for what, change in not_files(Path()):
        corpus.add(what, change)
    for what, broken in [*cuts(data, 12), *flips(data, 40, corpus.random)]:
        corpus.add(what, lambda p, b=broken: replace(p, b), certain=False)
    for what, broken in broken_json(json.dumps(line)):
        corpus.add(what, lambda p, b=broken: replace(p, data + b + b"\n"), certain=False)
    for what, changed in hostile_values(line, 40, corpus.random):
        broken = json.dumps({**changed, "z": 1}).encode()
        corpus.add(what, lambda p, b=broken: replace(p, data + b + b"\n"), certain=False)
    corpus.add("id twice", lambda p: replace(p, data + data))
    corpus.add("one long line", lambda p: replace(p, b'{"id": "' + b"x" * 2**27))
    return corpus


CORPORA: Sequence[Callable[[Path], Corpus]] = (plan_corpus, profile_corpus, prompt_corpus)
