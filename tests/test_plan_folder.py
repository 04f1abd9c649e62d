"""Reading plan folders: what comes back, and what a broken folder is answered with."""

import contextlib
import copy
import json
import os
import re
import shutil
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_plans import (
    HEAD_GRAPH,
    LAYERS_GRAPH,
    sample_plan,
    sample_tensors,
    write_document,
    write_sample_folder,
)

from profiles.errors import FulcrumError, IncompatibleError, InputError
from runtime import plan_folder
from runtime.plan import FORMAT_MAJOR, Artefact, ExecutionPlan
from runtime.plan_document import decode_plan, encode_plan
from runtime.plan_folder import check_artefact, load_plan, map_tensors, read_plan

ROOT = Path(__file__).parents[1]
CHANGED = "plan.json or its seal plan.sha256 was changed after the plan was compiled"
DOCUMENT = encode_plan(sample_plan())
SEALED = ("plan.json", "plan.sha256")
ARTEFACTS = (LAYERS_GRAPH, HEAD_GRAPH, "tokenizer.json", "weights.bin")


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans") / "sample.plan"
    write_sample_folder(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A plan folder that a test may break."""
    return Path(shutil.copytree(pristine, tmp_path / "sample.plan"))


def changed(path: str, value: object) -> bytes:
    """The sample's document with another value at ``path``, such as ``$.masks[0].id``."""
    document: Any = {"$": json.loads(DOCUMENT)}
    steps: list[Any] = ["$"]
    steps += [name or int(index) for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path)]
    node = document
    for step in steps[:-1]:
        node = node[step]
    node[steps[-1]] = value
    return json.dumps(document["$"]).encode()


def refusal(data: bytes, kind: type[FulcrumError] = InputError) -> FulcrumError:
    """The error that a document is answered with, checked for what every error must say."""
    tracemalloc.start()
    with pytest.raises(FulcrumError) as caught:
        decode_plan(data, "plan.json")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    error = caught.value
    assert type(error) is kind
    assert error.exit_code in (2, 3)
    assert str(error.where).startswith("plan.json")
    assert error.hint
    assert "\n" not in str(error)
    assert len(str(error)) < 500
    assert peak_bytes < 8 * len(data) + 2**20
    return error


def place(error: FulcrumError) -> str:
    return str(error.where).removeprefix("plan.json: ")


def test_a_plan_comes_back_as_it_was_written(folder: Path) -> None:
    assert read_plan(folder) == sample_plan()
    assert load_plan(str(folder)) == (folder, sample_plan())


def test_tensors_come_back_as_read_only_views_of_one_mapping(folder: Path) -> None:
    plan = read_plan(folder)
    tensors = map_tensors(folder, plan.weights, plan.tensors)
    assert list(tensors) == list(sample_tensors())
    for name, expected in sample_tensors().items():
        assert tensors[name].dtype == expected.dtype
        np.testing.assert_array_equal(tensors[name], expected)
    assert not any(tensor.flags.writeable for tensor in tensors.values())
    assert len({id(mapping(tensor)) for tensor in tensors.values()}) == 1


def mapping(array: Any) -> object:
    while isinstance(array, np.ndarray):
        array = array.base
    return array


def test_a_plan_without_tensors_maps_none(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"")
    assert map_tensors(folder, Artefact("weights.bin", 0, "0" * 64), ()) == {}


def test_a_newer_minor_version_is_read_and_its_new_fields_are_ignored() -> None:
    document = json.loads(changed("$.format", f"{FORMAT_MAJOR}.99"))
    document["model"]["new"] = [1, {"a": None}]
    plan = decode_plan(json.dumps(document).encode(), "plan.json")
    assert msgspec.structs.replace(plan, format=sample_plan().format) == sample_plan()


def test_a_plan_of_the_first_minor_version_lacks_what_came_later_and_is_read() -> None:
    document = json.loads(changed("$.format", f"{FORMAT_MAJOR}.0"))
    del document["model"]["qkv_bias"], document["model"]["qk_norm"]
    del document["model"]["rope"]["factors"]
    model = decode_plan(json.dumps(document).encode(), "plan.json").model
    assert (model.qkv_bias, model.qk_norm, model.rope.factors) == (False, False, ())


