"""Device profiles: shipped ones load, files round-trip, broken ones say where."""

import contextlib
import math
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import FulcrumError, IncompatibleError, InputError
from profiles.profile import (
    SHAPE_OF,
    AttentionShape,
    DeviceProfile,
    LinearShape,
    Point,
    Quantity,
    digest,
    each_quantity,
    load_profile,
    parse_profile,
    provenance_counts,
    save_profile,
    shipped_profiles,
)
from profiles.toml_text import toml_text
from profiles.words import Format, Operator, Provenance

SHIPPED = ["honor500pro", "honormagicv5", "oneplus12"]

measured_quantities = st.builds(
    Quantity,
    value=st.floats(1e-3, 1e12),
    source=st.just(Provenance.MEASURED),
    cite=st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=40),
    spread=st.floats(0, 2),
    date=st.dates().map(str),
    versions=st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=8), max_size=2),
)
quoted_quantities = st.builds(
    Quantity,
    value=st.floats(1e-3, 1e12),
    source=st.sampled_from([Provenance.PAPER, Provenance.DERIVED, Provenance.ASSUMED]),
    cite=st.text(min_size=1, max_size=40),
)
dimensions = st.integers(1, 2**24)
linear_points = st.builds(
    Point,
    processor=st.just("cpu"),
    operator=st.just(Operator.LINEAR),
    format=st.sampled_from([fmt for fmt in Format if fmt is not Format.W8]),
    shape=st.builds(LinearShape, k=dimensions, n=dimensions),
    width=st.integers(1, 512),
    time_us=measured_quantities | quoted_quantities,
)
attention_points = st.builds(
    Point,
    processor=st.just("cpu"),
    operator=st.just(Operator.ATTENTION),
    format=st.just(Format.F32),
    shape=st.builds(AttentionShape, heads=dimensions, kv_heads=dimensions, head_dim=dimensions),
    width=st.integers(1, 512),
    context=st.integers(0, 2**24),
    time_us=measured_quantities | quoted_quantities,
)


def setting(point: Point) -> tuple[object, ...]:
    return (point.operator, point.format, point.shape, point.width, point.context)


@pytest.fixture(scope="module")
def oneplus12() -> DeviceProfile:
    return load_profile("oneplus12")


@pytest.fixture
def text(oneplus12: DeviceProfile, tmp_path: Path) -> str:
    save_profile(oneplus12, tmp_path / "written.toml")
    return (tmp_path / "written.toml").read_text(encoding="utf-8")


def test_three_phones_are_shipped():
    assert shipped_profiles() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_survives_saving_and_loading(name: str, tmp_path: Path):
    profile = load_profile(name)
    save_profile(profile, tmp_path / "copy.toml")
    copy = load_profile(tmp_path / "copy.toml")
    assert copy == profile
    assert digest(copy) == digest(profile)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_claims_no_measurement(name: str):
    assert provenance_counts(load_profile(name))[Provenance.MEASURED] == 0


def test_every_number_of_a_profile_is_counted_once(oneplus12: DeviceProfile):
    assert sum(provenance_counts(oneplus12).values()) == len(list(each_quantity(oneplus12)))


def test_saving_twice_gives_the_same_bytes(oneplus12: DeviceProfile, tmp_path: Path):
    save_profile(oneplus12, tmp_path / "one.toml")
    save_profile(load_profile(tmp_path / "one.toml"), tmp_path / "two.toml")
    assert (tmp_path / "one.toml").read_bytes() == (tmp_path / "two.toml").read_bytes()


