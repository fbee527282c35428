"""Profile files: written and read back, and refused by field when they cannot be right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foreload.cli.profile import _show
from foreload.dashboard.report import profile_rows
from foreload.errors import FileError, MismatchError
from foreload.profiler.schema import PROFILE_SCHEMA, HardwareProfile, Measurement, coordinate
from foreload.profiler.stats import PARTS, averaged, middle_of_each, summarise, varied
from foreload.shape import ModelShape
from foreload.simulator.lookup import points_of

MakeProfile = Callable[..., HardwareProfile]


@pytest.fixture
def path(tmp_path: Path, make_profile: MakeProfile) -> Path:
    path = tmp_path / "profile.json"
    make_profile().save(path)
    return path


def spoil(path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """The one line with which the changed file is refused."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(FileError) as caught:
        HardwareProfile.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


@pytest.mark.unit
def test_round_trip(path: Path, make_profile: MakeProfile) -> None:
    assert HardwareProfile.load(path) == make_profile()
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.unit
def test_a_measured_profile_round_trips(profiled: Any, tmp_path: Path) -> None:
    profiled.profile.save(tmp_path / "p.json")
    assert HardwareProfile.load(tmp_path / "p.json") == profiled.profile


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[1]", "must be an object"),
        ("\xff", "is not valid JSON"),
    ],
)
def test_what_is_no_profile_at_all(path: Path, text: str, said: str) -> None:
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FileError, match=said) as caught:
        HardwareProfile.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.unit
def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="profile cannot be read: No such file"):
        HardwareProfile.load(tmp_path / "none.json")


@pytest.mark.unit
def test_a_cut_file_is_refused_wherever_it_ends(path: Path) -> None:
    whole = path.read_bytes().rstrip()
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        with pytest.raises(FileError, match="is not valid JSON"):
            HardwareProfile.load(path)


@pytest.mark.unit
@pytest.mark.parametrize("field", ["p50_us", "p95_us", "gpu_us"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "fast", None])
def test_impossible_times(path: Path, field: str, value: Any) -> None:
    message = spoil(path, lambda profile: profile["measurements"][3].update({field: value}))
    assert f"field 'measurements.3.{field}' is {value!r}" in message


@pytest.mark.unit
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cores", 0),
        ("expert_bytes", -5),
        ("dtype", "int3"),
        ("device", "tpu"),
        ("noise_pct", float("nan")),
        ("emulated_link_bytes_per_s", 0),
        ("mode", "slow"),
    ],
)
def test_impossible_provenance(path: Path, field: str, value: Any) -> None:
    message = spoil(path, lambda profile: profile["meta"].update({field: value}))
    assert f"field 'meta.{field}' is {value!r}" in message


@pytest.mark.unit
def test_other_schema(path: Path) -> None:
    message = spoil(path, lambda profile: profile["meta"].update(schema_version=99))
    assert f"schema_version is 99: this Foreload reads {PROFILE_SCHEMA}" in message


@pytest.mark.unit
def test_missing_and_unknown_fields(path: Path) -> None:
    assert "field 'meta.shape_hash' is missing" in spoil(path, lambda profile: profile["meta"].pop("shape_hash"))


@pytest.mark.unit
def test_unknown_field_lists_the_known(path: Path) -> None:
    message = spoil(path, lambda profile: profile.update(speed=9))
    assert "unknown field 'speed': known are meta, measurements" in message


@pytest.mark.unit
def test_repeats_are_at_least_one(path: Path) -> None:
    message = spoil(path, lambda profile: profile["measurements"][0].update(repeats=0))
    assert "field 'measurements.0.repeats' is 0" in message


@pytest.mark.unit
def test_points_by_coordinates(make_profile: MakeProfile) -> None:
    profile = make_profile()
    assert len(profile.points("experts_cpu", threads=1)) == 2
    assert profile.points("experts_cpu", threads=1, experts=2)[0].p50_us == 120.0
    with pytest.raises(FileError, match=r"no measurement of 'experts_cpu' at {'threads': 64}: it holds .*attention"):
        profile.points("experts_cpu", threads=64)
    with pytest.raises(FileError, match="no measurement of 'draft' at any point"):
        profile.points("draft")


