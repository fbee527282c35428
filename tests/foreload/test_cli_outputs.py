"""What cannot be written is refused by its path before any work, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreload.cli import main
from foreload.errors import FileError
from foreload.files import check_writable

pytestmark = pytest.mark.unit
FILES = ["--profile", "no.json", "--trace", "no.parquet"]


@pytest.mark.parametrize(
    "command",
    [
        ["record", "no-model", "--out"],
        ["record", "no-model", "--out", "x.parquet", "--timings"],
        ["profile", "no-model", "--out"],
        ["validate", "no-model", *FILES, "--out"],
        ["validate", "no-model", *FILES, "--page"],
        ["tune", *FILES, "--out"],
        ["tune", *FILES, "--resume"],
        ["simulate", *FILES, "--timeline"],
        ["quality", "no-model", "--text", "no.txt", "--out"],
        ["report", "no-run", "--out"],
        ["trace", "import", "no.jsonl", "--out"],
        ["trace", "export", "no.parquet", "--out"],
        ["trace", "analyze", "no.parquet", "--out"],
        ["trace", "synthesize", "--out"],
    ],
)
def test_a_folder_is_no_file(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert main([*command, str(folder)]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {folder}: cannot be written: it is a folder, and a file's name is needed\n"
    assert [*tmp_path.rglob("*")] == [folder]


@pytest.mark.parametrize(
    "command",
    [
        ["tune", *FILES, "--out", "s.json", "--run"],
        ["calibrate", "no-model", "--text", "no.txt", "--out"],
        ["export", "no.json", "--out"],
        ["demo", "--out"],
        ["serve", "no-model", "--records"],
    ],
)
@pytest.mark.parametrize("under", ["", "/a/b"])
def test_a_file_is_no_folder(
    command: list[str], under: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    path = f"{tmp_path / 'file'}{under}"
    assert main([*command, path]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {path}: cannot be written: {tmp_path / 'file'} takes no files: Not a directory\n"
    assert (tmp_path / "file").read_text() == "x"


def test_where_no_files_can_be_made() -> None:
    with pytest.raises(FileError, match=r"^/proc/no/x: cannot be written: /proc takes no files: "):
        check_writable(Path("/proc/no/x"))


def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("old")
    for path in (old, tmp_path / "new", tmp_path / "a" / "b" / "new"):
        check_writable(path)
        check_writable(path.parent, folder=True)
    assert [*tmp_path.iterdir()] == [old]
    assert old.read_text() == "old"
