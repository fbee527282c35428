"""Units as people write them; files written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.errors import FileError, UsageError
from foreload.files import atomic_path, read_mapping, write_json, write_text
from foreload.units import copy_ns, format_bytes, parse_bytes, parse_rate, us_to_ns

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("1.5kB", 1500),
        ("42B", 42),
        ("1500000", 1500000),
        ("0", 0),
        (" 3 MB ", 3 * 10**6),
    ],
)
def test_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "8 GiB GiB", "1e3", "8GiBs", "NaN", "8Gb/s"])
def test_bytes_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not understood: write a number with B, kB, MB") as caught:
        parse_bytes(text, "--vram")
    assert str(caught.value).startswith("--vram ")


@pytest.mark.parametrize(
    ("read", "text", "hint"),
    [
        (parse_bytes, "16", "16GB, or 16B for bytes"),
        (parse_bytes, "1048575", "1048575B for bytes"),
        (parse_rate, "25", "25GB/s, or 25B/s for bytes"),
        (parse_rate, "999999/s", "999999B/s for bytes"),
    ],
)
def test_a_small_number_lacks_its_unit(read: Callable[[str], int], text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"{text!r} lacks a unit: .*{hint}"):
        read(text)


def test_a_refused_rate_is_quoted_as_it_was_given() -> None:
    with pytest.raises(UsageError, match="--link '-100MB/s' is not understood"):
        parse_rate("-100MB/s", "--link")


def test_rates() -> None:
    assert parse_rate("1B/s") == 1
    assert parse_rate("25GB/s") == parse_rate("25GB") == 25 * 10**9
    for text in ("0", "0GB/s"):
        with pytest.raises(UsageError, match="must be above 0"):
            parse_rate(text)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (9 << 20, "9 MiB"), (3 << 39, "1.5 TiB"), (-2048, "-2 KiB")],
)
def test_format(count: int, expected: str) -> None:
    assert format_bytes(count) == expected


@given(st.integers(0, 2**50), st.integers(1, 2**45))
def test_copies_are_rounded_up(size: int, rate: int) -> None:
    assert (copy_ns(size, rate) - 1) * rate < size * 10**9 <= copy_ns(size, rate) * rate


def test_nanoseconds() -> None:
    assert [us_to_ns(us) for us in (0, 0.0004, 0.0005, 1.5)] == [0, 0, 1, 1500]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def broken() -> None:
        with atomic_path(path) as partial:
            partial.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(FileError, match=r"a.json: cannot be written: No space left on device"):
        broken()
    assert read_mapping(path, "file") == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_other_errors_pass_and_clean_up(tmp_path: Path) -> None:
    def broken() -> None:
        with atomic_path(tmp_path / "a") as partial:
            partial.write_text("half")
            raise KeyError("x")

    with pytest.raises(KeyError):
        broken()
    assert os.listdir(tmp_path) == []


def test_folders_are_made_and_obstacles_named(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "c.txt", "x")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "x"
    with pytest.raises(FileError, match=r"d.txt: cannot be written: (Not a directory|File exists)"):
        write_text(tmp_path / "a" / "b" / "c.txt" / "d.txt", "x")
    with pytest.raises(FileError, match=r"a: cannot be written: Is a directory"):
        write_text(tmp_path / "a", "x")