def test_saving_leaves_only_the_file(oneplus12: DeviceProfile, tmp_path: Path):
    save_profile(oneplus12, tmp_path / "one.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["one.toml"]


def test_saving_over_a_folder_is_refused_and_leaves_nothing(
    oneplus12: DeviceProfile, tmp_path: Path
):
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="cannot write profile"):
        save_profile(oneplus12, tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_profile_that_would_not_load_is_not_saved(oneplus12: DeviceProfile, tmp_path: Path):
    broken = msgspec.structs.replace(
        oneplus12, cycle_us=Quantity(value=math.nan, source=Provenance.ASSUMED, cite="x")
    )
    with pytest.raises(InputError, match=r"\$\.cycle_us\.value"):
        save_profile(broken, tmp_path / "one.toml")
    assert list(tmp_path.iterdir()) == []


@given(points=st.lists(linear_points | attention_points, max_size=8, unique_by=setting))
def test_any_points_survive_saving_and_loading(
    points: list[Point], tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    profile = msgspec.structs.replace(load_profile("oneplus12"), points=tuple(points))
    save_profile(profile, path)
    assert load_profile(path) == profile


scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
documents = st.dictionaries(
    st.text(),
    st.recursive(
        scalars,
        lambda inner: (
            st.lists(scalars, max_size=3)
            | st.dictionaries(st.text(), inner, max_size=3)
            | st.lists(st.dictionaries(st.text(), inner, max_size=2), max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(documents)
def test_written_toml_reads_back_as_the_same_document(document: dict[str, object]):
    assert tomllib.loads(toml_text(document)) == document


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'oneplus12'"):
        load_profile("oneplus13")


@pytest.mark.parametrize("name", ["missing.toml", "./missing", "folder/missing.toml"])
def test_a_missing_file_is_reported_with_what_else_there_is(name: str):
    with pytest.raises(InputError, match=r"missing.*oneplus12"):
        load_profile(name)


def test_a_folder_is_not_a_profile(tmp_path: Path):
    with pytest.raises(InputError, match="cannot read profile"):
        load_profile(tmp_path)


def test_text_of_another_encoding_is_refused(tmp_path: Path):
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(InputError, match="not UTF-8"):
        load_profile(tmp_path / "latin.toml")


BROKEN = [
    ("cycle_us = {", "cycle_us = ", "not valid TOML"),
    ('format = "1.0"', "format = 1", r"\$\.format: not a device profile"),
    ('format = "1.0"\n', "", r"\$\.format: not a device profile"),
    (
        "threads = 4",
        'threads = "4"',
        r"\$\.processors\[0\]\.threads: .*found `str`.*expected `int`",
    ),
    ("threads = 4", "threads = 0", r"\$\.processors\[0\]\.threads: .*>= 1"),
    ("threads = 4", "treads = 4", r"\$\.processors\[0\].*treads"),
    ("launch_us = { value = 10,", "launch_us = { value = nan,", r"\$\.processors\[1\]\.launch_us"),
    ("launch_us = { value = 10,", "launch_us = { value = inf,", r"\$\.processors\[1\]\.launch_us"),
    ("launch_us = { value = 10,", "launch_us = { value = -1,", r"\$\.processors\[1\]\.launch_us"),
    ("launch_us = { value = 10,", 'launch_us = { value = "x",', r"\$\.processors\[1\]\.launch_us"),
    ("launch_us = { value = 10, ", "launch_us = { ", r"\$\.processors\[1\]\.launch_us.*value"),
    ("{ value = 56000000000,", "{ value = 0,", r"\$\.processors\[1\]\.bandwidth_bytes.*above zero"),
    ('{ value = 4.72, source = "paper"', '{ value = 4.72, source = "rumour"', "power_watt"),
    ('{ value = 4.72, source = "paper"', '{ value = 4.72, source = "roofline"', "not one of"),
    ('{ value = 4.72, source = "paper"', '{ value = 4.72, source = "measured"', "needs `spread`"),
    ('id = "npu"', 'id = "cpu"', r"\$\.processors\[1\]\.id: id is used twice"),
    ('kind = "cpu"', 'kind = "npu"', r"\$\.processors: no processor of kind `cpu`"),
    ("max_width = 1024", "max_width = 1000", r"\$\.processors\[1\]\.max_width.*multiple"),
    ("cold = {", "mild = {", r"\$\.thermal: no thermal state `cold`"),
    (
        "{ value = 6442450944,",
        "{ value = 1e15,",
        r"\$\.memory\.default_budget_bytes: budget",
    ),
    ("block_bytes = 4096", "block_bytes = 1", r"\$\.storage\.reads\[2\]\.block_bytes"),
    ('["k", "n", "width"', '["n", "k", "width"', r"\$\.points\[0\]\.columns.*k, n, width, time_us"),
    ("[2048, 2048, 64, 900]", "[2048, 2048, 64]", r"\$\.points\[0\]\.rows\[0\].*found 3 numbers"),
    ("[2048, 2048, 64, 900]", "[2048, 2048, 64, 0]", r"\$\.points\[0\]\.rows\[0\]\.time_us"),
    ("[2048, 2048, 64, 900]", "[2048, 2048, 64, nan]", r"\$\.points\[0\]\.rows\[0\]\.time_us"),
    ("[2048, 2048, 64, 900]", "[2048, 0, 64, 900]", r"\$\.points\[0\]\.rows\[0\]\.shape\.n"),
    ("[2048, 2048, 64, 900]", "[2048, 2.5, 64, 900]", r"\$\.points\[0\]\.rows\[0\]\.shape\.n"),
    ("[2048, 2048, 64, 900]", "[2048, 2048, 4096, 900]", r"\$\.points\[0\]\.rows\[0\]: width"),
    ("[2048, 8192, 64, 1500]", "[2048, 2048, 64, 1500]", r"\$\.points\[0\]\.rows\[1\].*twice"),
    ('processor = "npu"', 'processor = "gpu"', r"\$\.points\[0\]\.rows\[0\].*unknown processor"),
    ('format = "w8a8"', 'format = "f32"', r"\$\.points\[0\]\.rows\[0\].*does not list"),
    ('format = "w8a8"', 'format = "q4"', r"\$\.points\[0\]\.format"),
    ('linear = ["f32", ', 'linear = ["f16", ', r"\$\.processors\[0\]\.supports"),
    ("w4 = { value = 180000000000", "# w4 = { value = 1", r"peak_ops_per_s.*w4"),
]


@pytest.mark.parametrize(("old", "new", "message"), BROKEN)
def test_a_broken_profile_says_where(text: str, old: str, new: str, message: str):
    assert old in text
    with pytest.raises(InputError, match=message):
        parse_profile(text.replace(old, new, 1), "broken.toml")


def test_an_error_names_file_field_finding_expectation_and_next_step(text: str):
    with pytest.raises(InputError) as caught:
        parse_profile(text.replace("threads = 4", 'threads = "4"'), "broken.toml")
    error = caught.value
    assert error.where == "broken.toml $.processors[0].threads"
    assert (error.found, error.expected) == ("`str`", "`int`")
    assert error.hint


def test_another_major_version_is_incompatible(text: str):
    with pytest.raises(IncompatibleError, match=r"2\.0.*1\.x"):
        parse_profile(text.replace('format = "1.0"', 'format = "2.0"', 1), "new.toml")


@pytest.mark.parametrize("nasty", ["a=" + "[" * 5000, "a = 1" + "0" * 5000, "\x00", "a = 1\na = 2"])
def test_hostile_text_is_an_input_error(nasty: str):
    with pytest.raises(InputError, match=r"not valid TOML|not a device profile"):
        parse_profile(nasty, "hostile.toml")


@given(cut=st.integers(0, 10_000), junk=st.text(max_size=6))
def test_any_damage_is_a_clear_error_or_harmless(cut: int, junk: str):
    path = Path(__file__).parents[1] / "profiles/devices/oneplus12.toml"
    whole = path.read_text(encoding="utf-8")
    damaged = whole[:cut] + junk + whole[cut + len(junk) :]
    # anything but an error of ours would fail the test
    with contextlib.suppress(FulcrumError):
        parse_profile(damaged, "damaged.toml")


def test_an_unknown_processor_is_answered_with_the_nearest(oneplus12: DeviceProfile):
    assert oneplus12.processor("npu").width_step == 32
    with pytest.raises(InputError, match="did you mean 'npu'"):
        oneplus12.processor("npu0")


def test_every_operator_has_a_shape():
    assert set(SHAPE_OF) == set(Operator)
