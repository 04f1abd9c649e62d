"""The cost model: points first, then interpolation, then roofline, each saying which it is."""

import gc
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import cost as cost_module
from planner.cost import (
    TRUST,
    cost,
    head_cost,
    head_us,
    read_rate,
    running_format,
    sub_layer_cost,
    sub_layer_parts,
    sub_layer_us,
    weakest,
)
from planner.roofline import roofline
from profiles.errors import InputError, UnsupportedError
from profiles.profile import (
    AttentionShape,
    DeviceProfile,
    GlueShape,
    LinearShape,
    Point,
    Quantity,
    ReadPattern,
    Shape,
    load_profile,
)
from profiles.words import AttentionKernel, Format, Operator, Provenance, SubLayerKind
from runtime.model_spec import ModelSpec, RopeSpec, TokenizerSpec

LINEAR, ATTENTION, GLUE = Operator.LINEAR, Operator.ATTENTION, Operator.GLUE
EXACT, STREAMED = Operator.EXACT_ATTENTION, Operator.STREAMED_LINEAR


def model(**sizes: int) -> ModelSpec:
    tokens = TokenizerSpec(None, False, (), None, "0")
    rest = {"max_context": 4096, "norm_eps": 1e-5, "rope": RopeSpec(1e4), "tied_head": False}
    names = {"name": "a model", "architecture": "llama", "weights_digest": "0"}
    return ModelSpec(**names, **rest, **sizes, tokenizer=tokens)  # type: ignore[arg-type]


SMOL = model(
    layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152
)
MISTRAL = model(
    layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=32000
)


PHONE = load_profile("oneplus12")


@pytest.fixture
def phone() -> DeviceProfile:
    return PHONE


def point(
    operator: Operator, shape: Shape, width: int, us: float, context: int = 0, fmt: str = "f32"
) -> Point:
    time = Quantity(
        value=us, source=Provenance.MEASURED, cite="a test", spread=0.0, date="2026-01-31"
    )
    return Point(
        processor="cpu",
        operator=operator,
        format=Format(fmt),
        shape=shape,
        width=width,
        context=context,
        time_us=time,
    )


def with_points(profile: DeviceProfile, *points: Point) -> DeviceProfile:
    return msgspec.structs.replace(profile, points=points)


def pass_ms(profile: DeviceProfile, processor: str, spec: ModelSpec, fmt: Format, width: int):
    """A whole pass at context 512 without hand-overs, in milliseconds."""
    kinds = sum(
        sub_layer_us(profile, processor, spec, kind, fmt, width, 512) for kind in SubLayerKind
    )
    return (spec.layers * kinds + head_us(profile, processor, spec, fmt, width)) / 1e3


def test_a_published_point_is_returned_as_it_is(phone: DeviceProfile):
    answer = cost(phone, "npu", LINEAR, LinearShape(2048, 8192), Format.W8A8, 64)
    assert (answer.us, answer.provenance) == (1500, Provenance.PAPER)
    assert "table 3" in answer.basis


def test_widths_up_to_the_step_cost_the_same_on_a_padded_processor(phone: DeviceProfile):
    shape = LinearShape(4096, 4096)
    costs = {cost(phone, "npu", LINEAR, shape, Format.W8A16, width) for width in range(1, 33)}
    assert len(costs) == 1
    assert costs.pop().us == 693
    assert cost(phone, "npu", LINEAR, shape, Format.W8A16, 33).us > 693


def test_between_two_widths_a_cost_is_interpolated(phone: DeviceProfile):
    shape = LinearShape(64, 64)
    device = with_points(phone, point(LINEAR, shape, 1, 10), point(LINEAR, shape, 16, 40))
    answer = cost(device, "cpu", LINEAR, shape, Format.F32, 4)
    assert answer.us == pytest.approx(20)
    assert answer.provenance is Provenance.INTERPOLATED
    assert "64 x 64" in answer.basis