def test_what_a_newer_minor_version_has_beyond_this_one_is_answered_with_update() -> None:
    document = json.loads(changed("$.buckets[0].cycle.draft", "medusa"))
    document["format"] = f"{FORMAT_MAJOR}.99"
    assert "update Fulcrum" in str(refusal(json.dumps(document).encode()))
    document["format"] = f"{FORMAT_MAJOR}.0"
    assert "update" not in str(refusal(json.dumps(document).encode()))


@pytest.mark.parametrize(
    ("version", "hint"), [(f"{FORMAT_MAJOR + 1}.0", "update Fulcrum"), ("0.9", "plan compile")]
)
def test_another_major_version_is_named_before_anything_else(version: str, hint: str) -> None:
    data = json.dumps({"format": version, "model": "of another shape"}).encode()
    error = refusal(data, IncompatibleError)
    assert error.exit_code == 3
    assert (place(error), error.found) == ("$.format", version)
    assert f"{FORMAT_MAJOR}.x" in str(error)
    assert hint in str(error)


@pytest.mark.parametrize(
    "version", [None, 1, 1.0, "", "1", "1.0\n", "v1.0", "1.x", "9" * 99, [], {}]
)
def test_a_version_that_is_none_makes_it_no_plan(version: object) -> None:
    assert place(refusal(changed("$.format", version))) == "$.format"


NOT_DOCUMENTS = {
    "empty": b"",
    "null": b"null",
    "array": b"[]",
    "string": b'"plan"',
    "text": b"hello",
    "byte-order-mark": b"\xef\xbb\xbf" + DOCUMENT,
    "utf-16": DOCUMENT.decode().encode("utf-16"),
    "latin-1": changed("$.model.name", "X").replace(b'"X"', b'"\xe9"'),
    "not-utf-8-in-an-ignored-field": DOCUMENT.replace(b"{", b'{"new": "\xff",', 1),
    "lone-surrogate": changed("$.model.name", "X").replace(b'"X"', rb'"\ud800"'),
    "nul-bytes": bytes(1000),
    "two-documents": DOCUMENT + DOCUMENT,
    "no-fields": b"{}",
    "version-only": b'{"format": "1.0"}',
    "nan": changed("$.buckets[0].forecast.cycle_us", float("nan")),
    "infinity": changed("$.decisions[0].value", float("-inf")),
    "nan-in-an-ignored-field": changed("$.new", float("nan")),
    "number-beyond-float": DOCUMENT.replace(b"2100.0", b"1e999", 1),
    "integer-of-10000-digits": DOCUMENT.replace(b"2048", b"1" * 10_000, 1),
    "float-of-10000-digits": DOCUMENT.replace(b"2100.0", b"1" * 10_000, 1),
    "deep-array": b'{"format": "1.0", "model": ' + b"[" * 1_000_000,
    "deep-object-in-an-ignored-field": b'{"format": "1.0", "new": ' + b'{"a":' * 200_000,
    "deep-version": b'{"format": ' + b"[" * 1_000_000,
}


@pytest.mark.parametrize("name", NOT_DOCUMENTS)
def test_what_is_no_plan_document_is_an_input_error(name: str) -> None:
    assert refusal(NOT_DOCUMENTS[name]).exit_code == 2


def test_a_document_cut_off_anywhere_is_an_input_error() -> None:
    for length in range(0, len(DOCUMENT) - 1, 53):
        refusal(DOCUMENT[:length])


