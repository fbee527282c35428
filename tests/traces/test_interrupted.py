"""Recordings that end badly: killed, on a full disk, in a folder that cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foreload.errors import FileError
from foreload.traces.io import TraceWriter, partial_folder, read_trace, recover

pytestmark = pytest.mark.integration

RECORD = """
import sys, time
import numpy as np
from pathlib import Path
from foreload.traces.io import TraceWriter
from foreload.traces.schema import DECODE, TraceMeta

meta = TraceMeta.model_validate_json(Path(sys.argv[2]).read_text())
writer = TraceWriter(Path(sys.argv[1]), meta, flush_rows=10)
for step in range(int(sys.argv[3])):
    writer.append(0, step, DECODE, step, 7, np.tile([0, 1], (1, 3, 1)))
print("recorded", flush=True)
{end}
"""


def record(tmp_path: Path, make_meta: Any, steps: int, end: str, prepare: Any = None) -> subprocess.Popen[str]:
    (tmp_path / "meta.json").write_text(make_meta().model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-c", RECORD.format(end=end), tmp_path / "t.parquet", tmp_path / "meta.json", str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )


def test_killed_recording_is_readable_and_recovers(tmp_path: Path, make_meta: Any) -> None:
    with record(tmp_path, make_meta, 57, "time.sleep(600)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "recorded\n"
        process.send_signal(signal.SIGKILL)
    path = tmp_path / "t.parquet"
    assert not path.exists()
    assert read_trace(partial_folder(path)).step.tolist() == list(range(50))
    with pytest.raises(FileError, match=r"t.parquet.partial holds an unfinished recording: foreload trace recover"):
        read_trace(path)
    assert recover(path) == path
    assert read_trace(path).rows == 50
    assert not partial_folder(path).exists()
    with pytest.raises(FileError, match=r"t.parquet.partial: trace cannot be read"):
        recover(path)


def _small_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))


def test_full_disk_while_recording(tmp_path: Path, make_meta: Any) -> None:
    """Parts fit, the merged file does not: the final name never appears, the parts stay."""
    end = """
from foreload.errors import FileError
try:
    writer.close()
except FileError as error:
    print(error)
"""
    with record(tmp_path, make_meta, 6_000, end, _small_files) as process:
        out, err = process.communicate(timeout=120)
    assert err == ""
    path = tmp_path / "t.parquet"
    assert out.splitlines()[1].startswith(f"{path}: cannot be written: ")
    assert "t.parquet.partial" in out.splitlines()[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta.json", "t.parquet.partial"]
    assert read_trace(partial_folder(path)).rows == 6_000


def test_full_disk_at_a_flush(tmp_path: Path, make_trace: Any, monkeypatch: Any) -> None:
    trace = make_trace()
    writer = TraceWriter(tmp_path / "t.parquet", trace.meta, flush_rows=1)
    writer.append(0, 0, 1, 0, 7, trace.experts[:1])

    def full(self: Path, _: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(FileError, match=r"t.parquet: cannot be written: No space left on device"):
            writer.append(0, 1, 1, 1, 7, trace.experts[:1])
    assert [p.name for p in partial_folder(writer.path).iterdir()] == ["part-00000.parquet"]
    assert read_trace(partial_folder(writer.path)).rows == 1


def test_an_error_while_recording_keeps_the_parts(tmp_path: Path, make_trace: Any) -> None:
    trace = make_trace()
    path = tmp_path / "t.parquet"

    def interrupted(rows: int) -> None:
        with TraceWriter(path, trace.meta) as writer:
            for row in range(rows):
                writer.append(0, row, 1, row, 7, trace.experts[:1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(1)
    assert not path.exists()
    assert read_trace(partial_folder(path)).rows == 1
    with pytest.raises(KeyboardInterrupt):
        interrupted(0)
    assert list(tmp_path.iterdir()) == []


def test_a_new_recording_replaces_an_unfinished_one(tmp_path: Path, make_trace: Any, write_trace: Any) -> None:
    trace = make_trace()
    path = tmp_path / "t.parquet"
    TraceWriter(path, trace.meta, flush_rows=1).append(0, 0, 1, 0, 7, trace.experts[:1])
    write_trace(path, trace)
    assert read_trace(path).rows == trace.rows
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path: Path, make_trace: Any, write_trace: Any) -> None:
    path = tmp_path / "t.parquet"
    write_trace(path, make_trace())
    before = path.read_bytes()
    TraceWriter(path, make_trace().meta, flush_rows=1).append(0, 0, 1, 0, 7, make_trace().experts[:1])
    assert path.read_bytes() == before


def test_unwritable_place(tmp_path: Path, make_meta: Any) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "t.parquet"
    with pytest.raises(FileError, match=r"t.parquet: cannot be written: Not a directory"):
        TraceWriter(path, make_meta())
    assert os.listdir(tmp_path) == ["file"]


def test_damaged_parts_are_not_recovered(tmp_path: Path, make_trace: Any) -> None:
    trace = make_trace()
    path = tmp_path / "t.parquet"
    writer = TraceWriter(path, trace.meta, flush_rows=1)
    writer.append(0, 0, 1, 0, 7, trace.experts[:1])
    part = partial_folder(path) / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-30])
    with pytest.raises(FileError, match="truncated"):
        recover(path)
    assert not path.exists()
    assert part.exists()