def test_between_two_sizes_a_cost_is_interpolated(phone: DeviceProfile):
    device = with_points(
        phone,
        point(LINEAR, LinearShape(100, 100), 1, 10),
        point(LINEAR, LinearShape(200, 200), 1, 40),
    )
    answer = cost(device, "cpu", LINEAR, LinearShape(50, 400), Format.F32, 1)
    assert (answer.us, answer.provenance) == (pytest.approx(20), Provenance.INTERPOLATED)


def test_of_two_equally_large_matrices_the_more_similar_one_speaks(phone: DeviceProfile):
    device = with_points(
        phone,
        point(LINEAR, LinearShape(100, 400), 1, 10),
        point(LINEAR, LinearShape(400, 100), 1, 99),
    )
    assert cost(device, "cpu", LINEAR, LinearShape(50, 800), Format.F32, 1).us == 10
    assert cost(device, "cpu", LINEAR, LinearShape(800, 50), Format.F32, 1).us == 99


def test_beyond_the_points_the_nearest_is_scaled_by_roofline(phone: DeviceProfile):
    near, far = LinearShape(4096, 4096), LinearShape(4096, 8192)
    device = with_points(phone, point(LINEAR, near, 1, 9000))
    cpu = device.processor("cpu")
    answer = cost(device, "cpu", LINEAR, far, Format.F32, 1)
    ratio = roofline(cpu, far, Format.F32, 1).us / roofline(cpu, near, Format.F32, 1).us
    assert answer.us == pytest.approx(9000 * ratio)
    assert answer.provenance is Provenance.ROOFLINE
    assert "nearest point of 4096 x 4096" in answer.basis


def test_beyond_the_points_nothing_beats_the_memory(phone: DeviceProfile):
    device = with_points(phone, point(LINEAR, LinearShape(64, 64), 1, 0.001))
    shape = LinearShape(4096, 4096)
    answer = cost(device, "cpu", LINEAR, shape, Format.F32, 1)
    assert answer.us >= roofline(device.processor("cpu"), shape, Format.F32, 1).moving_us


def test_without_points_the_roofline_answers(phone: DeviceProfile):
    cpu = phone.processor("cpu")
    narrow = cost(phone, "cpu", LINEAR, LinearShape(4096, 4096), Format.W4, 1)
    assert narrow.us == pytest.approx(4096 * 4096 * 0.5625 / 43.9e9 * 1e6 + cpu.launch_us.value)
    assert (narrow.provenance, narrow.basis) == (Provenance.ROOFLINE, "roofline, bound by memory")
    wide = cost(phone, "cpu", LINEAR, LinearShape(4096, 4096), Format.W4, 64)
    assert wide.us == pytest.approx(2 * 64 * 4096 * 4096 / 1.8e11 * 1e6 + cpu.launch_us.value)
    assert wide.basis == "roofline, bound by compute"


def test_sixteen_bit_activations_cost_two_rows(phone: DeviceProfile):
    device = with_points(phone)
    shape = LinearShape(4096, 4096)
    narrow = cost(device, "cpu", LINEAR, shape, Format.W8A16, 8)
    wide = cost(device, "cpu", LINEAR, shape, Format.W8A8, 16)
    assert narrow.us == pytest.approx(wide.us)


def test_attention_is_interpolated_over_context_and_width(phone: DeviceProfile):
    shape = AttentionShape(9, 3, 64)
    device = with_points(
        phone,
        point(ATTENTION, shape, 1, 10, 100),
        point(ATTENTION, shape, 16, 40, 100),
        point(ATTENTION, shape, 1, 40, 1600),
        point(ATTENTION, shape, 16, 160, 1600),
    )
    answer = cost(device, "cpu", ATTENTION, shape, Format.F32, 4, 400)
    assert (answer.us, answer.provenance) == (pytest.approx(40), Provenance.INTERPOLATED)
    assert cost(device, "cpu", ATTENTION, shape, Format.F32, 4, 3200).us > 40
    other = cost(device, "cpu", ATTENTION, AttentionShape(18, 6, 64), Format.F32, 4, 400)
    assert other.provenance is Provenance.ROOFLINE
    assert other.us > answer.us


