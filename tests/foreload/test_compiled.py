from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys
from foreload import compiled
compiled.CALLED |= {"called": (), "callers": ("called",)}
from callers.step import step
print(step(1), sum(step.stats.cache_hits.values()), compiled.folder_of("callers").parent)
"""
HEAD = "from foreload.compiled import uncounted\n"
CALLED = HEAD + "@uncounted\ndef add(a):\n    return a + {}\n"
STEP = HEAD + "from called.sums import add\n@uncounted\ndef step(a):\n    return add(a)\n"


def write(path: Path, text: str) -> None:
    """A source whose date says nothing."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    os.utime(path, (10, 10))


def run(folder: Path, **environment: str) -> list[str]:
    """What `step` gives, how often it was found on disk, and where compiled functions are kept."""
    around = {**os.environ, "NUMBA_CACHE_DIR": "", **environment}
    command = [sys.executable, "-B", "-c", RUN]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=around).stdout.split()


@pytest.mark.integration
def test_what_is_kept_of_other_sources_is_not_used(tmp_path: Path) -> None:
    """numba alone would: the caller's file has not changed, and the other's date and size neither."""
    write(tmp_path / "callers" / "__init__.py", "")
    write(tmp_path / "callers" / "step.py", STEP)
    write(tmp_path / "called" / "__init__.py", "")
    write(tmp_path / "called" / "sums.py", CALLED.format(1))
    beside = tmp_path / "callers" / "__pycache__"
    assert run(tmp_path) == ["2", "0", str(beside)]
    assert run(tmp_path) == ["2", "1", str(beside)]
    write(tmp_path / "called" / "sums.py", CALLED.format(2))
    assert run(tmp_path) == ["3", "0", str(beside)]
    assert len(list(beside.glob("compiled-*"))) == 1
    elsewhere = tmp_path / "kept"
    assert run(tmp_path, NUMBA_CACHE_DIR=str(elsewhere)) == ["3", "0", str(elsewhere)]
    assert run(tmp_path, NUMBA_CACHE_DIR=str(elsewhere)) == ["3", "1", str(elsewhere)]
