"""The views of a plan: graph, text, data, Graphviz and picture."""

import itertools
import json
import re
from xml.etree import ElementTree

import msgspec
import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_plans import sample_plan
from varied_plans import (
    HIDDEN,
    NGRAM,
    OFF,
    SKIP,
    SUB_LAYER_US,
    TRANSFER_US,
    decision,
    varied_plan,
)

from planner.inspect.data import plan_data
from planner.inspect.dot import plan_dot
from planner.inspect.figures import bucket_figures
from planner.inspect.graph import (
    FEEDBACK_ROLES,
    EdgeRole,
    NodeKind,
    bucket_graph,
    plan_graphs,
)
from planner.inspect.svg import plan_svg
from planner.inspect.svg_canvas import text_width
from planner.inspect.text import COLUMNS, RUNS, SKIPPED, plan_text
from planner.inspect.units import bytes_label, clean, counted, three_digits, time_label
from profiles.words import SubLayerId
from runtime.plan import ExecutionPlan, Forecast, SkipMask
from runtime.plan_tables import PassKind

SVG = "{http://www.w3.org/2000/svg}"
NASTY = '<&> "quoted" \\ name\nwith a \x00 control'


@st.composite
def plans(draw: st.DrawFn) -> ExecutionPlan:
    layers = draw(st.integers(1, 40))
    sub_layers = st.integers(0, 2 * layers - 1)
    return varied_plan(
        layers=layers,
        cycles=draw(st.lists(st.sampled_from((SKIP, NGRAM, OFF)), max_size=4)),
        cuts=draw(st.lists(sub_layers, max_size=8)),
        skipped=sorted(draw(st.sets(sub_layers, max_size=2 * layers))),
        name=draw(st.text(max_size=60)),
        processor_names=draw(
            st.lists(st.text("npu<&>", min_size=1), min_size=1, max_size=3, unique=True)
        ),
    )


def odd_plans() -> dict[str, ExecutionPlan]:
    """Plans that nobody should make, yet a file may hold."""
    plan = varied_plan(layers=4)
    nothing = Forecast(0.0, 0.0, 0.0, 0.0, ())
    change = msgspec.structs.replace
    return {
        "no buckets": varied_plan(cycles=()),
        "no placements": change(plan, placements=()),
        "no spans": change(
            plan, placements=tuple(change(placement, spans=()) for placement in plan.placements)
        ),
        "no times": change(
            plan, buckets=tuple(change(bucket, forecast=nothing) for bucket in plan.buckets)
        ),
        "no masks": change(plan, masks=()),
        "no numerics": change(plan, numerics=()),
        "mask beyond the model": change(plan, masks=(SkipMask(1, (SubLayerId(99),)),)),
        "no layers": change(varied_plan(layers=1), model=change(plan.model, layers=0)),
        "no f32 perplexity": change(plan, quality=change(plan.quality, f32_perplexity=0.0)),
        "endless cycle": change(
            plan,
            buckets=tuple(
                change(bucket, forecast=Forecast(1e9, 1.0, 1.0, 1e9, (0.5,) * 50))
                for bucket in plan.buckets
            ),
        ),
        "nasty names": varied_plan(
            layers=4, cuts=(3,), name=NASTY * 9, processor_names=(NASTY, NASTY * 2)
        ),
    }


def shown_plans() -> dict[str, ExecutionPlan]:
    return {
        "sample": sample_plan(),
        "4 layers": varied_plan(layers=4, cuts=(4,)),
        "30 layers": varied_plan(cuts=(20, 44)),
        "80 layers": varied_plan(layers=80),
        "off only": varied_plan(cycles=(OFF,)),
        "alternating": varied_plan(layers=80, cuts=range(160)),
        "one processor": varied_plan(processor_names=("cpu",)),
        **odd_plans(),
    }


@pytest.fixture(params=sorted(shown_plans()))
def plan(request: pytest.FixtureRequest) -> ExecutionPlan:
    return shown_plans()[request.param]


