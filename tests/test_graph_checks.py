"""Graphs of plans: those that are emitted pass, any other form is refused before it is loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import onnx
import pytest
from compiled_models import FORMATS, Recipe
from onnx import helper

from profiles.errors import IncompatibleError, InputError
from profiles.words import AttentionKernel, Format, SubLayerId
from runtime.backends import open_session
from runtime.graph_checks import MAX_GRAPH_BYTES, check_graphs, reported_failures
from runtime.graph_operators import OPERATORS
from runtime.plan import Artefact, DraftModel, ExecutionPlan, Graph, GraphKind, Residency
from runtime.plan_folder import read_plan

EXACT = Recipe(attention=AttentionKernel.EXACT)
Compiled = Callable[[Recipe], Path]
Change = Callable[[onnx.ModelProto], object]


def nodes_of(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """All nodes, those in branches too."""
    found = list(graph.node)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += nodes_of(attribute.g)
    return found


def first(model: onnx.ModelProto, operator: str) -> onnx.NodeProto:
    return next(node for node in nodes_of(model.graph) if node.op_type == operator)


def lack(model: onnx.ModelProto) -> None:
    first(model, "Reshape").input[1] = ""


def shorten(model: onnx.ModelProto) -> None:
    del first(model, "RotaryEmbedding").input[-1]


def add_attribute(model: onnx.ModelProto) -> None:
    first(model, "MatMul").attribute.append(helper.make_attribute("body", 1))


def nest(model: onnx.ModelProto) -> None:
    output = helper.make_tensor_value_info("y", onnx.TensorProto.BOOL, [])
    nodes = [helper.make_node("Identity", ["on.0"], ["y"])]
    for _ in range(9):
        inner = helper.make_graph(nodes, "inner", [], [output])
        nodes = [helper.make_node("If", ["on.0"], ["y"], then_branch=inner, else_branch=inner)]
        plain = helper.make_graph([], "plain", [], [output])
        nodes[0].attribute[1].g.CopyFrom(plain)
    model.graph.node.extend(nodes)


def branch_elsewhere(model: onnx.ModelProto) -> None:
    branch = first(model, "If").attribute[0].g
    first(model, "Concat").attribute[0].g.CopyFrom(branch)


def external(model: onnx.ModelProto) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.external_data)


def reshape(model: onnx.ModelProto) -> None:
    external(model).dims[0] += 1


def retype(model: onnx.ModelProto) -> None:
    external(model).data_type = onnx.TensorProto.DOUBLE


def relocate(model: onnx.ModelProto) -> None:
    external(model).external_data[0].value = "../weights.bin"


def locate_twice(model: onnx.ModelProto) -> None:
    external(model).external_data.add(key="location", value="plan.json")


def hide(model: onnx.ModelProto) -> None:
    constant = helper.make_tensor("inner", onnx.TensorProto.FLOAT, [1], [1.0])
    constant.data_location = onnx.TensorProto.EXTERNAL
    constant.external_data.add(key="location", value="/etc/passwd")
    constant.ClearField("float_data")
    first(model, "If").attribute[0].g.initializer.append(constant)


def use_library(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("evil.ops", 1))


@pytest.fixture
def folder(compiled: Compiled, tmp_path: Path) -> Path:
    copy = tmp_path / "x.plan"
    copy.mkdir()
    for file in compiled(EXACT).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def layers(plan: ExecutionPlan) -> Graph:
    return next(graph for graph in plan.graphs if graph.kind is GraphKind.LAYERS)


@pytest.mark.parametrize("attention", AttentionKernel)
@pytest.mark.parametrize("fmt", [*FORMATS, Format.W4])
def test_every_graph_that_is_emitted_passes(
    compiled: Compiled, fmt: Format, attention: AttentionKernel
) -> None:
    folder = compiled(Recipe(format=fmt, attention=attention))
    check_graphs(folder, read_plan(folder))


def test_graphs_of_a_draft_model_take_their_constants_from_its_own_folder(folder: Path) -> None:
    plan = read_plan(folder)
    (folder / "draft").mkdir()
    for name in ("layers.onnx", "head.onnx"):
        (folder / "draft" / name).write_bytes((folder / name).read_bytes())

    def moved(artefact: Artefact) -> Artefact:
        return msgspec.structs.replace(artefact, path=f"draft/{artefact.path}")

    graphs = tuple(msgspec.structs.replace(g, artefact=moved(g.artefact)) for g in plan.graphs)
    draft = DraftModel(
        *(plan.model, plan.part_formats, AttentionKernel.EXACT, graphs),
        *(moved(plan.weights), plan.tensors, plan.kv),
    )
    check_graphs(folder, msgspec.structs.replace(plan, draft=draft))
    file = folder / "draft" / "head.onnx"
    model = onnx.load(file, load_external_data=False)
    relocate(model)
    file.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=r"elsewhere than in draft/weights\.bin"):
        check_graphs(folder, msgspec.structs.replace(plan, draft=draft))


@pytest.mark.parametrize("fmt", [Format.W8A16, Format.W8A8])
def test_graphs_of_streamed_sub_layers_pass_and_changed_ones_do_not(
    compiled: Compiled, tmp_path: Path, fmt: Format
) -> None:
    residency = Residency((SubLayerId(0), SubLayerId(1)), 1, 4096)
    recipe = Recipe(format=fmt, attention=AttentionKernel.EXACT, residency=residency)
    folder = tmp_path / "x.plan"
    shutil.copytree(compiled(recipe), folder)
    plan = read_plan(folder)
    check_graphs(folder, plan)
    for name, change in (("attention", lack), ("attention", relocate), ("mlp", use_library)):
        file = folder / f"{name}.onnx"
        data = file.read_bytes()
        model = onnx.load(file, load_external_data=False)
        change(model)
        file.write_bytes(model.SerializeToString())
        with pytest.raises(InputError, match="not a graph that a plan has"):
            check_graphs(folder, plan)
        file.write_bytes(data)


def test_every_operator_in_the_list_exists() -> None:
    import onnxruntime.capi.onnxruntime_pybind11_state as state

    known = {(schema.domain, schema.name) for schema in state.get_all_operator_schema()}
    assert {(domain, name) for domain, name in OPERATORS} - known == set()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lack, "'Reshape' lacks an input"),
        (shorten, "RotaryEmbedding' has 3 inputs"),
        (add_attribute, "'MatMul' has the attribute 'body'"),
        (nest, "nested too deeply"),
        (branch_elsewhere, "'Concat' runs a graph"),
        (reshape, "another shape or type"),
        (retype, "another shape or type"),
        (relocate, "elsewhere than in weights.bin"),
        (locate_twice, "elsewhere than in weights.bin"),
        (hide, "'inner' lies elsewhere"),
        (use_library, "operators of 'evil.ops'"),
    ],
)
def test_a_graph_of_another_form_is_refused(folder: Path, change: Change, words: str) -> None:
    plan = read_plan(folder)
    file = folder / layers(plan).artefact.path
    model = onnx.load(file, load_external_data=False)
    change(model)
    file.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="not a graph that a plan has") as caught:
        check_graphs(folder, plan)
    assert words in str(caught.value)
    assert "plan compile" in str(caught.value)


def test_a_large_graph_is_not_read(folder: Path) -> None:
    plan = read_plan(folder)
    artefact = msgspec.structs.replace(plan.graphs[0].artefact, bytes=MAX_GRAPH_BYTES + 1)
    graph = msgspec.structs.replace(plan.graphs[0], artefact=artefact)
    (folder / artefact.path).unlink()
    with pytest.raises(InputError, match="too large"):
        check_graphs(folder, msgspec.structs.replace(plan, graphs=(graph, *plan.graphs[1:])))


def test_only_failures_of_the_library_are_reported_as_the_plans(tmp_path: Path) -> None:
    with (
        pytest.raises(IncompatibleError, match="a graph of the plan failed"),
        reported_failures(tmp_path),
    ):
        raise RuntimeError("Error in execution: no such thing\nmore")
    with pytest.raises(ZeroDivisionError), reported_failures(tmp_path):
        raise ZeroDivisionError


def test_a_graph_that_the_library_refuses_leaves_stdout_alone(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = folder / layers(read_plan(folder)).artefact.path
    model = onnx.load(file, load_external_data=False)
    # The library raises a UnicodeDecodeError for its own message
    name = b"no such value"
    first(model, "Add").input[0] = name.decode()
    file.write_bytes(model.SerializeToString().replace(name, b"\xff" * len(name)))
    with pytest.raises(IncompatibleError, match="onnxruntime refused the graph"):
        open_session(file, {}, 1)
    assert capfd.readouterr() == ("", "")
