"""Fuzzers, one for each reader: whatever the bytes, a value or a clear error.

A few examples in a normal run. ``make fuzz`` runs each for ten minutes; FUZZ_S sets the seconds.
"""

import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from broken_files import replace
from broken_plans import RECIPE, seal, seal_text
from broken_runner import read_model, read_plan
from compiled_models import compile_recipe
from gguf import GGMLQuantizationType
from hostile_templates import HARMLESS
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny_models import CHAT_TEMPLATE, TinyShape, write_gguf, write_hf_folder

from planner.prompt_file import load_prompts
from profiles.errors import FulcrumError
from profiles.profile import load_profile, save_profile
from runtime import chat_template, template_limits
from runtime.plan_document import decode_plan
from runtime.sampling import Sampling

SECONDS = float(os.environ.get("FUZZ_S", "0"))
SHAPE = TinyShape(layers=1, hidden=32, intermediate=32, heads=2, kv_heads=1, head_dim=16)
SLOWEST_S = 10.0


def fuzzed(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """How many examples a round has; with FUZZ_S no round has the examples of another."""
    return settings(
        max_examples=10 * examples if SECONDS else examples,
        deadline=None,
        database=None,
        derandomize=not SECONDS,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )


@pytest.fixture(autouse=True)
def _no_lasting_failure(request: pytest.FixtureRequest) -> None:
    if SECONDS:
        # The time that a test may take otherwise
        request.node.add_marker(pytest.mark.timeout(0))


def refused(read: Callable[[], object]) -> bool:
    """Whether ``read`` ends in a user's error; another error, or too long a time, is a finding."""
    began = time.monotonic()
    found: FulcrumError | None = None
    try:
        # As the command has it: what a library warns its developers of is no news to users
        with warnings.catch_warnings(action="ignore"):
            read()
    except FulcrumError as error:
        found = error
    assert time.monotonic() - began < SLOWEST_S
    if found is not None:
        assert found.exit_code in (2, 3), found
        assert "\n" not in str(found)
    return found is not None


def endless(test: Callable[[], None]) -> None:
    """Run a fuzzer; again and again, each time with other examples, while there is time."""
    end = time.monotonic() + SECONDS
    test()
    while time.monotonic() < end:
        test()


def edits(size: int) -> st.SearchStrategy[list[tuple[int, int, bytes]]]:
    """Replacements: place, bytes taken out, bytes put in."""
    interesting = st.sampled_from(
        [b"", b"\0", b"\xff", b"\xff" * 8, b"\0" * 8, (2**63).to_bytes(8, "little"), b"[" * 64]
        + [number.to_bytes(4, "little") for number in (1, 2**31, 2**32 - 1)]
    )
    edit = st.tuples(
        st.integers(0, size), st.integers(0, 16), st.one_of(interesting, st.binary(max_size=16))
    )
    return st.lists(edit, min_size=1, max_size=4)


def edited(data: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, gone, put in changes:
        data = data[:place] + put + data[place + gone :]
    return data


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of a document."""
    found = [path] if path else []
    children = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, child in children:
        found += places(child, (*path, key))
    return found


def swapped(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    """A copy of a document with one value replaced."""
    changed = json.loads(json.dumps(document))
    node = changed
    for step in at[:-1]:
        node = node[step]
    node[at[-1]] = value
    return changed


def test_fuzz_gguf(tmp_path: Path) -> None:
    valid = write_gguf(tmp_path / "x.gguf", SHAPE, kind=GGMLQuantizationType.Q8_0).read_bytes()
    header = valid.index(b"output_norm.weight") + 64

    @fuzzed(60)
    @given(edits(header))
    def fuzz(changes: list[tuple[int, int, bytes]]) -> None:
        replace(tmp_path / "x.gguf", edited(valid, changes))
        refused(lambda: read_model(tmp_path / "x.gguf", tmp_path))

    endless(fuzz)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_fuzz_model_folder(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "tiny", SHAPE)
    valid = (folder / name).read_bytes()

    @fuzzed(40)
    @given(edits(min(len(valid), 3000)))
    def fuzz(changes: list[tuple[int, int, bytes]]) -> None:
        replace(folder / name, edited(valid, changes))
        refused(lambda: read_model(folder, tmp_path))

    endless(fuzz)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_fuzz_values_of_a_model_folder(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "tiny", SHAPE)
    document = json.loads((folder / name).read_bytes())

    @fuzzed(40)
    @given(st.sampled_from(places(document)), JSON)
    def fuzz(at: tuple[Any, ...], value: Any) -> None:
        replace(folder / name, json.dumps(swapped(document, at, value)).encode())
        refused(lambda: read_model(folder, tmp_path))

    endless(fuzz)


@pytest.mark.parametrize("name", ["plan.json", "layers.onnx", "head.onnx", "tokenizer.json"])
def test_fuzz_sealed_plan(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "x.plan"
    compile_recipe(RECIPE, folder)
    valid, document = (folder / name).read_bytes(), (folder / "plan.json").read_bytes()

    @fuzzed(40)
    @given(edits(len(valid)))
    def fuzz(changes: list[tuple[int, int, bytes]]) -> None:
        broken = edited(valid, changes)
        if name == "plan.json":
            seal_text(folder, broken)
        else:
            replace(folder / "plan.json", document)
            replace(folder / name, broken)
            seal(folder)
        refused(lambda: read_plan(folder, tmp_path))

    endless(fuzz)


def test_fuzz_values_of_a_plan(tmp_path: Path) -> None:
    folder = tmp_path / "x.plan"
    compile_recipe(RECIPE, folder)
    document = json.loads((folder / "plan.json").read_bytes())

    @fuzzed(60)
    @given(st.sampled_from(places(document)), JSON)
    def fuzz(at: tuple[Any, ...], value: Any) -> None:
        data = json.dumps(swapped(document, at, value)).encode()
        if not refused(lambda: decode_plan(data, "plan.json")):
            seal_text(folder, data)
            refused(lambda: read_plan(folder, tmp_path))

    endless(fuzz)


def test_fuzz_graph_attributes(tmp_path: Path) -> None:
    folder = tmp_path / "x.plan"
    compile_recipe(RECIPE, folder)
    document = (folder / "plan.json").read_bytes()
    valid = {
        name: onnx.load(folder / name, load_external_data=False)
        for name in ("head.onnx", "layers.onnx")
    }

    @fuzzed(40)
    @given(st.sampled_from(sorted(valid)), st.data())
    def fuzz(name: str, data: st.DataObject) -> None:
        model = onnx.ModelProto()
        model.CopyFrom(valid[name])
        for _ in range(data.draw(st.integers(1, 3))):
            node = data.draw(st.sampled_from(list(model.graph.node)))
            names = [name for other in model.graph.node for name in other.output] + ["hidden", ""]
            kind = data.draw(st.sampled_from(["input", "operator", "swap", "drop"]))
            if kind == "input" and node.input:
                index = data.draw(st.integers(0, len(node.input) - 1))
                node.input[index] = data.draw(st.sampled_from(names))
            elif kind == "operator":
                node.op_type = data.draw(
                    st.sampled_from(
                        [
                            "Add",
                            "MatMul",
                            "Reshape",
                            "Concat",
                            "Split",
                            "Gather",
                            "Tile",
                            "Expand",
                            "Pad",
                        ]
                    )
                )
            elif kind == "drop":
                model.graph.node.remove(node)
        replace(folder / "plan.json", document)
        replace(folder / name, model.SerializeToString())
        seal(folder)
        refused(lambda: read_plan(folder, tmp_path))
        replace(folder / name, valid[name].SerializeToString())

    endless(fuzz)


def test_fuzz_profile(tmp_path: Path) -> None:
    save_profile(load_profile("oneplus12"), tmp_path / "x.toml")
    valid = (tmp_path / "x.toml").read_bytes()

    @fuzzed(60)
    @given(edits(len(valid)))
    def fuzz(changes: list[tuple[int, int, bytes]]) -> None:
        replace(tmp_path / "x.toml", edited(valid, changes))
        refused(lambda: load_profile(tmp_path / "x.toml"))

    endless(fuzz)


def test_fuzz_prompts(tmp_path: Path) -> None:
    valid = b'{"id": "a", "category": "chat", "prompt": "Why?", "split": "report"}\n' * 2

    @fuzzed(100)
    @given(edits(len(valid)))
    def fuzz(changes: list[tuple[int, int, bytes]]) -> None:
        replace(tmp_path / "x.jsonl", edited(valid, changes))
        refused(lambda: load_prompts(tmp_path / "x.jsonl"))

    endless(fuzz)


PIECES = (
    *(
        "{%",
        "%}",
        "{{",
        "}}",
        "for i in ",
        "range(9)",
        "range(99999)",
        "endfor",
        "if ",
        "else",
        "endif",
    ),
    *(
        "set x = ",
        "x",
        "messages",
        "[0]",
        ".content",
        "['role']",
        " ~ ",
        " + ",
        " * ",
        " ** ",
        "99999",
    ),
    *(
        "|join",
        "|tojson",
        "|list",
        "|map('upper')",
        "|replace('a', 'aaaa')",
        ".replace('', 'xx')",
        "(",
        ")",
    ),
    *(
        "macro f(n)",
        "endmacro",
        "f(9)",
        "namespace(a=1)",
        "x.a",
        "''",
        "'a'",
        ".__class__",
        "loop",
        " ",
    ),
    *(
        "recursive",
        "loop(x)",
        "|indent(9)",
        "'%s' % ",
        ".format(x)",
        "dict(a=x)",
        "[x, x]",
        "{'a': x}",
        "-",
        "\n",
    ),
)


def test_fuzz_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.5)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    bases = st.sampled_from(["", CHAT_TEMPLATE, *HARMLESS.values()])

    @fuzzed(150)
    @given(bases, st.lists(st.sampled_from(PIECES), max_size=30), st.integers(0, 10**4))
    def fuzz(base: str, pieces: list[str], place: int) -> None:
        place = place % (len(base) + 1)
        template = base[:place] + "".join(pieces) + base[place:]
        refused(lambda: chat_template.render_chat(template, messages, "<s>", "</s>"))

    endless(fuzz)


def test_fuzz_sampling_settings() -> None:
    number = st.floats() | st.integers()

    @fuzzed(100)
    @given(number, st.integers(), number, st.integers())
    def fuzz(temperature: float, top_k: int, top_p: float, seed: int) -> None:
        refused(lambda: Sampling(temperature, top_k, top_p, seed))

    endless(fuzz)