@given(plans())
@settings(max_examples=40, deadline=None)
def test_every_span_of_the_cycle_is_one_node(plan: ExecutionPlan) -> None:
    for figures, graph in zip(bucket_figures(plan), plan_graphs(plan), strict=True):
        nodes = [node for _, node in graph.nodes(data=True) if node["kind"] == NodeKind.SPAN]
        found = sorted((n["pass"], n["first"], n["end"], n["processor"], n["us"]) for n in nodes)
        expected = sorted(
            (placement.kind.value, span.first, span.end, span.processor, span.compute_us)
            for placement in figures.cycle_passes
            for span in placement.spans
        )
        assert found == expected


@given(plans())
@settings(max_examples=40, deadline=None)
def test_rows_flow_from_embedding_to_sampler_and_on_to_commit(plan: ExecutionPlan) -> None:
    for figures, graph in zip(bucket_figures(plan), plan_graphs(plan), strict=True):
        forward = nx.DiGraph(
            (tail, tip)
            for tail, tip, role in graph.edges(data="role")
            if role not in FEEDBACK_ROLES
        )
        assert nx.is_directed_acyclic_graph(forward)
        for placement in figures.cycle_passes:
            name = placement.kind.value
            path = nx.shortest_path(forward, f"{name}.embed", f"{name}.sampler")
            assert len(path) == len(placement.spans) + 3
            if placement.kind is not PassKind.DRAFT:
                assert nx.has_path(forward, f"{name}.sampler", "commit")


@given(plans())
@settings(max_examples=40, deadline=None)
def test_hidden_rows_between_spans_are_width_times_hidden_floats(plan: ExecutionPlan) -> None:
    for figures, graph in zip(bucket_figures(plan), plan_graphs(plan), strict=True):
        for placement in figures.cycle_passes:
            for number, (_, span) in enumerate(itertools.pairwise(placement.spans)):
                name = placement.kind.value
                edge = graph.edges[f"{name}.span{number}", f"{name}.span{number + 1}"]
                assert edge["role"] == EdgeRole.HIDDEN
                assert edge["bytes"] == placement.width * HIDDEN * 4
                assert edge["us"] == span.transfer_us


def test_a_draft_reads_only_the_kv_of_attention_that_it_runs() -> None:
    plan = varied_plan(layers=4, skipped=(2, 3, 4), cycles=(SKIP,))
    graph = bucket_graph(plan, 0)
    per_layer_bytes = plan.kv.bytes_per_token // 4
    context = plan.placements[0].context
    assert graph.edges["kv0", "draft.span0"]["bytes"] == 2 * per_layer_bytes * context
    assert graph.edges["kv0", "verify.span0"]["bytes"] == 4 * per_layer_bytes * context
    assert graph.edges["verify.span0", "kv0"]["bytes"] == 4 * per_layer_bytes * 5
    assert graph.nodes["draft.span0"]["skipped"] == 3
    assert graph.nodes["verify.span0"]["skipped"] == 0


def test_a_cycle_feeds_back_to_its_source() -> None:
    skip, ngram, off = plan_graphs(varied_plan(layers=4))
    assert skip.edges["draft.sampler", "source"]["role"] == EdgeRole.FEEDBACK
    assert skip.has_edge("source", "verify.embed")
    assert ngram.edges["commit", "source"]["role"] == EdgeRole.FEEDBACK
    assert not any(name.startswith("draft.") for name in ngram)
    assert off.edges["commit", "ar.embed"]["role"] == EdgeRole.FEEDBACK
    assert "source" not in off
    assert "accept" not in off


def test_a_class_without_attention_has_no_kv() -> None:
    graph = bucket_graph(varied_plan(layers=2, cuts=(1, 2, 3), cycles=(OFF,)), 0)
    caches = [name for name, kind in graph.nodes(data="kind") if kind == NodeKind.KV]
    assert caches == ["kv0", "kv2"]


def test_the_parts_of_a_cycle_add_up_to_its_forecast() -> None:
    for figures in bucket_figures(varied_plan(cuts=(20,))):
        assert figures.parts_explain_cycle
        assert figures.parts_us == pytest.approx(figures.bucket.forecast.cycle_us)


def test_speed_follows_from_the_forecast() -> None:
    figures = bucket_figures(sample_plan())[1]
    assert figures.tokens_per_s == pytest.approx(2.6e6 / 3900)
    assert figures.ar_tokens_per_s == pytest.approx(1e6 / 1720)
    assert figures.speedup == pytest.approx(2.6 * 1720 / 3900)


def test_views_are_deterministic(plan: ExecutionPlan) -> None:
    for view in (plan_text, plan_dot, plan_svg):
        assert view(plan) == view(plan)


