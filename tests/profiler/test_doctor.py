"""What doctor says of machines: parsed, judged, printed; and the lines through measurements."""

from __future__ import annotations

import json
import mmap
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreload.cli import main
from foreload.errors import MismatchError
from foreload.machine import machine_name
from foreload.profiler import doctor, transfers
from foreload.profiler.doctor import Examined, nominal_bytes_per_s, problems
from foreload.profiler.fits import fits, line
from foreload.profiler.schema import Measurement
from foreload.profiler.system import _quota, parse_smi, system

SAID = """NVIDIA H200, GPU-5d1c, 580.159.04, 143771, 142900, 5, 5, 16, 16, 00000000:1B:00.0
NVIDIA Thing, GPU-77aa, 580.1, [N/A], [N/A], 1, [N/A], 4, 16, 00000000:2B:00.0
nonsense
"""


def measured(probe: str, us: float, **at: int) -> Measurement:
    return Measurement(probe=probe, at=at, p50_us=us, p95_us=us, repeats=3)


def examined(**fields: Any) -> Examined:
    base = replace(system(), memlock_bytes=None, swap_used_bytes=0, cpu_quota=None, numa_nodes=("0-1",))
    plain = {
        "system": replace(base, memory_limit_bytes=None), "gpu": parse_smi(SAID)[0], "gpu_name": "NVIDIA H200",
        "cpu_experts": "native, avx2", "graphs": "", "measurements": (measured("copy", 1250, bytes=1 << 26, pinned=1),),
        "pinned_bytes": 1 << 33, "not_pinned_bytes": None, "spills": False,
    }  # fmt: skip
    return Examined(**{**plain, **fields})


@pytest.mark.unit
def test_what_the_driver_says(tmp_path: Path) -> None:
    node = tmp_path / "0000:1b:00.0" / "numa_node"
    node.parent.mkdir()
    node.write_text("1\n")
    one, other = parse_smi(SAID, tmp_path)
    assert (one.uuid, one.link_gen, one.link_width, one.numa_node) == ("GPU-5d1c", 5, 16, 1)
    assert one.memory_bytes == 143771 << 20
    assert (other.memory_bytes, other.link_gen_max, other.numa_node) == (None, None, None)
    assert nominal_bytes_per_s(one) == pytest.approx(63e9, rel=0.01)
    assert nominal_bytes_per_s(replace(one, link_gen=None)) is None


@pytest.mark.unit
@pytest.mark.parametrize(("line", "cores"), [("200000 100000", 2.0), ("max 100000", None), ("", None), ("5 0", None)])
def test_a_containers_share(line: str, cores: float | None) -> None:
    assert _quota(line) == cores


@pytest.mark.unit
def test_a_machine_without_problems() -> None:
    assert problems(examined()) == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpu_name": "", "gpu": None}, "no CUDA GPU is visible"),
        ({"graphs": "Triton is not installed"}, "decode steps cannot be graphs: Triton is not installed"),
        ({"spills": True}, "gives out host memory as device memory"),
        ({"gpu": replace(parse_smi(SAID)[0], link_width=4)}, "the link has 4 of 16 lanes"),
        ({"gpu": replace(parse_smi(SAID)[0], link_gen=3)}, "runs at PCIe 3 of 5 under load"),
        ({"measurements": (measured("copy", 5000, bytes=1 << 26, pinned=1),)}, "reach 13.4 GB/s of the link's 63.0"),
        ({"not_pinned_bytes": 1 << 30}, "1 GiB of host memory cannot be pinned"),
        ({"cpu_experts": "torch: not built"}, "CPU experts run on torch"),
        ({"system": replace(examined().system, swap_used_bytes=3 << 30)}, "3 GiB are swapped out"),
        ({"stolen_pct": 4.2}, "took 4.2 % of the cores' time"),
        ({"system": replace(examined().system, cpu_quota=1.5, cores=8)}, "8 cores are visible, and the time of 1.5"),
        ({"system": replace(examined().system, numa_nodes=("0-7", "8-15"))}, "memory is in 2 NUMA nodes"),
        ({"system": replace(examined().system, memlock_bytes=1 << 16)}, "only 64 KiB may be locked"),
    ],
)
def test_each_problem_is_said_with_advice(fields: dict[str, Any], said: str) -> None:
    [problem] = problems(examined(**fields))
    assert said in problem.what
    assert problem.advice