@pytest.mark.unit
def test_another_model_names_both(make_profile: MakeProfile, shape: ModelShape) -> None:
    profile, other = make_profile(), replace(shape, experts=16)
    profile.check_model(shape, "float32")
    with pytest.raises(MismatchError) as caught:
        profile.check_model(other, "float32")
    assert shape.hash in str(caught.value)
    assert other.hash in str(caught.value)
    assert caught.value.exit_code == 2
    with pytest.raises(MismatchError, match="measured in float32, this run uses bfloat16"):
        profile.check_model(shape, "bfloat16")


@pytest.mark.unit
def test_a_folder_that_cannot_be_written(tmp_path: Path, make_profile: MakeProfile) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"p.json: cannot be written"):
        make_profile().save(tmp_path / "file" / "p.json")


@pytest.mark.unit
def test_tables_name_expert_formats(make_profile: MakeProfile, capsys: pytest.CaptureFixture[str]) -> None:
    profile = make_profile()
    points = [Measurement(probe="gpu_format", at={"format": at}, p50_us=1, p95_us=1, repeats=1) for at in range(6)]
    profile = profile.model_copy(update={"measurements": tuple(points)})
    [row] = profile_rows(profile)
    assert row["at"] == "format fp32, bf16, int8, fp8, mxfp4, fp8_tile"
    _show(Console(width=100), {"file": "p.json", **profile.model_dump(mode="json")}, [])
    assert "format mxfp4" in capsys.readouterr().out
    assert coordinate("experts", 4) == "4"


@pytest.mark.unit
def test_what_happens_now_and_then_is_in_the_mean(make_profile: MakeProfile) -> None:
    """A step pays for it; the longest hundredth, which goes by chance, counts as the longest of the others does."""
    usual = [10.0] * 90 + [40.0] * 9
    found = averaged("embed", [*usual, 5000.0])
    assert (found.p50_us, found.mean_us, found.gpu_mean_us) == (10.0, 13.0, None)
    assert found.cost_us == (13.0, 0.0)
    head = averaged("head", [1.0], [2.0, 2.0, 5.0])
    assert head.cost_us == (1.0, pytest.approx(2.0))
    plain = summarise("copy", usual)
    assert plain.cost_us == (10.0, 0.0)
    assert "mean_us" not in plain.model_dump()
    several = middle_of_each([found, averaged("embed", [20.0] * 50), averaged("embed", [15.0] * 50), plain])
    assert [one.mean_us for one in several] == [pytest.approx((1300 + 1000 + 750) / 200), None]
    profile = make_profile()
    named = profile.model_copy(update={"measurements": (found, head)})
    assert HardwareProfile.model_validate_json(named.model_dump_json()) == named
    assert point_costs(named) == {"embed": (13_000, 0), "head": (1_000, 2_000)}


def point_costs(profile: HardwareProfile) -> dict[str, tuple[int, int]]:
    """What the cost model takes of each measurement."""
    return {m.probe: (p.host_ns, p.gpu_ns) for m in profile.measurements for p in points_of(m.probe, [m])}


@pytest.mark.unit
def test_how_samples_are_spread() -> None:
    """As many parts of as many samples, ascending; of several measurements those of all samples."""
    found = varied("experts_cpu", [float(us) for us in range(100, 100 + 10 * PARTS)], experts=1, threads=1)
    assert found.parts_us is not None
    assert len(found.parts_us) == PARTS
    assert found.parts_us[0] == pytest.approx(104.5)
    assert list(found.parts_us) == sorted(found.parts_us)
    assert sum(found.parts_us) / PARTS == pytest.approx(found.mean_us, rel=1e-3)
    assert varied("experts_cpu", [1.0] * (PARTS - 1), experts=1, threads=1).parts_us is None
    longer = varied("experts_cpu", [500.0] * 10 * PARTS, experts=1, threads=1)
    both = middle_of_each([longer, found])[0].parts_us
    assert both is not None
    assert both[PARTS // 2 :] == (500.0,) * (PARTS // 2)
    assert both[0] == pytest.approx((found.parts_us[0] + found.parts_us[1]) / 2, abs=0.01)
