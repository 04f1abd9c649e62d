"""The host's profile: what it holds, when it is measured again, what an interruption leaves."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from planner import host_kernels
from planner.cache import cache_folder
from planner.cost import sub_layer_cost, sub_layer_parts, sub_layer_us
from planner.host_glue import fit, with_remainder
from planner.host_profile import (
    METHOD,
    Findings,
    cached_host_profile,
    host_profile,
    measure_host,
)
from planner.streamed_probe import call_time
from profiles.errors import InputError
from profiles.measure import Kernel, Progress, Stamp, cpu_description, measured
from profiles.points import AttentionShape, GlueShape, LinearShape, Point, Quantity, Shape
from profiles.profile import ReadPattern, StorageRead, each_quantity, load_profile, save_profile
from profiles.words import Format, Operator, Provenance, SubLayerKind

SPEC = host_kernels.probe_spec(
    layers=2, hidden=64, attention=AttentionShape(4, 2, 16), max_context=2048
)
STAMP = Stamp(cite=METHOD, versions={"onnxruntime": "1"})


def point(
    operator: Operator,
    shape: Shape,
    us: float,
    width: int = 1,
    context: int = 0,
    fmt: Format = Format.F32,
    processor: str = "cpu",
) -> Point:
    return Point(
        processor=processor,
        operator=operator,
        format=fmt,
        shape=shape,
        width=width,
        context=context,
        time_us=measured([us], STAMP),
    )


def whole_pass(us: float, width: int, context: int) -> Point:
    glue = GlueShape(SPEC.hidden)
    return point(Operator.GLUE, glue, us, width, context, Format.W8A16, "pass")


class FakeMeasure:
    """Counts how often it is asked; products take their weights' number in nanoseconds."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, stamp: Stamp, threads: int, budget_s: float, progress: object) -> Findings:
        del budget_s, progress
        self.calls += 1
        number = measured([5.0 / threads], stamp)
        shapes = (LinearShape(64, 64), LinearShape(256, 256))
        points = [
            point(Operator.LINEAR, shape, shape.k * shape.n * width / 1000, width, fmt=fmt)
            for fmt in (Format.F32, Format.W8A16)
            for shape in shapes
            for width in (1, 8)
        ]
        points.append(point(Operator.ATTENTION, AttentionShape(4, 2, 16), 7.0, 1, 128))
        points.append(point(Operator.GLUE, GlueShape(64), 2.0))
        read = StorageRead(4096, ReadPattern.SEQUENTIAL, True, measured([1e9], stamp))
        return Findings(
            points=tuple(points),
            reads=(read,),
            bandwidth_bytes_per_s=measured([1e10], stamp),
            launch_us=number,
            sync_us=number,
            cycle_us=number,
        )


def interrupted(*_given: object) -> Findings:
    raise KeyboardInterrupt


@pytest.fixture
def fake() -> FakeMeasure:
    return FakeMeasure()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "profiles" / "host.toml"


def test_the_profile_round_trips_and_every_number_says_its_source(
    kept: Path, fake: FakeMeasure
) -> None:
    profile = host_profile(kept, threads=2, measure=fake)
    assert load_profile(kept) == profile
    assert (profile.name, profile.soc) == ("host", cpu_description())
    (cpu,) = profile.processors
    assert (cpu.id, cpu.threads, cpu.width_step) == ("cpu", 2, 1)
    sources = {path: quantity.source for path, quantity in each_quantity(profile)}
    assert sources["$.cycle_us"] is Provenance.MEASURED
    assert sources["$.memory.default_budget_bytes"] is Provenance.DERIVED
    assert sources["$.thermal.hot"] is Provenance.ASSUMED


def test_a_peak_is_the_best_rate_at_the_widest_product(kept: Path, fake: FakeMeasure) -> None:
    peaks = host_profile(kept, threads=1, measure=fake).processors[0].peak_ops_per_s
    # n weights at width 8 take 8 n nanoseconds; w8a16 multiplies two byte rows
    assert peaks[Format.F32].value == pytest.approx(2e9)
    assert peaks[Format.W8A16].value == pytest.approx(4e9)