@pytest.mark.unit
def test_how_much_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are doubled until one is refused, and never beyond a quarter of what is available."""
    monkeypatch.setattr(transfers, "QUOTA_STEP", 1 << 10)
    tried: list[int] = []

    def pin(memory: torch.Tensor) -> bool:
        tried.append(memory.numel())
        return memory.numel() < 5000

    assert transfers.pinned_quota(1 << 20, pin) == (4096, 8192)
    assert tried == [1024, 2048, 4096, 8192]
    assert transfers.pinned_quota(4096, pin) == (4096, None)
    monkeypatch.setattr(transfers.psutil, "virtual_memory", lambda: type("M", (), {"available": 8192})())
    assert transfers.pinned_quota(1 << 20, pin) == (2048, None)


@pytest.mark.unit
@pytest.mark.parametrize(("length", "size"), [(1 << 20, 5000), (1 << 20, 1 << 18), (8192, 8192), (8192, 8193)])
def test_reads_are_far_apart_and_never_twice(length: int, size: int) -> None:
    step = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    found = list(transfers.places(length, size))
    assert sorted(found) == [step * i for i in range(len(found))]
    assert len(found) == (length - size) // step + 1 if size <= length else not found
    if len(found) > 4:
        assert min(abs(a - b) for a, b in pairwise(found)) > length / 4


@pytest.mark.unit
def test_what_is_in_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 16))
    with path.open("rb") as file:
        assert transfers.in_memory(file.fileno(), mmap.PAGESIZE, 5000)
    monkeypatch.setattr(transfers.os, "posix_fadvise", lambda *_: None)  # as a tmpfs does
    assert list(transfers.storage(path, (1 << 14,), 0.01)) == []
    monkeypatch.setattr(transfers, "in_memory", lambda *_: False)
    [found] = transfers.storage(path, (1 << 14, 1 << 17), 10)
    assert (found.at, found.repeats) == ({"bytes": 1 << 14}, 4)


@pytest.mark.unit
@given(fixed=st.floats(0.1, 50), rate=st.floats(1e8, 1e11))
def test_a_line_finds_fixed_cost_and_rate(fixed: float, rate: float) -> None:
    sizes = [1 << n for n in range(12, 27, 2)]
    found = line("copy", "bytes", sizes, [fixed + size / rate * 1e6 for size in sizes])
    assert found is not None
    assert found.fixed_us == pytest.approx(fixed, rel=0.01)
    assert found.bytes_per_s == pytest.approx(rate, rel=0.01)
    assert found.worst_error_pct < 0.1


@pytest.mark.unit
def test_lines_say_how_far_they_are_off() -> None:
    points = [measured("copy", us, bytes=size, pinned=1) for size, us in ((1000, 10), (2000, 20), (4000, 60))]
    [found] = fits([*points, measured("attention", 3, context=1)])
    assert (found.what, found.points) == ("copy, pinned", 3)
    assert 5 < found.median_error_pct <= found.worst_error_pct < 40
    assert line("x", "bytes", [1, 1, 1], [1, 2, 3]) is None


@pytest.mark.unit
def test_a_profile_of_another_machine_or_version(make_profile: Any) -> None:
    make_profile(machine=machine_name(), software={}).check_here()
    with pytest.raises(MismatchError) as caught:
        make_profile(machine="Another CPU, 4 cores").check_here()
    assert "Another CPU, 4 cores" in str(caught.value)
    assert machine_name() in str(caught.value)
    with pytest.raises(MismatchError, match=r"measured by Foreload 0\.0\.9, this is"):
        make_profile(machine=machine_name(), software={"foreload": "0.0.9"}).check_here()
    here = make_profile(machine=machine_name(), software={})
    here.check_here(here.meta.device, here.meta.device_name)
    with pytest.raises(MismatchError, match="measured on device 'cpu', this run uses 'cuda'"):
        here.check_here("cuda")
    with pytest.raises(MismatchError, match=f"measured on GPU '{here.meta.device_name}', this one is 'Voodoo 2'"):
        here.check_here(None, "Voodoo 2")


@pytest.mark.integration
def test_the_command(
    tmp_path: Path, make_profile: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs without a GPU and without a model, and reads a saved profile."""
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    monkeypatch.setattr("foreload.profiler.formats.SCRATCH_BYTES", 1 << 20)
    monkeypatch.setattr(transfers, "SIZES", (1 << 14, 1 << 16, 1 << 18))
    path = tmp_path / "p.json"
    make_profile(noise_pct=40.0).save(path)
    (tmp_path / "weights").write_bytes(bytes(1 << 20))
    flags = ["--profile", str(path), "--storage", str(tmp_path / "weights")]
    assert main(["doctor", *flags, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["profile"]["meta"]["noise_pct"] == 40.0
    assert {m["probe"] for m in values["measurements"]} >= {"experts_cpu"}
    assert any("varied by 40 %" in problem["what"] for problem in values["problems"])
    assert values["system"]["cores"] >= 1
    assert main(["doctor", *flags]) == 0
    printed = capsys.readouterr().out
    assert "experts on the CPU" in printed
    assert ("storage: not measured" in printed) == bool(values["not_read"])
    assert "profile of" in printed
    assert main(["doctor", "--profile", str(tmp_path / "none.json")]) == 2