def test_glue_is_interpolated_over_hidden_size_and_width(phone: DeviceProfile):
    device = with_points(
        phone, point(GLUE, GlueShape(100), 1, 10), point(GLUE, GlueShape(400), 1, 40)
    )
    assert cost(device, "cpu", GLUE, GlueShape(200), Format.F32, 1).us == pytest.approx(20)


def test_weightless_operators_run_finer_where_the_format_is_lacking(phone: DeviceProfile):
    cpu, npu = phone.processor("cpu"), phone.processor("npu")
    assert running_format(cpu, ATTENTION, Format.W8A16) is Format.F32
    assert running_format(cpu, LINEAR, Format.W8A16) is Format.W8A16
    assert running_format(npu, ATTENTION, Format.W4) is Format.W8A16
    assert running_format(npu, ATTENTION, Format.W8A8) is Format.W8A8


@pytest.mark.parametrize("operator", list(Operator))
def test_an_unsupported_format_says_what_is_supported(phone: DeviceProfile, operator: Operator):
    with pytest.raises(UnsupportedError, match=r"npu does not run .* f32 .*w8a16"):
        running_format(phone.processor("npu"), operator, Format.F32)


def test_a_pass_wider_than_the_processor_takes_is_refused(phone: DeviceProfile):
    with pytest.raises(UnsupportedError, match="1 to 512 tokens on cpu"):
        cost(phone, "cpu", LINEAR, LinearShape(64, 64), Format.F32, 513)


@pytest.mark.parametrize(
    ("operator", "shape", "context", "message"),
    [
        (LINEAR, GlueShape(64), 0, "found GlueShape, expected LinearShape"),
        (ATTENTION, AttentionShape(9, 3, 64), 0, "context of attention"),
        (LINEAR, LinearShape(64, 64), 5, "context of linear"),
    ],
)
def test_a_senseless_question_is_refused(
    phone: DeviceProfile, operator: Operator, shape: Shape, context: int, message: str
):
    with pytest.raises(InputError, match=message):
        cost(phone, "cpu", operator, shape, Format.F32, 1, context)


def test_an_unknown_processor_is_refused(phone: DeviceProfile):
    with pytest.raises(InputError, match="no such processor"):
        cost(phone, "gpu", LINEAR, LinearShape(64, 64), Format.F32, 1)


def test_a_sub_layer_is_the_sum_of_its_operators(phone: DeviceProfile):
    parts = sub_layer_parts(SMOL, SubLayerKind.ATTENTION)
    assert parts == (
        (GLUE, GlueShape(576)),
        (LINEAR, LinearShape(576, (9 + 2 * 3) * 64)),
        (ATTENTION, AttentionShape(9, 3, 64)),
        (LINEAR, LinearShape(9 * 64, 576)),
    )
    total = sub_layer_cost(phone, "cpu", SMOL, SubLayerKind.ATTENTION, Format.W8A16, 4, 100)
    costs = [
        cost(phone, "cpu", op, shape, Format.W8A16, 4, 100 if op is ATTENTION else 0)
        for op, shape in parts
    ]
    assert total.us == pytest.approx(sum(part.us for part in costs))
    assert total.provenance is weakest({part.provenance for part in costs})


def test_gate_and_up_are_one_product():
    shapes = [shape for _, shape in sub_layer_parts(SMOL, SubLayerKind.MLP)]
    assert shapes == [GlueShape(576), LinearShape(576, 3072), LinearShape(1536, 576)]