def test_the_cost_model_prices_a_model_on_it(kept: Path, fake: FakeMeasure) -> None:
    profile = host_profile(kept, threads=1, measure=fake)
    cost = sub_layer_cost(profile, "cpu", SPEC, SubLayerKind.MLP, Format.W8A16, 4, 0)
    assert cost.us > 0


def test_a_second_call_measures_nothing(kept: Path, fake: FakeMeasure) -> None:
    assert cached_host_profile(kept, threads=2) is None
    first = host_profile(kept, threads=2, measure=fake)
    assert host_profile(kept, threads=2, measure=fake) == first
    assert cached_host_profile(kept, threads=2) == first
    assert fake.calls == 1


def test_refresh_measures_again(kept: Path, fake: FakeMeasure) -> None:
    for _ in range(2):
        host_profile(kept, refresh=True, threads=2, measure=fake)
    assert fake.calls == 2


def test_other_threads_measure_again(kept: Path, fake: FakeMeasure) -> None:
    assert host_profile(kept, threads=2, measure=fake).processors[0].threads == 2
    assert host_profile(kept, threads=1, measure=fake).processors[0].threads == 1
    assert fake.calls == 2


@pytest.mark.parametrize("change", ["chip", "onnxruntime", "method"])
def test_another_chip_or_software_measures_again(
    kept: Path, fake: FakeMeasure, change: str
) -> None:
    profile = host_profile(kept, threads=2, measure=fake)
    cycle = profile.cycle_us
    changed = {
        "chip": msgspec.structs.replace(profile, soc="another, 2 logical CPUs"),
        "onnxruntime": msgspec.structs.replace(
            profile, cycle_us=msgspec.structs.replace(cycle, versions={"onnxruntime": "0.1"})
        ),
        "method": msgspec.structs.replace(
            profile, cycle_us=msgspec.structs.replace(cycle, cite="method 0")
        ),
    }[change]
    save_profile(changed, kept)
    assert cached_host_profile(kept, threads=2) is None
    assert host_profile(kept, threads=2, measure=fake) == profile
    assert fake.calls == 2