def test_text_fits_the_page(plan: ExecutionPlan) -> None:
    lines = plan_text(plan).splitlines()
    assert max(len(line) for line in lines) <= COLUMNS
    assert all(line == line.rstrip() and line.isprintable() for line in lines)


@given(plans())
@settings(max_examples=40, deadline=None)
def test_text_fits_the_page_for_any_plan(plan: ExecutionPlan) -> None:
    assert max(len(line) for line in plan_text(plan).splitlines()) <= COLUMNS


def test_text_names_model_device_format_memory_and_speed() -> None:
    text = plan_text(varied_plan(cuts=(20,)))
    for words in (
        "SmolLM2-135M-Instruct on oneplus12",
        "SM8650, 6 CPU threads",
        "w8a16; agrees with f32 on 99.1 % of next tokens",
        "243 MB of 2.00 GB: weights 136 MB",
        "skip mask 1, 4 drafted",
        "sub-layers 20-59",
        "handed over in 120 µs",
        "(times predicted)",
        "measured",
    ):
        assert words in text


def test_text_draws_a_mask_by_layer() -> None:
    text = plan_text(varied_plan(layers=4, skipped=(2, 5, 7)))
    assert f"attention {RUNS}{SKIPPED}{RUNS}{RUNS}\n" in text
    assert f"mlp       {RUNS}{RUNS}{SKIPPED}{SKIPPED}\n" in text
    assert "3 of 8 left out (1 attention, 2 MLP)" in text


def test_text_abbreviates_a_long_list_of_spans() -> None:
    text = plan_text(varied_plan(cuts=range(60), cycles=(OFF,)))
    assert "… 54 more" in text
    assert len(text.splitlines()) < 60


def test_data_holds_the_plan_and_derived_numbers(plan: ExecutionPlan) -> None:
    data = json.loads(json.dumps(plan_data(plan), allow_nan=False))
    assert msgspec.convert(data["plan"], ExecutionPlan) == plan
    assert [bucket["index"] for bucket in data["buckets"]] == list(range(len(plan.buckets)))
    for bucket, figures in zip(data["buckets"], bucket_figures(plan), strict=True):
        assert bucket["tokens_per_s"] == figures.tokens_per_s
        ids = {node["id"] for node in bucket["graph"]["nodes"]}
        assert all({edge["from"], edge["to"]} <= ids for edge in bucket["graph"]["edges"])


QUOTED = r'"((?:[^"\\]|\\.)*)"'


def test_dot_is_balanced_and_declares_every_end_of_an_edge(plan: ExecutionPlan) -> None:
    dot = plan_dot(plan)
    bare = re.sub(QUOTED, "", dot)
    assert bare.count("{") == bare.count("}")
    assert bare.count("[") == bare.count("]")
    assert '"' not in bare
    declared = re.findall(rf"^ *{QUOTED} \[", dot, re.MULTILINE)
    assert len(declared) == len(set(declared))
    edges = re.findall(rf"^ *{QUOTED} -> {QUOTED} \[", dot, re.MULTILINE)
    assert {end for edge in edges for end in edge} <= set(declared)
    graphs = plan_graphs(plan)
    assert len(declared) == sum(len(graph) for graph in graphs)
    assert len(edges) == sum(graph.number_of_edges() for graph in graphs)


def test_dot_has_a_cluster_per_bucket_and_processor() -> None:
    dot = plan_dot(varied_plan(cuts=(20,)))
    clusters = re.findall(r"subgraph (\w+)", dot)
    assert len(clusters) == len(set(clusters)) == 3 * (1 + 2)


def picture(plan: ExecutionPlan) -> ElementTree.Element:
    return ElementTree.fromstring(plan_svg(plan))


def with_role(root: ElementTree.Element, role: str) -> list[ElementTree.Element]:
    return [one for one in root.iter(f"{SVG}rect") if role in one.get("class", "").split()]


