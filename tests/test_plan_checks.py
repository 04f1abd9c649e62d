"""Plans with trees, a draft model and streamed sub-layers: what does not agree is named."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lever_plans import lever_plan, write_lever_folder

from profiles.errors import FulcrumError, IncompatibleError, InputError
from runtime.plan_document import decode_plan, encode_plan
from runtime.plan_folder import load_plan
from runtime.plan_writer import PlanWriter
from runtime.weight_ranges import split_name

DOCUMENT = encode_plan(lever_plan())
PARENTS, RANKS = "$.trees[0].parents", "$.trees[0].ranks"
STREAMED = "$.residency.streamed"


def changed(*changes: tuple[str, object]) -> bytes:
    """The document with other values at paths such as ``$.masks[0].id``."""
    document: Any = {"$": json.loads(DOCUMENT)}
    for path, value in changes:
        steps: list[Any] = ["$"]
        steps += [name or int(index) for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path)]
        node = document
        for step in steps[:-1]:
            node = node[step]
        node[steps[-1]] = value
    return json.dumps(document["$"]).encode()


def test_a_plan_with_everything_comes_back_as_it_was_written(tmp_path: Path) -> None:
    plan = write_lever_folder(tmp_path / "x.plan")
    assert load_plan(tmp_path / "x.plan") == (tmp_path / "x.plan", plan)
    assert decode_plan(changed(), "plan.json") == plan


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        # Residency
        (STREAMED, [], STREAMED),
        (STREAMED, [1, 2, 8], f"{STREAMED}[2]"),
        (STREAMED, [2, 1], f"{STREAMED}[1]"),
        (STREAMED, [1, 1], f"{STREAMED}[1]"),
        (STREAMED, [1, 7], "$.graphs"),
        (STREAMED, [2, 4], "$.graphs"),
        ("$.residency", None, "$.tables.streams"),
        ("$.residency.slots", 0, "$.residency.slots"),
        ("$.residency.slots", 9, "$.residency.slots"),
        ("$.residency.read_bytes", 0, "$.residency.read_bytes"),
        ("$.residency.read_bytes", 5000, "$.residency.read_bytes"),
        ("$.residency.read_bytes", 1 << 30, "$.residency.read_bytes"),
        ("$.target_format", "w4", STREAMED),
        ("$.target_format", "f32", STREAMED),
        ("$.formats", {"attention": "w8a8", "mlp": "w4", "head": "w4"}, STREAMED),
        ("$.tensors[3].name", "layers.9.gate_up", f"{STREAMED}[3]"),
        ("$.tensors[2].name", "layers.0.up", f"{STREAMED}[3]"),
        ("$.tensors[11].name", "layers.1.surprise", f"{STREAMED}[1]"),
        ("$.tensors[3].shape", [8, 32], f"{STREAMED}[3]"),
        ("$.numerics[0].attention", "fused", "$.numerics[1].attention"),
        # Tables of streams
        ("$.tables.streams", [], "$.tables.streams"),
        ("$.tables.streams[1].widths", [], "$.tables.streams[1].widths"),
        ("$.tables.streams[1].widths", [1, 8, 8], "$.tables.streams[1].widths[2]"),
        ("$.tables.streams[2].widths", [1, 8], "$.tables.streams[2].us"),
        ("$.tables.streams[0].ahead_us", [], "$.tables.streams[0].ahead_us"),
        ("$.tables.streams[0].ahead_us", [1.0, 2.0], "$.tables.streams[0].ahead_us[0]"),
        ("$.tables.streams[0].ahead_us", [0.0, 0.0], "$.tables.streams[0].ahead_us[1]"),
        ("$.tables.streams[0].us[1]", [1.0], "$.tables.streams[0].us[1]"),
        # Trees
        (PARENTS, [], f"{PARENTS}, its length"),
        (RANKS, [0, 1, 0, 1], RANKS),
        (PARENTS, [1, 0, 1, 1, 3], f"{PARENTS}[0]"),
        (PARENTS, [0, 0, 1, 1, 5], f"{PARENTS}[4]"),
        (RANKS, [0, 0, 0, 1, 0], RANKS),
        (RANKS, [0, 2, 0, 1, 0], RANKS),
        (RANKS, [1, 2, 0, 1, 0], RANKS),
        (PARENTS, list(range(1024)), f"{PARENTS}, its length"),
        # Growths
        ("$.growths[0].max_nodes", 0, "$.growths[0].max_nodes"),
        ("$.growths[0].max_nodes", 1024, "$.growths[0].max_nodes"),
        ("$.growths[0].max_depth", 25, "$.growths[0].max_depth"),
        ("$.growths[0].branch", 0, "$.growths[0].branch"),
        ("$.growths[0].branch", 1000, "$.growths[0].branch"),
        ("$.growths[0].batch", 0, "$.growths[0].batch"),
        ("$.growths[0].bands", [], "$.growths[0].bands"),
        ("$.growths[0].bands", [0.1, 0.3, 0.8], "$.growths[0].bands[0]"),
        ("$.growths[0].bands", [0.0, 0.8, 0.8], "$.growths[0].bands[2]"),
        ("$.growths[0].hits", [], "$.growths[0].hits"),
        ("$.growths[0].hits[1]", [0.1, 0.2], "$.growths[0].hits[1]"),
        # Cycles
        ("$.buckets[0].cycle.tree", 1, "$.buckets[0].cycle.tree"),
        ("$.buckets[1].cycle.tree", 1, "$.buckets[1].cycle.tree"),
        ("$.buckets[2].cycle.tree", 1, "$.buckets[2].cycle.tree"),
        ("$.buckets[0].cycle.length", 23, "$.buckets[0].cycle.length"),
        ("$.buckets[1].cycle.length", 6, "$.buckets[1].cycle.length"),
        ("$.trees", [], "$.buckets[1].cycle.tree"),
        ("$.growths", [], "$.buckets[0].cycle.tree"),
        ("$.draft", None, "$.buckets[0].cycle.draft"),
        ("$.buckets[1].cycle.head", "both", "$.buckets[1].cycle.head"),
        # The draft model
        ("$.draft.model.heads", 0, "$.draft.model.heads"),
        ("$.draft.model.vocab", 31, "$.draft.tensors, 'embed'"),
        ("$.draft.model.vocab", 33, "$.draft.tensors, 'embed'"),
        ("$.draft.model.tokenizer.eos_ids", [32], "$.draft.model.tokenizer.eos_ids[0]"),
        ("$.draft.tensors[0].name", "other", "$.draft.tensors, 'embed'"),
        ("$.draft.tensors[0].offset_bytes", 1, "$.draft.tensors[0].offset_bytes"),
        ("$.draft.tensors[0].offset_bytes", 4096, "$.draft.tensors[0]"),
        ("$.draft.graphs[1].tensors", ["gone"], "$.draft.graphs[1].tensors[0]"),
        ("$.draft.graphs[1].kind", "mlp", "$.draft.graphs"),
        ("$.draft.graphs[1].artefact.path", "draft.onnx", "$.draft.graphs[1].artefact.path"),
        ("$.draft.graphs[1].artefact.path", "draft/a/b.onnx", "$.draft.graphs[1].artefact.path"),
        ("$.draft.graphs[1].artefact.path", "draft/../x", "$.draft.graphs[1].artefact.path"),
        ("$.draft.graphs[1].artefact.path", "draft/layers.onnx", "$"),
        ("$.draft.weights.path", "weights.bin", "$.draft.weights.path"),
    ],
)
def test_what_does_not_agree_is_named_by_path(path: str, value: object, where: str) -> None:
    with pytest.raises(InputError) as caught:
        decode_plan(changed((path, value)), "plan.json")
    assert caught.value.where == f"plan.json: {where}"
    assert "plan compile" in str(caught.value)


@pytest.mark.parametrize("shape", ["static", "online"])
def test_trees_need_exact_attention(shape: str) -> None:
    fused = [(f"$.numerics[{i}].attention", "fused") for i in (0, 1)]
    kept = [("$.buckets[0].cycle.shape", shape), ("$.buckets[0].cycle.length", 24)]
    kept += [(f"$.growths[0].{name}", 5) for name in ("max_nodes", "max_depth", "batch")]
    kept[1] = "$.buckets[0].cycle.length", 5
    with pytest.raises(InputError, match="attention kernel") as caught:
        decode_plan(changed(*fused, *kept), "plan.json")
    assert caught.value.where == "plan.json: $.buckets[0].cycle.shape"


def test_streaming_needs_exact_attention() -> None:
    fused = [(f"$.numerics[{i}].attention", "fused") for i in (0, 1)]
    chains = [(f"$.buckets[{i}].cycle.shape", "chain") for i in (0, 1)]
    with pytest.raises(InputError, match="streaming needs another kernel"):
        decode_plan(changed(*fused, *chains), "plan.json")


def test_a_last_block_that_is_cut_off_is_named() -> None:
    last = json.loads(DOCUMENT)["tensors"][-2]
    end = last["offset_bytes"] + 16 * 8
    tensors = json.loads(DOCUMENT)["tensors"][:-1]
    graph = [("$.graphs[1].tensors", []), ("$.tensors", tensors), ("$.weights.bytes", end)]
    with pytest.raises(InputError, match="cut off"):
        decode_plan(changed(*graph), "plan.json")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("layers.3.qkv.scale", (6, "qkv.scale")),
        ("layers.0.down", (1, "down")),
        ("layers.12.mlp_norm", (25, "mlp_norm")),
        ("layers.1.gate_up.scale", (3, "gate_up.scale")),
        ("layers.1.value_ungrid", (2, "value_ungrid")),
        ("layers.1", None),
        ("layers.x.qkv", None),
        ("layers.-1.qkv", None),
        ("layers.².qkv", None),
        ("head.scale", None),
        ("rope.cos", None),
    ],
)
def test_a_tensor_names_its_sub_layer(name: str, found: object) -> None:
    assert split_name(name) == found


@settings(max_examples=150, deadline=None)
@given(
    path=st.sampled_from(
        [
            *("$.residency", "$.residency.streamed", "$.residency.slots", "$.draft", "$.trees"),
            *("$.trees[0]", PARENTS, RANKS, "$.growths", "$.growths[0].bands", "$.draft.graphs"),
            *("$.growths[0].hits", "$.tables.streams", "$.buckets[0].cycle", "$.draft.tensors"),
            *("$.tensors[3].offset_bytes", "$.tensors[3].shape", "$.draft.model", "$.numerics"),
        ]
    ),
    value=st.recursive(
        st.none() | st.integers(-1, 2**49) | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=5),
        max_leaves=12,
    ),
)
def test_any_value_gives_a_plan_or_a_clear_error(path: str, value: object) -> None:
    refusal: FulcrumError | None = None
    try:
        decode_plan(changed((path, value)), "plan.json")
    except FulcrumError as error:
        refusal = error
    assert refusal is None or refusal.exit_code in (2, 3)


@pytest.mark.parametrize("name", ["draft/layers.onnx", "draft/head.onnx", "draft/weights.bin"])
def test_files_of_the_draft_are_checked_like_all_others(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "x.plan"
    write_lever_folder(folder)
    data = bytearray((folder / name).read_bytes())
    data[7] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(IncompatibleError, match="not the file"):
        load_plan(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match="missing"):
        load_plan(folder)


def test_a_draft_folder_holds_what_drafts_have_and_is_replaced_with_the_plan(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "x.plan"
    write_lever_folder(folder)
    with PlanWriter(tmp_path / "y.plan") as writer:
        for bad in ("draft", "draft/x", "draft/attention.onnx", "draft/a/head.onnx"):
            with pytest.raises(FulcrumError, match="not a place"):
                writer.path(bad)
    write_lever_folder(folder)
    (folder / "draft" / "letters.txt").write_text("mine")
    with pytest.raises(InputError, match=r"draft/letters\.txt"):
        write_lever_folder(folder)
    shutil.rmtree(folder / "draft")
    write_lever_folder(folder)
    load_plan(folder)