@pytest.mark.parametrize("content", [b"", b"format = ", b'format = "9.0"', b"\xff\xfe"])
def test_a_damaged_file_is_measured_again_and_told(
    kept: Path, fake: FakeMeasure, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    kept.parent.mkdir()
    kept.write_bytes(content)
    profile = host_profile(kept, threads=2, measure=fake)
    assert load_profile(kept) == profile
    assert fake.calls == 1
    assert "damaged" in caplog.text


def test_an_interruption_leaves_no_file(kept: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        host_profile(kept, threads=2, measure=interrupted)
    assert list(kept.parent.iterdir()) == []


def test_an_interruption_keeps_the_earlier_profile(kept: Path, fake: FakeMeasure) -> None:
    first = host_profile(kept, threads=2, measure=fake)
    with pytest.raises(KeyboardInterrupt):
        host_profile(kept, refresh=True, threads=2, measure=interrupted)
    assert cached_host_profile(kept, threads=2) == first
    assert [file.name for file in kept.parent.iterdir()] == ["host.toml"]


def test_a_place_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, fake: FakeMeasure
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot make the folder"):
        host_profile(tmp_path / "file" / "host.toml", threads=2, measure=fake)
    assert fake.calls == 0


def test_too_little_measured_says_what_to_do(kept: Path, fake: FakeMeasure) -> None:
    def hasty(*_given: object) -> Findings:
        findings = fake(STAMP, 1, 0, None)
        return msgspec.structs.replace(findings, points=findings.points[:1])

    with pytest.raises(InputError, match="allow more seconds"):
        host_profile(kept, threads=1, measure=hasty)
    assert not kept.exists()


def test_the_default_place_is_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeMeasure
) -> None:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    host_profile(threads=1, measure=fake)
    assert (tmp_path / "profiles" / "host-1.toml").is_file()


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement of tiny operators, so that all of it runs in a second or two."""
    parts = [part for kind in SubLayerKind for part in sub_layer_parts(SPEC, kind)]
    products = {shape: 2 for _, shape in parts if isinstance(shape, LinearShape)}
    monkeypatch.setattr(host_kernels, "LINEAR", products)
    monkeypatch.setattr(host_kernels, "STREAMED", products)
    monkeypatch.setattr(host_kernels, "POOL_BYTES", 2**17)
    monkeypatch.setattr(host_kernels, "ATTENTION", {AttentionShape(4, 2, 16): 2})
    monkeypatch.setattr(host_kernels, "CONTEXTS", (host_kernels.PROBE_CONTEXT,))
    monkeypatch.setattr(host_kernels, "GLUE", (GlueShape(64),))
    monkeypatch.setattr(host_kernels, "PROBE", SPEC)
    monkeypatch.setattr("planner.host_profile.BLOCK_BYTES", (4096,))
    monkeypatch.setattr("planner.host_profile.READER_BYTES", 4096)
    monkeypatch.setattr("planner.host_profile._STORAGE_S", 0.1)
    monkeypatch.setattr("planner.host_profile._BESIDE_S", 0.1)


def fake_kernels(
    kernels: Sequence[Kernel],
    *,
    budget_s: float,
    stamp: Stamp,
    progress: Callable[[Progress], None] | None,
) -> list[Point]:
    """Runs each kernel once and says that it took 100 us for each row."""
    del budget_s
    assert progress is not None
    points: list[Point] = []
    for count, kernel in enumerate(kernels):
        kernel.run()
        progress(Progress(count + 1, len(kernels), 0.0))
        time_us = measured([100.0 * kernel.width], stamp)
        names = ("processor", "operator", "format", "shape", "width", "context")
        points.append(Point(**{name: getattr(kernel, name) for name in names}, time_us=time_us))
    return points


def test_measuring_runs_every_kernel_and_divides_by_its_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    monkeypatch.setattr("planner.host_profile.measure_kernels", fake_kernels)
    heard: list[tuple[int, int]] = []
    profile = host_profile(
        threads=1, progress=lambda done, total: heard.append((done, total)), measure=measure_host
    )
    assert heard[-1][0] == heard[-1][1]
    assert {p.processor for p in profile.points} == {"cpu"}
    products = [p for p in profile.points if p.operator is Operator.LINEAR]
    eight_bit = [p for p in products if p.format is Format.W8A16]
    assert {p.width for p in eight_bit} == set(host_kernels.WIDTHS)
    assert {p.time_us.value / p.width for p in eight_bit} == {50.0}
    assert {p.format for p in products} == set(Format)
    # grouped again after being measured in another order, so that the file stays small
    assert [p.operator for p in profile.points] == sorted(
        (p.operator for p in profile.points),
        key=["linear", "streamed_linear", "attention", "exact_attention", "glue"].index,
    )
    cpu = profile.processors[0]
    assert cpu.supports[Operator.STREAMED_LINEAR] == (Format.W8A16, Format.W8A8)
    assert cpu.supports[Operator.EXACT_ATTENTION] == (Format.F32,)
    assert cpu.stream_call_us is not None
    assert profile.storage.reading_slowdown is not None
    assert profile.storage.reading_slowdown.value >= 1
    assert [file.name for file in tmp_path.iterdir()] == ["profiles"]


def parts_alone(width: int, us: float) -> list[Point]:
    """Every operator of a layer of ``SPEC``, each taking ``us``; glue is one of them."""
    parts = {part for kind in SubLayerKind for part in sub_layer_parts(SPEC, kind)}
    points: list[Point] = []
    for operator, shape in parts:
        fmt = Format.W8A16 if operator is Operator.LINEAR else Format.F32
        context = 512 if operator is Operator.ATTENTION else 0
        points.append(point(operator, shape, us, width, context, fmt))
    return points


def layer_us(us: float) -> float:
    return us * sum(len(sub_layer_parts(SPEC, kind)) for kind in SubLayerKind)


def test_glue_takes_up_what_passes_take_beyond_their_operators(
    kept: Path, fake: FakeMeasure
) -> None:
    alone = [entry for width in (1, 4, 16) for entry in parts_alone(width, 10.0 * width)]
    passes = [whole_pass(40.0, 1, 0)]
    for width in (1, 4, 16):
        more_us = 4 * (3.0 + 0.5 * width)
        passes.append(whole_pass(40 + 2 * layer_us(10.0 * width) + more_us, width, 512))
    remainder = fit(alone, passes, SPEC)
    assert remainder.fixed_us == pytest.approx(3.0)
    assert remainder.row_us * SPEC.hidden == pytest.approx(0.5)
    raised = with_remainder(alone, passes, SPEC)
    profile = msgspec.structs.replace(host_profile(kept, threads=1, measure=fake), points=raised)
    for entry in passes[1:]:
        layer = sum(
            sub_layer_us(profile, "cpu", SPEC, kind, Format.W8A16, entry.width, 512)
            for kind in SubLayerKind
        )
        assert 40 + 2 * layer == pytest.approx(entry.time_us.value)
    glue = next(entry for entry in raised if entry.operator is Operator.GLUE)
    assert glue.time_us.source is Provenance.DERIVED


def test_passes_faster_than_their_operators_take_nothing_off_glue() -> None:
    alone = [entry for width in (1, 4) for entry in parts_alone(width, 10.0)]
    passes = [whole_pass(0.1, 1, 0), whole_pass(5.0, 1, 512), whole_pass(5.0, 4, 512)]
    assert fit(alone, passes, SPEC) == (0.0, 0.0)


def test_a_streamed_call_is_what_it_takes_beyond_its_operators() -> None:
    points = [
        point(operator, shape, 30.0, width, 0, fmt)
        for width in (1, 4)
        for operator, shape in sub_layer_parts(SPEC, SubLayerKind.MLP, streamed=True)
        for fmt in (Format.F32 if operator is Operator.GLUE else Format.W8A16,)
    ]
    glue = GlueShape(SPEC.hidden)
    calls = [
        point(Operator.GLUE, glue, 90.0 + beyond, width, 0, Format.W8A16, "stream")
        for width, beyond in ((1, 100.0), (4, 140.0), (8, 5000.0))
    ]
    found = call_time(points, calls, SPEC)
    assert found is not None
    assert found.value == pytest.approx(120.0)
    assert call_time([], calls, SPEC) is None


@pytest.mark.parametrize("kept_passes", [0, 1, 2])
def test_too_few_passes_leave_glue_as_measured(kept_passes: int) -> None:
    alone = parts_alone(1, 10.0)
    passes = [whole_pass(40.0, 1, 0), whole_pass(900.0, 1, 512)][:kept_passes]
    values = [entry.time_us.value for entry in with_remainder(alone, passes, SPEC)]
    assert values == [10.0] * len(alone)


def test_measuring_the_runtime_gives_positive_numbers() -> None:
    numbers: list[Quantity] = [
        host_kernels.cycle_time(STAMP, 1, repeats=4),
        host_kernels.launch_time(STAMP, 1, nodes=8, repeats=4),
        host_kernels.call_time(STAMP, 1, repeats=4),
        host_kernels.memory_bandwidth(STAMP, 2, array_bytes=2**20),
    ]
    assert all(number.value > 0 for number in numbers)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FULCRUM_CACHE": "{}/own", "XDG_CACHE_HOME": "{}/xdg", "HOME": "{}/home"}, "own"),
        ({"XDG_CACHE_HOME": "{}/xdg", "HOME": "{}/home"}, "xdg/fulcrum"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "{}/home"}, "home/.cache/fulcrum"),
        ({"HOME": "{}/home"}, "home/.cache/fulcrum"),
    ],
)
def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("FULCRUM_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert cache_folder() == tmp_path / expected
    assert cache_folder().is_dir()


def test_cache_folder_works_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FULCRUM_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder().is_dir()


def test_a_cache_that_cannot_be_written_is_replaced_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        first, second = cache_folder(), cache_folder()
    assert first == second
    assert first.parent == tmp_path
    assert os.access(first, os.W_OK)
    assert len(caplog.records) == 1
