"""Memory by part: what the tensors say, held against the file and against plain sums."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import GQA, QWEN2, UNTIED, VOCAB, TinyShape, tiny_source

from lowering.flash_image import write_weights
from planner.memory import (
    Model,
    check_budget,
    head_bytes,
    kv_bytes,
    kv_bytes_per_token,
    plan_memory,
    ring_bytes,
    sub_layer_bytes,
    widest_pass_bytes,
)
from profiles.errors import InfeasibleError
from profiles.words import AttentionKernel, Format, SubLayerId
from runtime.plan import ALIGNMENT_BYTES, TensorRef, TensorType

CONTEXT = 64


class Sink:
    """Lays tensors out as a weights file does, and forgets them."""

    def __init__(self) -> None:
        self.end = 0
        self.sizes: dict[str, int] = {}

    def add(self, name: str, array: NDArray[np.generic]) -> TensorRef:
        kind = TensorType.F32 if array.dtype == np.float32 else TensorType.U8
        ref = TensorRef(name, kind, array.shape, self.end)
        self.sizes[name] = array.nbytes
        self.end += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return ref


def emitted(shape: TinyShape, fmt: Format) -> tuple[Model, Sink]:
    source, sink = tiny_source(shape), Sink()
    return Model(source.spec, write_weights(source, fmt, CONTEXT, sink)), sink


@pytest.mark.parametrize("fmt", [Format.F32, Format.W8A16, Format.W8A8, Format.W4])
@pytest.mark.parametrize("shape", [GQA, UNTIED, QWEN2])
def test_ranges_of_sub_layers_are_the_file_between_its_tables(
    shape: TinyShape, fmt: Format
) -> None:
    model, _ = emitted(shape, fmt)
    sizes = sub_layer_bytes(model)
    assert len(sizes) == model.spec.sub_layers
    first = next(t for t in model.tensors if t.name.startswith("layers."))
    after = next(t for t in model.tensors if t.name == "final_norm")
    assert sum(size.streamed for size in sizes) == after.offset_bytes - first.offset_bytes


def all_but_the_table(sink: Sink) -> int:
    return sum(size for name, size in sink.sizes.items() if name.split(".")[0] != "embed")


def kept_rows(model: Model) -> int:
    """Of the table, in float32; it has fewer rows than are kept."""
    return 4 * VOCAB * model.spec.hidden


@pytest.mark.parametrize("shape", [GQA, UNTIED, QWEN2])
def test_every_byte_is_held_once_in_the_channel_formats(shape: TinyShape) -> None:
    model, sink = emitted(shape, Format.W8A16)
    held = sum(size.resident for size in sub_layer_bytes(model))
    assert held + head_bytes(model) == all_but_the_table(sink) + kept_rows(model)


def test_blocks_of_8_bits_have_their_scales_twice() -> None:
    model, sink = emitted(GQA, Format.W4)
    held = sum(size.resident for size in sub_layer_bytes(model))
    rest = all_but_the_table(sink)
    assert held + head_bytes(model) == rest + kept_rows(model) + sink.sizes["head.scale"]


def test_a_ring_has_slots_for_the_largest_of_each_kind() -> None:
    model, _ = emitted(GQA, Format.W8A16)
    sizes = sub_layer_bytes(model)
    streamed = [SubLayerId(i) for i in (0, 1, 3)]
    expected = 3 * (sizes[0].streamed + max(sizes[1].streamed, sizes[3].streamed))
    assert ring_bytes(sizes, streamed, 3) == expected
    assert ring_bytes(sizes, streamed[1:], 2) == 2 * max(sizes[1].streamed, sizes[3].streamed)
    assert ring_bytes(sizes, (), 3) == 0


def parts(streamed: Sequence[int], draft: Model | None = None) -> tuple[int, ...]:
    model, _ = emitted(GQA, Format.W8A16)
    need = plan_memory(
        model, CONTEXT, streamed=[SubLayerId(i) for i in streamed], slots=2, draft=draft
    )
    return need.weights_bytes, need.ring_bytes, need.draft_bytes, need.kv_bytes


def test_a_streamed_sub_layer_leaves_the_weights_for_the_ring() -> None:
    model, _ = emitted(GQA, Format.W8A16)
    sizes = sub_layer_bytes(model)
    whole, less = parts([]), parts([2, 5])
    assert whole[0] - less[0] == sizes[2].resident + sizes[5].resident
    assert (whole[1], less[1]) == (0, 2 * (sizes[2].streamed + sizes[5].streamed))


def test_a_draft_model_brings_its_weights_and_its_keys() -> None:
    draft, _ = emitted(UNTIED, Format.W8A16)
    alone, both = parts([]), parts([], draft)
    held = sum(size.resident for size in sub_layer_bytes(draft)) + head_bytes(draft)
    assert (alone[2], both[2]) == (0, held)
    assert both[3] - alone[3] == kv_bytes(draft.spec, CONTEXT)


def test_a_growing_cache_holds_old_and_new_capacity_at_once() -> None:
    spec = tiny_source(GQA).spec
    assert kv_bytes(spec, 1000, 256) == (1024 + 768) * kv_bytes_per_token(spec)
    assert kv_bytes(spec, 200, 256) == 256 * kv_bytes_per_token(spec)


def test_buffers_grow_with_the_pass() -> None:
    spec = tiny_source(GQA).spec
    exact, fused = AttentionKernel.EXACT, AttentionKernel.FUSED
    assert widest_pass_bytes(spec, exact, 8, 64, 1) > widest_pass_bytes(spec, fused, 8, 64, 1)
    assert widest_pass_bytes(spec, exact, 8, 128, 1) > widest_pass_bytes(spec, exact, 8, 64, 1)
    more = widest_pass_bytes(spec, fused, 8, 64, 5) - widest_pass_bytes(spec, fused, 8, 64, 4)
    assert more == 2 * 4 * spec.vocab


def test_a_refusal_names_every_part_and_the_smallest_budget() -> None:
    draft, _ = emitted(UNTIED, Format.W8A16)
    model, _ = emitted(GQA, Format.W8A16)
    need = plan_memory(model, CONTEXT, streamed=[SubLayerId(0)], slots=1, draft=draft)
    check_budget(need, need.total_bytes)
    with pytest.raises(InfeasibleError, match=r"draft model .* ring .* interpreter"):
        check_budget(need, need.total_bytes - 1)
