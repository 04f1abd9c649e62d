"""Passes of a target that partly streams from flash: the bits of one that is all in memory."""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from compiled_models import Recipe, least_width
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import SHAPES, TinyShape

from lowering.emission import emit_graphs
from profiles.errors import FlashError, UnsupportedError
from profiles.words import AttentionKernel, Format, SubLayerId, SubLayerKind
from runtime.backends import HIDDEN, PassResult
from runtime.graph_checks import check_graphs
from runtime.kv_cache import KvCache
from runtime.plan import Artefact, ExecutionPlan, GraphKind, Residency, TensorRef, TensorType
from runtime.plan_folder import give_back_pages, map_tensors, read_plan
from runtime.streamed import segments
from runtime.target import Target, open_target

EXACT = AttentionKernel.EXACT
FORMATS = (Format.W8A16, Format.W8A8)
CONTEXT = 256
LIMIT = CONTEXT + 1024

Array = np.ndarray[Any, Any]


class GraphFolder:
    """A folder beside a plan's: other graphs over the same weights."""

    def __init__(self, path: Path, weights: Path) -> None:
        self.path = path
        path.mkdir()
        os.link(weights, path / weights.name)

    def write(self, relative: str, data: bytes) -> Artefact:
        (self.path / relative).write_bytes(data)
        return Artefact(relative, len(data), "0" * 64)


@pytest.fixture(scope="module")
def resident(compiled: Callable[[Recipe], Path]) -> Iterator[Callable[..., Any]]:
    """Folder, plan and target, all in memory, by shape and format."""
    found: dict[object, tuple[Path, ExecutionPlan, Target]] = {}

    def opened(shape: TinyShape, fmt: Format = Format.W8A16) -> Any:
        if (shape, fmt) not in found:
            folder = compiled(Recipe(shape=shape, format=fmt, context=CONTEXT, attention=EXACT))
            plan = read_plan(folder)
            found[shape, fmt] = folder, plan, open_target(folder, plan, 1)
        return found[shape, fmt]

    yield opened
    for *_, target in found.values():
        target.close()


