"""Profiles and recordings that do not belong together, or here: refused on one line that names both values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreload.assets import ASSETS
from foreload.backend.models.checkpoint import Checkpoint
from foreload.cli import main
from foreload.machine import machine_name, software
from foreload.profiler.schema import HardwareProfile
from foreload.shape import ModelShape

pytestmark = pytest.mark.integration


@pytest.fixture
def files(tmp_path: Path, make_profile: Any, make_trace: Any, write_trace: Any) -> Callable[..., list[str]]:
    """Flags of a profile and a recording; `meta`: other provenance of the profile."""

    def make(**meta: Any) -> list[str]:
        values = json.loads(make_profile().model_dump_json())
        values["meta"] |= {"machine": machine_name(), "software": software(), **meta}
        (tmp_path / "profile.json").write_text(json.dumps(values))
        write_trace(tmp_path / "trace.parquet", make_trace(requests=2, tokens=6))
        return ["--profile", str(tmp_path / "profile.json"), "--trace", str(tmp_path / "trace.parquet")]

    return make


def refused(capsys: Any, *args: str) -> str:
    assert main([*args]) in (1, 2)
    err: str = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1
    return err


def test_another_shape(files: Callable[..., list[str]], shape: ModelShape, capsys: Any) -> None:
    other = replace(shape, experts=16)
    flags = files(shape_hash=other.hash)
    text = refused(capsys, "simulate", *flags, "--cache-ratio", "0.5")
    assert f"profile.json: measured for model shape {other.hash}, but " in text
    assert f"trace.parquet is recorded from {shape.named}" in text


def bundled(folder: Path, **meta: Any) -> list[str]:
    """Flags of the bundled recording of mini and its profile, as if it were of this machine; `meta`: but for this."""
    profile = HardwareProfile.load(ASSETS / "dashboard" / "profile-cpu.json")
    changed = profile.meta.model_copy(update={"machine": machine_name(), "software": software(), **meta})
    profile.model_copy(update={"meta": changed}).save(folder / "p.json")
    return ["--profile", str(folder / "p.json"), "--trace", str(ASSETS / "dashboard" / "trace.parquet")]


def test_another_machine(tmp_path: Path, capsys: Any) -> None:
    text = refused(capsys, "validate", "mini", *bundled(tmp_path, machine="a 486"))
    assert f"measured on 'a 486', this machine is {machine_name()!r}" in text


def test_another_version(tmp_path: Path, capsys: Any) -> None:
    version = software()["foreload"]
    text = refused(capsys, "validate", "mini", *bundled(tmp_path, software={"foreload": "0.0.9"}))
    assert f"measured by Foreload 0.0.9, this is {version}" in text


@pytest.mark.parametrize("command", [("run", "mini", "--prompt", "x", "--tokens", "2"), ("serve", "mini")])
def test_what_another_machine_measured_decides_nothing(tmp_path: Path, command: tuple[str, ...], capsys: Any) -> None:
    flags = [*command, *bundled(tmp_path, machine="a 486")[:2], "--device", "cpu"]
    text = refused(capsys, *flags)
    assert f"measured on 'a 486', this machine is {machine_name()!r} (--assume-profile" in text
    if command[0] == "run":
        assert main([*flags, "--assume-profile"]) == 0
        assert "what is decided by it is assumed" in capsys.readouterr().err
        text = refused(capsys, *command, "--assume-profile")
        assert "--assume-profile goes with --profile" in text


def test_tuning_for_another_machine(files: Callable[..., list[str]], tmp_path: Path, capsys: Any) -> None:
    """It is allowed, and said; what another version measured is not, unless it is asked for."""
    flags = ("--slots", "14", "--no-study", "--out", str(tmp_path / "s.json"))
    assert main(["tune", *files(machine="a 486"), *flags]) == 0
    assert "that machine, which is not this one" in capsys.readouterr().out
    assert main(["tune", *files(), *flags]) == 0
    assert "not this one" not in capsys.readouterr().out
    old = files(software={"foreload": "0.0.9"})
    assert "measured by Foreload 0.0.9, this is" in refused(capsys, "tune", *old, *flags)
    assert main(["tune", *old, *flags, "--assume-profile", "--dry-run"]) == 0


@pytest.mark.parametrize("profile_of", ["recording", "model"])
def test_the_recording_of_another_model(
    profile_of: str, files: Callable[..., list[str]], shape: ModelShape, capsys: Any
) -> None:
    """Whatever the profile is of, the recording is named."""
    mini = Checkpoint.open("mini").shape
    flags = files(**({"shape_hash": mini.hash} if profile_of == "model" else {}))
    text = refused(capsys, "validate", "mini", *flags)
    assert f"trace.parquet: recorded from model shape {shape.named}, model 'mini' is {mini.named}" in text
    assert mini.named == f"{mini.hash} (8 MoE layers of 32 experts, top-4)"


@pytest.mark.parametrize(("value", "shown"), [("NaN", "nan"), ("-3.0", "-3.0"), ("Infinity", "inf")])
def test_impossible_times(files: Callable[..., list[str]], tmp_path: Path, capsys: Any, value: str, shown: str) -> None:
    flags = files()
    text = (tmp_path / "profile.json").read_text()
    first = json.dumps(json.loads(text)["measurements"][0]["p50_us"])
    (tmp_path / "profile.json").write_text(text.replace(f'"p50_us": {first}', f'"p50_us": {value}', 1))
    assert f"field 'measurements.0.p50_us' is {shown}" in refused(capsys, "simulate", *flags, "--cache-ratio", "0.5")


def test_a_profile_of_another_schema(files: Callable[..., list[str]], capsys: Any) -> None:
    text = refused(capsys, "simulate", *files(schema_version=7), "--cache-ratio", "0.5")
    assert "schema_version is 7: this Foreload reads" in text
