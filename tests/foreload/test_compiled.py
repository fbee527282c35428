from __future__ import annotations

import os
from pathlib import Path

import pytest

from foreload.compiled import drop_stale_caches


@pytest.mark.unit
def test_caches_older_than_a_source_they_may_call_are_dropped(tmp_path: Path) -> None:
    callers, called = tmp_path / "callers", tmp_path / "called"
    (callers / "__pycache__").mkdir(parents=True)
    called.mkdir()
    names = ("old.nbi", "old.1.nbc", "new.nbi", "old.pyc")
    for name, at in zip(names, (10, 10, 40, 10), strict=True):
        (callers / "__pycache__" / name).touch()
        os.utime(callers / "__pycache__" / name, (at, at))
    for path, at in ((callers / "step.py", 5), (called / "copies.py", 30)):
        path.touch()
        os.utime(path, (at, at))
    drop_stale_caches(callers)
    assert len(list((callers / "__pycache__").iterdir())) == 4
    drop_stale_caches(callers, called)
    assert sorted(p.name for p in (callers / "__pycache__").iterdir()) == ["new.nbi", "old.pyc"]