def test_context_prices_attention_alone(phone: DeviceProfile):
    def us(kind: SubLayerKind, context: int) -> float:
        return sub_layer_us(phone, "cpu", SMOL, kind, Format.W8A16, 4, context)

    assert us(SubLayerKind.ATTENTION, 4000) > us(SubLayerKind.ATTENTION, 100)
    assert us(SubLayerKind.MLP, 4000) == us(SubLayerKind.MLP, 100)


@pytest.mark.parametrize(
    ("operator", "stand_in", "shape", "context"),
    [(EXACT, ATTENTION, AttentionShape(9, 3, 64), 300), (STREAMED, LINEAR, LinearShape(64, 64), 0)],
)
def test_what_a_profile_does_not_know_is_priced_as_its_kin_and_assumed(
    phone: DeviceProfile, operator: Operator, stand_in: Operator, shape: Shape, context: int
):
    asked = (shape, Format.W8A16, 4, context)
    answer, kin = (cost(phone, "cpu", op, *asked) for op in (operator, stand_in))
    assert answer.us == kin.us
    assert answer.provenance is Provenance.ASSUMED
    assert answer.basis == f"priced as {stand_in}: {kin.basis}"


def test_measured_streaming_and_exact_attention_speak_for_themselves(phone: DeviceProfile):
    (npu, cpu) = (phone.processor(name) for name in ("npu", "cpu"))
    supports = {**cpu.supports, STREAMED: (Format.W8A16,), EXACT: (Format.F32,)}
    cpu = msgspec.structs.replace(cpu, supports=supports)
    device = msgspec.structs.replace(
        with_points(
            phone,
            point(LINEAR, LinearShape(64, 64), 1, 10, fmt="w8a16"),
            point(STREAMED, LinearShape(64, 64), 1, 30, fmt="w8a16"),
            point(EXACT, AttentionShape(9, 3, 64), 1, 50, 100),
        ),
        processors=(cpu, npu),
    )
    streamed = cost(device, "cpu", STREAMED, LinearShape(64, 64), Format.W8A16, 1)
    exact = cost(device, "cpu", EXACT, AttentionShape(9, 3, 64), Format.W8A16, 1, 100)
    assert (streamed.us, exact.us) == (30, 50)
    with pytest.raises(UnsupportedError, match="does not run streamed_linear of a w4"):
        cost(device, "cpu", STREAMED, LinearShape(64, 64), Format.W4, 1)


def test_a_streamed_sub_layer_is_its_streamed_operators_and_one_call(phone: DeviceProfile):
    call = Quantity(value=170, source=Provenance.ASSUMED, cite="a test")
    processors = tuple(msgspec.structs.replace(p, stream_call_us=call) for p in phone.processors)
    device = msgspec.structs.replace(phone, processors=processors)
    kernel = AttentionKernel.EXACT
    parts = sub_layer_parts(SMOL, SubLayerKind.ATTENTION, attention=kernel, streamed=True)
    assert [op for op, _ in parts] == [GLUE, STREAMED, EXACT, STREAMED]
    total = sub_layer_cost(
        *(device, "cpu", SMOL, SubLayerKind.ATTENTION, Format.W8A16, 4, 100),
        attention=kernel,
        streamed=True,
    )
    costs = [
        cost(device, "cpu", op, shape, Format.W8A16, 4, 100 if op is EXACT else 0)
        for op, shape in parts
    ]
    assert total.us == pytest.approx(170 + sum(part.us for part in costs))
    assert total.provenance is Provenance.ASSUMED


def test_the_head_is_priced(phone: DeviceProfile):
    head = head_cost(phone, "cpu", SMOL, Format.W8A16, 1)
    assert head.us == head_us(phone, "cpu", SMOL, Format.W8A16, 1)
    assert head.us > 576 * 49152 / 43.9e9 * 1e6