@pytest.fixture
def streamed(resident: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A target of the same plan that streams some of its sub-layers."""
    targets: list[Target] = []
    # Other modules keep sessions open
    before = threading.enumerate()

    def opened(
        shape: TinyShape,
        fmt: Format,
        sub_layers: Sequence[int],
        slots: int = 2,
        rate: float | None = None,
        threads: int = 1,
    ) -> Target:
        folder, plan, _ = resident(shape, fmt)
        streamed = tuple(map(SubLayerId, sub_layers))
        place = GraphFolder(tmp_path_factory.mktemp("s") / "graphs", folder / "weights.bin")
        graphs = emit_graphs(
            *(plan.model, fmt, CONTEXT, EXACT, plan.tensors),
            *(place, streamed),
        )
        changed = msgspec.structs.replace(
            plan, graphs=graphs, residency=Residency(streamed, slots, 8192)
        )
        check_graphs(place.path, changed)
        targets.append(open_target(place.path, changed, threads, rate))
        return targets[-1]

    yield opened
    for target in targets:
        target.close()
    left = [t for t in threading.enumerate() if t not in before]
    assert not [t for t in left if t.name == "fulcrum-flash"]


class Inputs:
    """A pass of random rows that look at random slots and at one another."""

    def __init__(self, target: Target, width: int, context: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        spec = target.spec
        self.cache = KvCache(spec, 32, LIMIT)
        self.cache.reserve(context + width)
        self.cache.keys[:] = random.normal(0, 1, self.cache.keys.shape)
        self.cache.values[:] = random.integers(-9999, 9999, self.cache.values.shape)
        self.hidden = random.normal(0, 1, (width, spec.hidden)).astype(np.float32)
        self.positions = random.integers(0, CONTEXT, width)
        seen = random.random((width, self.cache.capacity + width)) < random.random()
        np.fill_diagonal(seen[:, self.cache.capacity :], True)
        self.mask = np.where(seen, np.float32(0), HIDDEN).astype(np.float32)

    def run(self, target: Target, active: Array | None = None) -> list[Array]:
        on = target.all_on if active is None else active
        result = target.run(self.hidden, self.positions, self.mask, self.cache, on)
        return copies(result)


def copies(result: PassResult) -> list[Array]:
    return [array.copy() for array in result if array is not None]


def same_bits(found: Sequence[Array], expected: Sequence[Array]) -> bool:
    return len(found) == len(expected) == 3 and all(
        np.array_equal(one.view(np.uint32), other.view(np.uint32))
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_rows_of_every_width_equal_those_in_memory(resident, streamed, name, fmt) -> None:
    shape = SHAPES[name]
    plan, whole = resident(shape, fmt)[1:]
    count = plan.model.sub_layers
    targets = [
        streamed(shape, fmt, range(count), 1),
        streamed(shape, fmt, range(0, count, 2)),
        streamed(shape, fmt, range(1, count, 2)),
    ]
    for width in range(least_width(shape, fmt), 65):
        inputs = Inputs(whole, width, (width * 7) % 150, width)
        expected = inputs.run(whole)
        for target in targets:
            assert same_bits(inputs.run(target), expected), width


@settings(
    max_examples=60,
    deadline=None,
    # Each example has a target of its own
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(sorted(SHAPES)),
    fmt=st.sampled_from(FORMATS),
    slots=st.integers(1, 5),
    data=st.data(),
)
def test_any_residency_and_any_masks_give_the_same_bits(
    resident, streamed, name, fmt, slots, data
) -> None:
    shape = SHAPES[name]
    plan, whole = resident(shape, fmt)[1:]
    everything = st.sets(st.integers(0, plan.model.sub_layers - 1))
    target = streamed(shape, fmt, sorted(data.draw(everything.filter(bool))), slots)
    for seed in range(data.draw(st.integers(1, 4))):
        skipped = data.draw(st.just(set()) | everything)
        width = data.draw(st.integers(least_width(shape, fmt), 64))
        inputs = Inputs(whole, width, data.draw(st.integers(0, 200)), seed)
        active = whole.active(map(SubLayerId, skipped))
        assert same_bits(inputs.run(target, active), inputs.run(whole, active))
    target.close()


@pytest.mark.parametrize("name", SHAPES)
def test_a_decoded_text_has_the_same_cache(resident, streamed, name: str) -> None:
    shape = SHAPES[name]
    _, plan, whole = resident(shape, Format.W8A16)
    target = streamed(shape, Format.W8A16, (1, 2), 1)
    caches = [KvCache(plan.model, 32, LIMIT) for _ in range(2)]
    least = least_width(shape)
    for ids in ([5, 9, 200], [7], [8], list(range(40)), [3]):
        rows = []
        for each, cache in zip((whole, target), caches, strict=True):
            width = max(least, len(ids))
            result = each.run_chain(ids, cache.length, cache, width=width)
            rows.append(each.logits(result.hidden))
            cache.commit(result.keys, result.values, slice(0, len(ids)))
        assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(caches[0].keys, caches[1].keys)
    assert np.array_equal(caches[0].values, caches[1].values)


def test_a_pass_under_a_mask_reads_what_it_needs(resident, streamed) -> None:
    shape = SHAPES["gqa"]
    whole = resident(shape)[2]
    target = streamed(shape, Format.W8A16, (1, 3, 5), 1, 1e6)
    before = target.flash.bytes
    inputs = Inputs(whole, 4, 9, 0)
    active = whole.active(map(SubLayerId, (1, 3, 5)))
    for _ in range(50):
        assert same_bits(inputs.run(target, active), inputs.run(whole, active))
    # The ring is filled for the next full pass, and no more
    one = 24576 + 8192
    assert target.flash.bytes - before <= one
    assert same_bits(inputs.run(target), inputs.run(whole))


def test_a_read_error_leaves_the_target_usable(resident, streamed) -> None:
    shape = SHAPES["gqa"]
    whole = resident(shape)[2]
    target = streamed(shape, Format.W8A16, (1, 2, 5), 1)
    inputs = Inputs(whole, 4, 9, 0)
    reader = target.reader
    right = os.dup(reader._descriptor)
    wrong = os.open("/", os.O_RDONLY)
    for _ in range(2):
        os.dup2(wrong, reader._descriptor)
        with pytest.raises(FlashError, match="reading weights failed"):
            [inputs.run(target) for _ in range(3)]
        os.dup2(right, reader._descriptor)
        assert same_bits(inputs.run(target), inputs.run(whole))
    os.close(right)
    os.close(wrong)


def test_two_threads_of_the_library_give_the_bits_of_one(resident, streamed) -> None:
    shape = SHAPES["qwen2"]
    whole = resident(shape)[2]
    target = streamed(shape, Format.W8A16, (0, 3), threads=2)
    for width in (1, 2, 17, 64):
        inputs = Inputs(whole, width, 40, width)
        assert same_bits(inputs.run(target), inputs.run(whole))


@pytest.mark.parametrize(
    ("on", "streams", "expected"),
    [
        ("111111", "", [(0, 1, 2, 3, 4, 5)]),
        ("111111", "25", [(0, 1), (2,), (3, 4), (5,)]),
        ("101011", "25", [(0,), (2,), (4,), (5,)]),
        ("110111", "2", [(0, 1, 3, 4, 5)]),
        ("000000", "25", []),
        ("000100", "3", [(3,)]),
    ],
)
def test_segments_are_runs_of_what_is_in_memory(on: str, streams: str, expected: list[Any]) -> None:
    active = np.array([digit == "1" for digit in on])
    assert list(segments(active, {SubLayerId(int(digit)) for digit in streams})) == expected


@pytest.mark.parametrize("fmt", [Format.W4, Format.F32])
@pytest.mark.parametrize("kind", SubLayerKind)
def test_formats_that_cannot_stream_are_refused_with_the_reason(compiled, tmp_path, fmt, kind):
    folder = compiled(Recipe(format=fmt, context=CONTEXT, attention=EXACT))
    plan = read_plan(folder)
    place = GraphFolder(tmp_path / "g", folder / "weights.bin")
    sub_layer = SubLayerId(int(kind is SubLayerKind.MLP))
    with pytest.raises(UnsupportedError, match=r"cannot stream from flash: (blocks|sums)"):
        emit_graphs(plan.model, fmt, CONTEXT, EXACT, plan.tensors, place, (sub_layer,))


def test_fused_attention_is_refused(compiled, tmp_path) -> None:
    folder = compiled(Recipe())
    plan = read_plan(folder)
    place = GraphFolder(tmp_path / "g", folder / "weights.bin")
    with pytest.raises(UnsupportedError, match="only exact attention"):
        emit_graphs(
            *(plan.model, Format.W8A16, CONTEXT, AttentionKernel.FUSED, plan.tensors),
            *(place, (SubLayerId(0),)),
        )


def test_streamed_sub_layers_have_graphs_of_their_own(compiled) -> None:
    residency = Residency((SubLayerId(0), SubLayerId(3)), 2, 4096)
    plan = read_plan(compiled(Recipe(attention=EXACT, residency=residency)))
    tensors = {graph.kind: graph.tensors for graph in plan.graphs}
    assert set(tensors) == set(GraphKind)
    assert tensors[GraphKind.ATTENTION] == ("rope.cos", "rope.sin")
    assert tensors[GraphKind.MLP] == ()
    layers = tensors[GraphKind.LAYERS]
    assert "layers.0.qkv" not in layers
    assert "layers.1.down" not in layers
    assert {"layers.0.down", "layers.1.qkv"} <= set(layers)


def resident_file_bytes() -> int:
    found = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_mapped_pages_are_given_back_and_keep_what_they_say(tmp_path: Path) -> None:
    size = 64 << 20
    data = np.arange(size // 4, dtype=np.uint32).view(np.uint8)
    (tmp_path / "weights.bin").write_bytes(data.tobytes())
    tensors = [TensorRef("a", TensorType.U8, (size // 2,), 0)]
    tensors.append(TensorRef("b", TensorType.F32, (2, size // 16), size // 2))
    views = map_tensors(tmp_path, Artefact("weights.bin", size, "0" * 64), tensors)
    own = np.arange(5000)
    assert int(views["a"].sum()) == int(data[: size // 2].sum())
    held = resident_file_bytes()
    give_back_pages([*views.values(), own, own[3:]])
    assert resident_file_bytes() < held - size // 4
    assert np.array_equal(views["a"], data[: size // 2])
    assert np.array_equal(own, np.arange(5000))
