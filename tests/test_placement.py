"""The shortest path against every assignment, and its prices against an independent sum."""

import itertools

import msgspec
import pytest
from tiny_models import GQA, tiny_spec

from planner.cost import head_us, sub_layer_us
from planner.placement import Assignment, Machine, Work, place, price, target_assignments
from profiles.errors import InfeasibleError
from profiles.profile import DeviceProfile, Quantity, load_profile
from profiles.words import AttentionKernel, Format, Provenance, SubLayerId, kind_of

PROFILE = load_profile("oneplus12")
SPEC = msgspec.structs.replace(tiny_spec(GQA), layers=3, hidden=256, vocab=4096)
STAGES = tuple(SubLayerId(i) for i in range(SPEC.sub_layers))
SMALL = 1 << 12


def with_sync(sync_us: float) -> DeviceProfile:
    """The phone with another price of a hand-over."""
    quantity = Quantity(value=sync_us, source=Provenance.ASSUMED, cite="test")
    processors = tuple(
        msgspec.structs.replace(p, sync_us=quantity) if p.id == "npu" else p
        for p in PROFILE.processors
    )
    return msgspec.structs.replace(PROFILE, processors=processors)


def with_memory(limit_bytes: int) -> DeviceProfile:
    """The phone with an NPU that can address so much."""
    quantity = Quantity(value=limit_bytes, source=Provenance.ASSUMED, cite="test")
    processors = tuple(
        msgspec.structs.replace(p, memory_limit_bytes=quantity) if p.id == "npu" else p
        for p in PROFILE.processors
    )
    return msgspec.structs.replace(PROFILE, processors=processors)


def every_assignment() -> list[Assignment]:
    """All ways to place the stages of the tiny model."""
    names = [p.id for p in PROFILE.processors]
    return [
        Assignment(tuple(chosen[:-1]), chosen[-1])
        for chosen in itertools.product(names, repeat=len(STAGES) + 1)
    ]


@pytest.mark.parametrize("sync_us", [0.0, 1.0, 20.0, 100.0, 1e6])
@pytest.mark.parametrize("width", [1, 8, 64])
def test_the_path_equals_the_best_of_all_assignments(sync_us: float, width: int) -> None:
    machine = Machine(with_sync(sync_us), SPEC, Format.W8A16)
    for active in (STAGES, STAGES[1:4], STAGES[::2]):
        work = Work(active, width, width, 256)
        found = price(machine, place(machine, work), work)
        prices = [price(machine, assignment, work) for assignment in every_assignment()]
        assert found is not None
        assert found.us == pytest.approx(min(p.us for p in prices if p is not None))


def test_the_price_is_the_sum_of_its_parts() -> None:
    machine = Machine(PROFILE, SPEC, Format.W8A16)
    work = Work(STAGES, 4, 2, 128)
    mixed = Assignment(("cpu", "cpu", "npu", "npu", "npu", "cpu"), "cpu")
    found = price(machine, mixed, work)
    assert found is not None
    total = head_us(PROFILE, "cpu", SPEC, Format.W8A16, 2)
    for stage, name in zip(STAGES, mixed.sub_layers, strict=True):
        total += sub_layer_us(PROFILE, name, SPEC, kind_of(stage), Format.W8A16, 4, 128)
    rows = 4 * SPEC.hidden * 4
    rate = min(p.bandwidth_bytes_per_s.value for p in PROFILE.processors)
    total += PROFILE.processor("npu").sync_us.value + 2 * 1e6 * rows / rate
    assert found.us == pytest.approx(total)
    assert found.handover_bytes == 2 * rows
    assert [(s.first, s.end, s.processor) for s in found.spans] == [
        (0, 2, "cpu"),
        (2, 5, "npu"),
        (5, 6, "cpu"),
    ]


def test_what_a_processor_lacks_goes_elsewhere_with_a_reason() -> None:
    machine = Machine(PROFILE, SPEC, Format.F32)
    work = Work(STAGES, 8, 8, 128)
    assert set(place(machine, work).sub_layers) == {"cpu"}
    assert "npu" in machine.reasons
    assert price(machine, Assignment(("npu",) * len(STAGES), "cpu"), work) is None


def test_a_memory_limit_moves_stages_and_is_kept() -> None:
    free = Machine(with_sync(0.0), SPEC, Format.W8A16)
    work = Work(STAGES, 64, 64, 256)
    assert "npu" in place(free, work).sub_layers
    for limit in (SMALL, 500_000, 1_500_000):
        machine = Machine(with_memory(limit), SPEC, Format.W8A16)
        chosen = place(machine, work)
        stages = [*zip(STAGES, chosen.sub_layers, strict=True), (None, chosen.head)]
        assert sum(machine.weight_bytes(s) for s, name in stages if name == "npu") <= limit
        assert "all on npu" not in dict(target_assignments(machine))


def test_a_model_that_runs_nowhere_is_infeasible() -> None:
    npu = [p for p in PROFILE.processors if p.id == "npu"]
    cpu = [msgspec.structs.replace(p, supports={}) for p in PROFILE.processors if p.id == "cpu"]
    bare = msgspec.structs.replace(PROFILE, processors=(*cpu, *npu), points=())
    with pytest.raises(InfeasibleError, match="no processor"):
        place(Machine(bare, SPEC, Format.F32), Work(STAGES, 1, 1, 64))


def test_streamed_stages_and_the_kernel_are_priced() -> None:
    streamed = {STAGES[0], STAGES[3]}
    machine = Machine(
        PROFILE, SPEC, Format.W8A16, attention=AttentionKernel.EXACT, streamed=streamed
    )
    work = Work(STAGES, 4, 1, 128)
    for stage in STAGES:
        expected = sub_layer_us(
            *(PROFILE, "cpu", SPEC, kind_of(stage), Format.W8A16, 4, 128),
            attention=AttentionKernel.EXACT,
            streamed=stage in streamed,
        )
        assert machine.stage_us("cpu", stage, work) == expected


def test_streamed_weights_take_no_memory_of_a_processor() -> None:
    machine = Machine(PROFILE, SPEC, Format.W8A16, streamed={STAGES[0]})
    assert machine.held_bytes(STAGES[0]) == 0
    assert machine.held_bytes(STAGES[1]) == machine.weight_bytes(STAGES[1]) > 0