def test_a_second_profile_does_not_see_the_answers_of_the_first(phone: DeviceProfile):
    shape = LinearShape(64, 64)
    first = with_points(phone, point(LINEAR, shape, 1, 10))
    second = with_points(phone, point(LINEAR, shape, 1, 20))
    assert cost(first, "cpu", LINEAR, shape, Format.F32, 1).us == 10
    assert cost(second, "cpu", LINEAR, shape, Format.F32, 1).us == 20


def test_answers_are_dropped_with_their_profile(phone: DeviceProfile):
    device = with_points(phone, point(LINEAR, LinearShape(64, 64), 1, 10))
    cost(device, "cpu", LINEAR, LinearShape(64, 64), Format.F32, 1)
    key = id(device)
    assert key in cost_module._TABLES
    del device
    gc.collect()
    assert key not in cost_module._TABLES


@given(
    k=st.integers(1, 20_000),
    n=st.integers(1, 200_000),
    fmt=st.sampled_from([Format.W8A16, Format.W8A8, Format.W4]),
    processor=st.sampled_from(["cpu", "npu"]),
    width=st.integers(1, 512),
)
def test_every_cost_is_positive_and_knows_where_it_is_from(
    k: int, n: int, fmt: Format, processor: str, width: int
):
    answer = cost(PHONE, processor, LINEAR, LinearShape(k, n), fmt, width)
    assert 0 < answer.us < 1e12
    assert answer.provenance in TRUST
    assert answer.basis


@pytest.mark.parametrize("fmt", [Format.W8A16, Format.W8A8])
@pytest.mark.parametrize("spec", [SMOL, MISTRAL], ids=["135M", "7B"])
def test_a_wider_pass_never_takes_less_time(phone: DeviceProfile, spec: ModelSpec, fmt: Format):
    for processor in ("cpu", "npu"):
        passes = [pass_ms(phone, processor, spec, fmt, width) for width in range(1, 129)]
        assert all(left <= right * (1 + 1e-9) for left, right in pairwise(passes))


def test_a_block_size_is_read_interpolated_or_held(phone: DeviceProfile):
    assert read_rate(phone, 2**19) == (4.0e9, Provenance.PAPER, "PI2 2.3.2 and table 1")
    between = read_rate(phone, 2**16)
    assert between.provenance is Provenance.INTERPOLATED
    assert 450e6 < between.bytes_per_s < 4.0e9
    beyond = read_rate(phone, 2**22)
    assert (beyond.bytes_per_s, beyond.provenance) == (4.0e9, Provenance.ROOFLINE)
    assert read_rate(phone, 2**19, ReadPattern.RANDOM).bytes_per_s == 3.5e9


def test_a_pattern_that_nobody_measured_is_refused(phone: DeviceProfile):
    reads = tuple(read for read in phone.storage.reads if read.pattern is ReadPattern.RANDOM)
    storage = msgspec.structs.replace(phone.storage, reads=reads)
    with pytest.raises(UnsupportedError, match="no sequential reads"):
        read_rate(msgspec.structs.replace(phone, storage=storage), 4096)


def test_four_bit_decoding_of_a_7b_comes_near_the_published_rate(phone: DeviceProfile):
    # PowerInfer-2, table 2: 12.4-12.9 tok/s
    assert 12.9 * 0.75 < 1e3 / pass_ms(phone, "cpu", MISTRAL, Format.W4, 1) < 12.9 * 1.1


@pytest.mark.parametrize("spec", [SMOL, MISTRAL], ids=["135M", "7B"])
def test_narrow_passes_belong_to_the_cpu_and_wide_ones_to_the_npu(
    phone: DeviceProfile, spec: ModelSpec
):
    narrow = {name: pass_ms(phone, name, spec, Format.W8A16, 1) for name in ("cpu", "npu")}
    wide = {name: pass_ms(phone, name, spec, Format.W8A16, 16) for name in ("cpu", "npu")}
    assert narrow["cpu"] < narrow["npu"]
    assert wide["npu"] < wide["cpu"]