def test_a_flipped_bit_in_the_document_is_read_or_refused_but_never_fails_otherwise() -> None:
    for position in range(0, len(DOCUMENT), 7):
        for bit in range(8):
            data = bytearray(DOCUMENT)
            data[position] ^= 1 << bit
            with contextlib.suppress(InputError, IncompatibleError):
                decode_plan(bytes(data), "plan.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("$.model", None),
        ("$.model.layers", "4"),
        ("$.model.layers", 4.0),
        ("$.model.layers", True),
        ("$.model.tokenizer.eos_ids[0]", None),
        ("$.target_format", "w2"),
        ("$.weights.sha256", "ABC"),
        ("$.weights.bytes", -1),
        ("$.weights.bytes", 2**48 + 1),
        ("$.tensors[3].shape[1]", -8),
        ("$.tensors[3].shape[1]", 2**62),
        ("$.tensors[3].type", "f64"),
        ("$.buckets[1].cycle.draft", ["skip"]),
        ("$.buckets[1].forecast.acceptance[0]", 1.5),
        ("$.placements[0].width", 0),
        ("$.tables.passes[0].us[0][1]", -1.0),
        ("$.tables.passes[0].us[0]", {}),
        ("$.decisions[0].candidates[1].value", "fast"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_by_its_path(path: str, value: object) -> None:
    assert place(refusal(changed(path, value))) == path


def test_an_error_shows_path_found_expected_and_next_step() -> None:
    assert str(refusal(changed("$.graphs[1].artefact.bytes", -7))) == (
        "plan.json: $.graphs[1].artefact.bytes: wrong value (found -7, expected `int` >= 0);"
        " make the plan again with `plan compile`"
    )
    assert str(refusal(changed("$.buckets[1].cycle.mask", 2))) == (
        "plan.json: $.buckets[1].cycle.mask: number out of range (found 2, expected 0 to 1);"
        " make the plan again with `plan compile`"
    )


INCONSISTENT: list[tuple[str, object, str]] = [
    ("$.model.layers", 0, ""),
    ("$.model.layers", 1025, ""),
    ("$.model.layers", 10**18, ""),
    ("$.model.layers", 5, "$.numerics"),
    ("$.model.hidden", 65537, ""),
    ("$.model.intermediate", -1, ""),
    ("$.model.heads", 0, ""),
    ("$.model.kv_heads", 0, ""),
    ("$.model.kv_heads", 3, ""),
    ("$.model.head_dim", 5, ""),
    ("$.model.vocab", 2**22, ""),
    ("$.model.max_context", 2**40, ""),
    ("$.model.norm_eps", 0.0, ""),
    ("$.model.rope.theta", -1.0, ""),
    ("$.model.rope.factors", [1.0], ""),
    ("$.model.rope.factors", [0.0, 1.0], "$.model.rope.factors[0]"),
    ("$.model.tokenizer.eos_ids[1]", 32, ""),
    ("$.model.tokenizer.eos_ids[0]", -1, ""),
    ("$.model.tokenizer.bos_id", 10**9, ""),
    ("$.model.tokenizer.bos_id", None, "$.model.tokenizer.add_bos"),
    ("$.context", 0, ""),
    ("$.context", 4096, ""),
    ("$.numerics", [], ""),
    ("$.numerics[0].first", 1, ""),
    ("$.numerics[0].first", -1, ""),
    ("$.numerics[1].first", 5, ""),
    ("$.numerics[0].end", 0, ""),
    ("$.numerics[1].end", 9, "$.numerics"),
    ("$.masks", [], ""),
    ("$.masks[0].skipped", [3], "$.masks"),
    ("$.masks[1].id", 0, ""),
    ("$.masks[1].skipped[2]", 8, ""),
    ("$.masks[1].skipped[0]", -1, ""),
    ("$.masks[1].skipped[1]", 2, ""),
    ("$.buckets", [], ""),
    ("$.buckets[0].context_from", 1, ""),
    ("$.buckets[1].context_from", 255, ""),
    ("$.buckets[1].context_to", 256, ""),
    ("$.buckets[2].context_to", 2047, "$.buckets"),
    ("$.buckets[0].cycle.length", 0, ""),
    ("$.buckets[0].cycle.length", 1024, ""),
    ("$.buckets[0].cycle.ngram_min", 0, ""),
    ("$.buckets[0].cycle.ngram_min", 4, ""),
    ("$.buckets[0].cycle.ngram_max", 65, ""),
    ("$.buckets[1].cycle.mask", 2, ""),
    ("$.buckets[2].cycle.length", 1, ""),
    ("$.buckets[1].forecast.tokens_per_cycle", -1.0, ""),
    ("$.placements[2].bucket", 3, ""),
    ("$.placements[2].spans", [], ""),
    ("$.placements[0].spans[0].first", 2, ""),
    ("$.placements[0].spans[1].first", 7, ""),
    ("$.placements[0].spans[1].end", 7, "$.placements[0].spans"),
    ("$.placements[0].spans[1].end", 10**9, "$.placements[0].spans"),
    ("$.tables.passes[1].mask", 5, ""),
    ("$.tables.passes[2].widths", [], ""),
    ("$.tables.passes[2].widths[1]", 1, ""),
    ("$.tables.passes[2].contexts[3]", 1024, ""),
    ("$.tables.passes[2].us", [], ""),
    ("$.tables.passes[2].us[4]", [1.0], ""),
    ("$.tables.passes[0].kind", "verify", "$.tables.passes"),
    ("$.tables.head_widths", [], ""),
    ("$.tables.head_widths[1]", 9, "$.tables.head_widths[2]"),
    ("$.tables.head_us", [1.0], ""),
    ("$.weights.path", "weights.bin.old", ""),
    ("$.tokenizer.path", "npu/tokenizer.json", ""),
    ("$.graphs[1].artefact.path", "layers.onnx", "$"),
    ("$.graphs[1].artefact.path", "plan.json", "$"),
    ("$.graphs[1].artefact.path", "plan.sha256", "$"),
    ("$.graphs[1].tensors[1]", "embedding", ""),
    ("$.graphs[1].kind", "layers", "$.graphs"),
    ("$.graphs", [], ""),
    ("$.tensors[1].name", "embed", "$.tensors"),
    ("$.tensors[1].offset_bytes", 4097, ""),
    ("$.tensors[1].offset_bytes", 0, "$.tensors"),
    ("$.tensors[1].offset_bytes", 2**47, "$.tensors[1]"),
    ("$.tensors[1].shape", [0, 8], ""),
    ("$.tensors[1].shape", [1] * 9, ""),
    ("$.tensors[1].shape", [1, 4097], "$.tensors"),
    ("$.tensors[1].shape", [2**32, 2**32], "$.tensors[1]"),
    ("$.tensors[1].shape", [2**48] * 8, "$.tensors[1]"),
    ("$.tensors[1].shape", [2**31, 2**31, 4], "$.tensors[1]"),
    ("$.weights.bytes", 0, "$.tensors[0]"),
]


@pytest.mark.parametrize(
    ("path", "value", "where"),
    INCONSISTENT,
    ids=[f"{path}={json.dumps(value)}"[:60] for path, value, _ in INCONSISTENT],
)
def test_numbers_that_do_not_agree_are_named_by_path(path: str, value: object, where: str) -> None:
    assert place(refusal(changed(path, value))) == (where or path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "../weights.bin",
        "npu/../../weights.bin",
        "npu/./head.onnx",
        "npu//head.onnx",
        "npu/",
        "/etc/passwd",
        "//host/share",
        "npu\\head.onnx",
        "..\\head.onnx",
        "C:/head.onnx",
        "C:head.onnx",
        "~/head.onnx",
        ".hidden",
        "npu/head.onnx\n",
        "npu/head\u0000.onnx",
        "npu/h\u00e9ad.onnx",
        "a/" * 200 + "b",
    ],
)
def test_a_path_that_could_leave_the_folder_is_refused(path: str) -> None:
    error = refusal(changed("$.graphs[1].artefact.path", path))
    assert place(error) == "$.graphs[1].artefact.path"


def test_a_document_above_the_size_limit_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("runtime.plan_folder", "runtime.plan_document"):
        monkeypatch.setattr(f"{module}.MAX_DOCUMENT_BYTES", len(DOCUMENT))
    assert read_plan(folder) == sample_plan()
    write_document(folder, DOCUMENT + b" ")
    with pytest.raises(InputError, match="too large"):
        read_plan(folder)


def nodes(node: object, steps: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, dict | list):
        for step in node if isinstance(node, dict) else range(len(node)):
            yield (*steps, step)
            yield from nodes(node[step], (*steps, step))


PLACES = sorted(nodes(json.loads(DOCUMENT)), key=repr)
NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-2, 9) | st.sampled_from([2**31, 2**48, 4096])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=500)
@given(edits=st.lists(st.tuples(st.sampled_from(PLACES), st.none() | VALUES), max_size=3))
def test_any_change_gives_a_plan_that_survives_a_round_trip_or_a_clear_error(
    edits: list[tuple[tuple[Any, ...], object]],
) -> None:
    document = json.loads(DOCUMENT)
    for steps, value in edits:
        node: Any = document
        with contextlib.suppress(LookupError, TypeError):
            for step in steps[:-1]:
                node = node[step]
            node[steps[-1]] = copy.deepcopy(value)
    with contextlib.suppress(InputError, IncompatibleError):
        plan = decode_plan(json.dumps(document).encode(), "plan.json")
        assert decode_plan(encode_plan(plan), "plan.json") == plan


