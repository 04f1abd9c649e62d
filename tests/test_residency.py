"""The choice of residency against brute force, its budget, and its refusals."""

import itertools
import re
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.lanes import Flash, Role, Stage, Task
from planner.memory import MEBIBYTE
from planner.residency import (
    Load,
    ReadSize,
    bound_to_memory,
    candidate_sets,
    check_streamable,
    choose_residency,
    fastest,
    read_sizes,
)
from planner.simulate import ring_bytes, simulate
from profiles.errors import InfeasibleError, UnsupportedError
from profiles.profile import load_profile
from profiles.words import Format, SubLayerId
from runtime.plan import ALIGNMENT_BYTES, Formats, MemoryNeed, formats_of

BLOCK = ALIGNMENT_BYTES
RATE = 1e6 * BLOCK
"""A block takes a microsecond."""
READS = (ReadSize(BLOCK, RATE / 2), ReadSize(4 * BLOCK, RATE), ReadSize(8 * BLOCK, RATE))
FIXED = MemoryNeed(weights_bytes=3 * BLOCK, kv_bytes=2 * BLOCK, interpreter_bytes=5 * BLOCK)


def load(
    layers: int,
    blocks: tuple[int, int] = (2, 6),
    compute_us: tuple[float, float] = (1.0, 3.0),
    draft_us: float = 20.0,
    slower: float = 1.5,
    name: str = "spec",
) -> Load:
    resident: list[Stage] = []
    streamed: list[Stage] = []
    for i in range(2 * layers):
        us = compute_us[i % 2]
        resident.append(Stage(SubLayerId(i), "cpu", us))
        streamed.append(Stage(SubLayerId(i), "cpu", slower * us, 0.0, blocks[i % 2] * BLOCK))
    before = (Task("cpu", draft_us, Role.DRAFT),)
    after = (Task("cpu", 2.0, Role.HEAD),)
    return Load(name, 3.0, before, tuple(resident), tuple(streamed), after)


def subsets(of: Load, kept: frozenset[SubLayerId]) -> Iterator[frozenset[SubLayerId]]:
    free = [stage.sub_layer for stage in of.streamed if stage.sub_layer not in kept]
    for count in range(len(free) + 1):
        yield from map(frozenset, itertools.combinations(free, count))


