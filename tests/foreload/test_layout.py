"""The layout: which folder may import which, what the wheel holds, what importing costs."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = ("backend", "profiler", "simulator", "dashboard", "traces")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "foreload": (),
    "traces": ("traces",),
    "backend": ("backend", "traces"),
    "profiler": ("profiler", "backend"),
    "simulator": ("simulator", "traces", "backend.policy", "profiler.schema"),
    "dashboard": (*MAPPED,),
}


def ours(path: Path) -> list[str]:
    """Modules of ours that a file imports, without the leading `foreload.`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names]
    return [name.removeprefix("foreload.") for name in found if name.startswith("foreload.")]


def sources(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*.py") if "cli" not in path.relative_to(ROOT).parts]


@pytest.mark.unit
@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_follow_the_layout(folder: str) -> None:
    allowed = MAY_IMPORT[folder]
    for path in sources(folder):
        for name in ours(path):
            part = name.split(".")[0]
            inside = part in (*MAPPED, "cli")
            fits = any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)
            assert not inside or fits, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.unit
def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    names = set()
    for folder in ("foreload", *MAPPED):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.parent.relative_to(ROOT).parts
            names.add(".".join(parts if folder == "foreload" else ("foreload", *parts)))
    assert names == listed


@pytest.mark.unit
def test_files_stay_readable() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("foreload", *MAPPED, "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 500
    }
    assert long == {}


@pytest.mark.integration
@pytest.mark.parametrize("module", ["foreload", "foreload.backend", "foreload.backend.policy", "foreload.traces.io"])
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.integration
def test_the_wheel_is_whole(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in ("foreload", *MAPPED):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.so"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("foreload-*-py3-none-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("foreload", *MAPPED):
        for path in (ROOT / folder).rglob("*"):
            # Recordings of samples are large: they come with the repository alone.
            if path.is_file() and not {"__pycache__", "src", "samples"} & set(path.parts):
                name = str(path.relative_to(ROOT))
                assert (name if folder == "foreload" else f"foreload/{name}") in held
    assert {"foreload/py.typed", "foreload/dashboard/report.html.j2", "foreload/assets/mini/model.safetensors"} <= held
    assert not any("__pycache__" in name for name in held)
    assert {name.split("/")[0].split("-")[0] for name in held} == {"foreload"}