@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_an_input_error(data: bytes) -> None:
    with pytest.raises(InputError):
        decode_plan(data, "plan.json")


def test_a_place_without_a_plan_says_what_is_there(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, what in [
        (folder / "plan.json", "a file"),
        (tmp_path / "empty", "no plan.json"),
        (tmp_path / "simple.plan", "did you mean 'sample.plan'?"),
        (tmp_path / "absent" / "x.plan", "plan compile"),
        (tmp_path / "nul\0", "no such plan"),
        (tmp_path / ("x" * 300), "no such plan"),
        (tmp_path / ("x" * 300) / "y.plan", "no such plan"),
        (tmp_path / "nul\0" / "y.plan", "no such plan"),
    ]:
        with pytest.raises(InputError, match=re.escape(what)) as caught:
            read_plan(path)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("relative", ["plan.sha256", *ARTEFACTS])
def test_a_missing_file_is_an_input_error_that_names_it(folder: Path, relative: str) -> None:
    (folder / relative).unlink()
    with pytest.raises(InputError, match=f"{relative}: a file of the plan is missing"):
        read_plan(folder)


@pytest.mark.parametrize("relative", ARTEFACTS)
def test_a_file_of_another_length_is_incompatible(folder: Path, relative: str) -> None:
    data = (folder / relative).read_bytes()
    for other in (b"", data[:-1], data + b"\0"):
        (folder / relative).write_bytes(other)
        with pytest.raises(IncompatibleError, match=f"{relative}: .*found {len(other)} bytes"):
            read_plan(folder)
    with pytest.raises(IncompatibleError):
        check_artefact(folder, artefact_of(sample_plan(), relative))


def artefact_of(plan: ExecutionPlan, relative: str) -> Artefact:
    entries = [*(graph.artefact for graph in plan.graphs), plan.weights, plan.tokenizer]
    return next(entry for entry in entries if entry.path == relative)


@pytest.mark.parametrize("relative", ARTEFACTS)
def test_a_flipped_bit_in_a_file_is_incompatible_unless_digests_are_skipped(
    folder: Path, relative: str
) -> None:
    data = (folder / relative).read_bytes()
    for position in range(0, len(data), max(1, len(data) // 5)):
        broken = bytearray(data)
        broken[position] ^= 1 << position % 8
        (folder / relative).write_bytes(broken)
        with pytest.raises(IncompatibleError, match=f"{relative}: not the file") as caught:
            load_plan(folder)
        assert caught.value.exit_code == 3
        assert load_plan(folder, verify_digests=False)[1] == sample_plan()


def test_a_changed_byte_in_the_document_is_noticed_wherever_it_is(folder: Path) -> None:
    codes: set[int] = set()
    for position in range(0, len(DOCUMENT), 11):
        broken = bytearray(DOCUMENT)
        broken[position] ^= 1 << position % 8
        (folder / "plan.json").write_bytes(broken)
        with pytest.raises(FulcrumError) as caught:
            read_plan(folder)
        codes.add(caught.value.exit_code)
    assert codes == {2, 3}


def test_a_changed_byte_in_the_seal_is_noticed(folder: Path) -> None:
    seal = (folder / "plan.sha256").read_bytes()
    for position in range(len(seal)):
        for bit in range(8):
            broken = bytearray(seal)
            broken[position] ^= 1 << bit
            (folder / "plan.sha256").write_bytes(broken)
            words = f"plan.sha256: the seal of plan.json is damaged|{CHANGED}"
            with pytest.raises(IncompatibleError, match=words):
                read_plan(folder)
    for other in (b"", seal[:-1], seal + b"\n", seal * 1000):
        (folder / "plan.sha256").write_bytes(other)
        with pytest.raises(IncompatibleError):
            read_plan(folder)


def test_a_seal_that_is_none_is_blamed_itself(folder: Path) -> None:
    (folder / "plan.sha256").write_bytes(b"\x00garbage")
    with pytest.raises(IncompatibleError) as caught:
        read_plan(folder)
    assert caught.value.where == folder / "plan.sha256"
    assert "the seal of plan.json is damaged" in str(caught.value)


def test_an_edited_document_is_refused_until_it_is_sealed(folder: Path) -> None:
    edited = changed("$.hysteresis_tokens", 7)
    (folder / "plan.json").write_bytes(edited)
    with pytest.raises(IncompatibleError) as caught:
        read_plan(folder)
    assert caught.value.exit_code == 3
    assert caught.value.where == folder / "plan.json"
    assert CHANGED in str(caught.value)
    assert "plan compile" in str(caught.value)
    assert "`sha256sum plan.json > plan.sha256`" in str(caught.value)
    write_document(folder, edited)
    assert load_plan(folder)[1].hysteresis_tokens == 7


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum on this machine")
def test_the_seal_is_what_sha256sum_writes_and_checks(folder: Path) -> None:
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "plan.sha256"], cwd=folder, check=True
    )
    written = subprocess.run(
        ["sha256sum", "plan.json"], cwd=folder, check=True, capture_output=True
    )
    assert written.stdout == (folder / "plan.sha256").read_bytes()


def test_a_malformed_document_is_named_before_its_broken_seal(folder: Path) -> None:
    (folder / "plan.json").write_bytes(changed("$.masks[1].id", 5))
    with pytest.raises(InputError, match=r"\$\.masks\[1\]\.id"):
        read_plan(folder)


def test_mapping_weights_that_shrank_since_is_incompatible(folder: Path) -> None:
    plan = read_plan(folder)
    os.truncate(folder / "weights.bin", 4096)
    with pytest.raises(IncompatibleError, match="another length"):
        map_tensors(folder, plan.weights, plan.tensors)


@pytest.mark.parametrize("relative", [*SEALED, *ARTEFACTS])
def test_a_link_that_leads_out_of_the_folder_is_refused(
    folder: Path, tmp_path: Path, relative: str
) -> None:
    outside = (folder / relative).rename(tmp_path / "outside")
    (folder / relative).symlink_to(outside)
    with pytest.raises(InputError, match="lies outside"):
        read_plan(folder)


def test_a_folder_inside_that_links_out_is_refused(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (folder / HEAD_GRAPH).rename(outside / HEAD_GRAPH)
    (folder / "npu").symlink_to(outside)
    write_document(folder, changed("$.graphs[1].artefact.path", "npu/head.onnx"))
    with pytest.raises(InputError, match="lies outside"):
        read_plan(folder)


def test_a_link_inside_the_folder_and_one_to_the_folder_are_followed(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "npu").mkdir()
    (folder / HEAD_GRAPH).rename(folder / "npu" / HEAD_GRAPH)
    (folder / HEAD_GRAPH).symlink_to("npu/head.onnx")
    (tmp_path / "link.plan").symlink_to(folder)
    assert load_plan(tmp_path / "link.plan")[1] == sample_plan()


@pytest.mark.parametrize("relative", [*SEALED, HEAD_GRAPH])
@pytest.mark.parametrize("what", ["folder", "pipe", "loop", "dangling"])
def test_what_is_not_a_regular_file_is_refused_without_waiting(
    folder: Path, relative: str, what: str
) -> None:
    file = folder / relative
    file.unlink()
    match what:
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "loop":
            file.symlink_to(file.name)
        case _:
            file.symlink_to("absent")
    with pytest.raises(InputError):
        read_plan(folder)


def test_an_unreadable_file_is_an_input_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    plan = read_plan(folder)
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(plan_folder.np, "memmap", refuse)
    with pytest.raises(InputError, match="Permission denied"):
        read_plan(folder)
    with pytest.raises(InputError, match="Permission denied"):
        check_artefact(folder, plan.weights)
    with pytest.raises(InputError, match="Permission denied"):
        map_tensors(folder, plan.weights, plan.tensors)


def test_the_format_document_names_every_field_of_the_schema() -> None:
    text = (ROOT / "docs" / "plan-format.md").read_text(encoding="utf-8")
    assert [name for name in sorted(field_names(ExecutionPlan)) if f"`{name}`" not in text] == []


def field_names(kind: Any) -> set[str]:
    names: set[str] = set()
    pending = [msgspec.inspect.type_info(kind)]
    while pending:
        info = pending.pop()
        if isinstance(info, msgspec.inspect.StructType):
            names |= {field.name for field in info.fields}
            pending += [field.type for field in info.fields]
        elif isinstance(info, msgspec.inspect.VarTupleType):
            pending.append(info.item_type)
        elif isinstance(info, msgspec.inspect.UnionType):
            pending += info.types
    return names