def text_boxes(root: ElementTree.Element) -> list[tuple[float, float, float, float, str]]:
    """Left, top, right, bottom and content of every text, by the estimate of its width."""
    boxes: list[tuple[float, float, float, float, str]] = []
    for text in root.iter(f"{SVG}text"):
        size = float(text.get("font-size", "0"))
        content = "".join(text.itertext())
        width = text_width(content, size)
        shift = {"middle": 0.5, "end": 1.0}.get(text.get("text-anchor", ""), 0.0)
        left, base = float(text.get("x", "0")) - shift * width, float(text.get("y", "0"))
        boxes.append((left, base - 0.75 * size, left + width, base + 0.2 * size, content))
    return boxes


def test_the_picture_has_a_box_per_span_and_a_cell_per_sub_layer() -> None:
    plan = varied_plan(cuts=(20, 44))
    root = picture(plan)
    drawn = [one for figures in bucket_figures(plan) for one in figures.cycle_passes]
    assert len(with_role(root, "span")) == sum(len(one.spans) for one in drawn) == 4 * 3
    assert len(with_role(root, "cell")) == 4 * 60
    assert len(with_role(root, "skipped")) == len(plan.masks[1].skipped)
    assert len(with_role(root, "kv")) == 3 * 3


@given(plans())
@settings(max_examples=30, deadline=None)
def test_any_picture_is_well_formed_with_a_box_per_span(plan: ExecutionPlan) -> None:
    drawn = [one for figures in bucket_figures(plan) for one in figures.cycle_passes]
    assert len(with_role(picture(plan), "span")) == sum(len(one.spans) for one in drawn)


def test_the_picture_escapes_names() -> None:
    root = picture(varied_plan(name="<&> model", processor_names=("<npu>", "c&pu")))
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert "<&> model on oneplus12" in texts
    assert any(text.startswith("<npu>: attention") for text in texts)


def test_texts_of_the_picture_stay_inside(plan: ExecutionPlan) -> None:
    root = picture(plan)
    _, _, width, height = (float(one) for one in root.get("viewBox", "").split())
    for left, top, right, bottom, content in text_boxes(root):
        assert left >= 0, content
        assert top >= 0, content
        assert right <= width, content
        assert bottom <= height, content


def test_texts_of_the_picture_do_not_overlap(plan: ExecutionPlan) -> None:
    for one, other in itertools.combinations(text_boxes(picture(plan)), 2):
        across = min(one[2], other[2]) - max(one[0], other[0])
        down = min(one[3], other[3]) - max(one[1], other[1])
        assert across <= 0 or down <= 0, (one, other)


def test_the_picture_says_what_is_predicted() -> None:
    svg = plan_svg(sample_plan())
    assert "All times are predictions" in svg
    assert "sample-4l on oneplus12" in svg
    assert "667 tok/s predicted" in svg


def test_the_picture_needs_nothing_from_outside() -> None:
    svg = plan_svg(varied_plan())
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in svg
    assert "<image" not in svg


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (0, "0"),
        (1, "1.00"),
        (99.96, "100"),
        (12345.6, "12300"),
        (0.012345, "0.0123"),
        (-4.5678, "-4.57"),
        (1e-9, "1.00e-09"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_three_digits(value: float, label: str) -> None:
    assert three_digits(value) == label


def test_labels_carry_units() -> None:
    assert [time_label(us) for us in (0, 12.5, 999.9, 1500, 2.5e6, None)] == [
        "0 µs",
        "12.5 µs",
        "1.00 ms",
        "1.50 ms",
        "2.50 s",
        "n/a",
    ]
    assert [bytes_label(count) for count in (0, 999, 1000, 2_500_000, 3 * 10**9)] == [
        "0 B",
        "999 B",
        "1.00 KB",
        "2.50 MB",
        "3.00 GB",
    ]
    assert [counted(count, noun) for count, noun in ((1, "row"), (2, "row"), (2, "pass"))] == [
        "1 row",
        "2 rows",
        "2 passes",
    ]


def test_names_lose_what_terminals_and_xml_trip_over() -> None:
    assert clean(" a\x1b[31m\nb\tc\x00 ") == "a [31m b c"
    assert clean("abcdef", 4) == "abc…"


def test_varied_plans_are_consistent() -> None:
    plan = varied_plan(layers=2, cuts=(2,), cycles=(OFF,), decisions=[decision()])
    spans = plan.placements[0].spans
    assert [span.compute_us for span in spans] == [pytest.approx(2 * 1.02 * SUB_LAYER_US)] * 2
    assert [span.transfer_us for span in spans] == [0.0, TRANSFER_US]