def brute_force_us(
    of: Load, room: int, kept: frozenset[SubLayerId], families_only: bool
) -> float | None:
    """The least cycle time over sets and rings, every one simulated; None if none fits."""
    sets = [s for _, s in candidate_sets(of, kept)] if families_only else list(subsets(of, kept))
    best: float | None = None
    for streamed in sets:
        work = of.work(streamed)
        held = sum(s.stream_bytes for s in of.streamed if s.sub_layer not in streamed)
        for slots in range(1, len(of.streamed) // 2 + 1):
            if held + ring_bytes(work.stages, slots) <= room:
                us = simulate(work, slots, Flash(RATE)).cycle_us
                best = us if best is None else min(best, us)
    return best


loads = st.builds(
    load,
    st.integers(1, 3),
    st.tuples(st.integers(1, 3), st.integers(2, 8)),
    st.tuples(st.integers(0, 4).map(float), st.integers(0, 8).map(float)),
    st.integers(0, 60).map(float),
    st.sampled_from((1.0, 2.0)),
)


def test_families_of_sets_rarely_miss_the_best_set_of_all() -> None:
    ratios: list[float] = []
    for (layers, mlp), draft_us in itertools.product(((2, 3), (3, 4), (3, 8)), (0.0, 5.0, 20.0)):
        of = load(layers, (1, mlp), draft_us=draft_us)
        for blocks in range(layers * (1 + mlp)):
            everywhere = brute_force_us(of, blocks * BLOCK, frozenset(), families_only=False)
            if everywhere is not None:
                budget = FIXED.total_bytes + blocks * BLOCK
                ratios.append(choose_residency(budget, FIXED, [of], READS).cycle_us[0] / everywhere)
    assert len(ratios) > 50
    assert sum(ratio <= 1.1 for ratio in ratios) >= 0.9 * len(ratios)


@settings(max_examples=60, deadline=None)
@given(loads, st.integers(0, 36), st.booleans())
def test_the_choice_is_that_of_brute_force(of: Load, room_blocks: int, keeps: bool) -> None:
    kept = frozenset({SubLayerId(0)} if keeps else ())
    room = room_blocks * BLOCK
    budget = FIXED.total_bytes + room
    everywhere = brute_force_us(of, room, kept, families_only=False)
    if everywhere is None:
        with pytest.raises(InfeasibleError):
            choose_residency(budget, FIXED, [of], READS, kept)
        return
    chosen = choose_residency(budget, FIXED, [of], READS, kept)
    in_families = brute_force_us(of, room, kept, families_only=True)
    assert in_families is not None
    assert chosen.cycle_us[0] <= in_families * 1.002
    assert everywhere * (1 - 1e-9) <= chosen.cycle_us[0]
    assert chosen.decision.gap is not None
    assert chosen.cycle_us[0] / (1 + chosen.decision.gap) <= everywhere * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(loads, st.integers(8, 36))
def test_all_parts_fit_into_the_budget(of: Load, room_blocks: int) -> None:
    budget = FIXED.total_bytes + room_blocks * BLOCK
    try:
        chosen = choose_residency(budget, FIXED, [of], READS)
    except InfeasibleError:
        return
    need, residency = chosen.need, chosen.residency
    assert need.total_bytes <= budget
    assert need.interpreter_bytes == FIXED.interpreter_bytes
    streamed = frozenset(residency.streamed if residency else ())
    held = sum(s.stream_bytes for s in of.streamed if s.sub_layer not in streamed)
    assert need.weights_bytes == FIXED.weights_bytes + held
    assert need.ring_bytes == (
        ring_bytes(of.work(streamed).stages, residency.slots) if residency else 0
    )
    if residency is not None:
        assert list(residency.streamed) == sorted(set(residency.streamed))
        assert residency.slots <= len(of.streamed) // 2
        assert residency.read_bytes == 8 * BLOCK


@given(st.integers(1, 3))
def test_more_memory_never_takes_longer(layers: int) -> None:
    of, last = load(layers), float("inf")
    for blocks in range(8, 8 * layers + 2, 3):
        chosen = choose_residency(FIXED.total_bytes + blocks * BLOCK, FIXED, [of], READS)
        assert chosen.cycle_us[0] <= last * 1.002
        last = chosen.cycle_us[0]


def test_a_large_budget_keeps_everything() -> None:
    chosen = choose_residency(1 << 30, FIXED, [load(4)], READS)
    assert (chosen.residency, chosen.need.ring_bytes) == (None, 0)
    assert "then weights stream" in chosen.decision.flips_when


def test_equal_times_read_the_least() -> None:
    """A long draft fills any ring, and nothing computes: pins and ring take equally long."""
    of = load(4, compute_us=(0.0, 0.0), draft_us=1000.0)
    chosen = choose_residency(FIXED.total_bytes + 20 * BLOCK, FIXED, [of], READS)
    assert chosen.residency is not None
    streams = sum(s.stream_bytes for s in of.streamed if s.sub_layer in chosen.residency.streamed)
    # 32 blocks in all; one slot for an MLP has to be there
    assert streams <= (32 - 20 + 6 + 2) * BLOCK
    assert chosen.residency.slots == 1


def test_the_smallest_budget_that_an_error_names_works_and_one_less_does_not() -> None:
    of = load(6, blocks=(300, 1000))
    with pytest.raises(InfeasibleError) as refusal:
        choose_residency(MEBIBYTE, FIXED, [of], READS)
    named = re.search(r"--dram-budget (\d+)MiB", str(refusal.value))
    assert named is not None
    smallest = int(named[1]) * MEBIBYTE
    chosen = choose_residency(smallest, FIXED, [of], READS)
    assert chosen.residency is not None
    with pytest.raises(InfeasibleError):
        choose_residency(smallest - MEBIBYTE, FIXED, [of], READS)


def test_what_a_draft_runs_stays_in_memory() -> None:
    kept = frozenset(map(SubLayerId, (0, 3, 4)))
    chosen = choose_residency(FIXED.total_bytes + 24 * BLOCK, FIXED, [load(4)], READS, kept)
    assert chosen.residency is not None
    assert not kept & set(chosen.residency.streamed)


def test_what_stays_is_counted_as_it_is_held() -> None:
    """Packed in memory without the padding of the flash image."""
    of = load(4)
    packed = msgspec.structs.replace(of, held_bytes=tuple(b - 100 for b in of.resident_bytes))
    need = choose_residency(1 << 30, FIXED, [packed], READS).need
    assert need.weights_bytes == FIXED.weights_bytes + sum(of.resident_bytes) - 8 * 100


def test_other_loads_are_reported_under_the_same_residency() -> None:
    spec, ar = load(4), load(4, draft_us=0.0, name="ar")
    chosen = choose_residency(FIXED.total_bytes + 24 * BLOCK, FIXED, [spec, ar], READS)
    assert chosen.residency is not None
    streamed = frozenset(chosen.residency.streamed)
    expected = simulate(ar.work(streamed), chosen.residency.slots, Flash(RATE)).cycle_us
    assert chosen.cycle_us[1] == expected
    assert "spec: " in chosen.decision.note
    assert "ar: " in chosen.decision.note


def test_the_decision_lists_the_choice_first_and_rivals_behind() -> None:
    decision = choose_residency(FIXED.total_bytes + 24 * BLOCK, FIXED, [load(6)], READS).decision
    assert decision.candidates[0].name == decision.chosen
    assert len(decision.candidates) > 1
    assert decision.value == decision.candidates[0].value


def test_of_equal_rates_the_larger_requests_are_taken() -> None:
    assert fastest(READS).bytes == 8 * BLOCK


def test_reads_of_a_phone_are_sequential_and_direct() -> None:
    assert fastest(read_sizes(load_profile("oneplus12"))) == ReadSize(524288, 4.0e9)


def test_a_profile_without_sequential_reads_is_refused() -> None:
    profile = load_profile("oneplus12")
    storage = msgspec.structs.replace(profile.storage, reads=profile.storage.reads[1:2])
    with pytest.raises(UnsupportedError, match="in sequence"):
        read_sizes(msgspec.structs.replace(profile, storage=storage))


@pytest.mark.parametrize("fmt", [Format.W4, Format.F32])
def test_formats_that_cannot_stream_are_refused_with_the_reason(fmt: Format) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot stream.*--target-format w8a16"):
        check_streamable(formats_of(fmt))
    check_streamable(formats_of(Format.W8A8))
    mixed = Formats(Format.W8A16, fmt, Format.W8A16)
    assert bound_to_memory(mixed, map(SubLayerId, range(4))) == {1, 3}
