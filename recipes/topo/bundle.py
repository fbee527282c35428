"""What leaves the machine: results and recordings in a few files of bounded size."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MIB = 1 << 20
ARCHIVE_BYTES = 15 * MIB
FILE_LIMIT_BYTES = 10_000_000
TOTAL_LIMIT_BYTES = 20_000_000


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace the file whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def sizes(samples: Path) -> dict[str, int]:
    """Bytes of every recording, by name."""
    return {path.stem: path.stat().st_size for path in sorted(samples.glob("*.parquet"))}


def size_faults(samples: Path) -> list[str]:
    """What breaks the limits: a file over 10 MB, all files over 20 MB."""
    found = sizes(samples)
    faults = [f"{name} has {size:,} bytes" for name, size in found.items() if size > FILE_LIMIT_BYTES]
    if sum(found.values()) > TOTAL_LIMIT_BYTES:
        faults.append(f"all recordings together have {sum(found.values()):,} bytes")
    return faults


def archive(samples: Path, bundle: Path) -> list[Path]:
    """Pack recordings and cards into as few tar files as fit, each under 16 MiB; earlier ones are replaced."""
    groups: list[list[Path]] = []
    room = 0
    for path in sorted(samples.iterdir()):
        if path.suffix not in (".parquet", ".md"):
            continue
        need = path.stat().st_size + 2048
        if need > room:
            groups.append([])
            room = ARCHIVE_BYTES
        groups[-1].append(path)
        room -= need
    made: list[Path] = []
    for number, group in enumerate(groups, 1):
        target = bundle / f"topo-samples-{number}.tar"
        partial = target.with_suffix(".partial")
        with tarfile.open(partial, "w") as tar:
            for path in group:
                tar.add(path, arcname=path.name)
        partial.replace(target)
        made.append(target)
    for old in set(bundle.glob("topo-samples-*.tar")) - set(made):
        old.unlink()
    return made


def copy_into(bundle: Path, files: list[Path]) -> None:
    """Copy the files that exist."""
    for path in files:
        if path.exists() and path.parent != bundle:
            shutil.copyfile(path, bundle / path.name)


def recompress(path: Path) -> bool:
    """Rewrite a recording with ids in byte planes: a tenth smaller than bit-packed dictionaries, same content.

    Where the installed pyarrow cannot, or what it wrote reads otherwise, the recording stays as it is: False.
    """
    partial = path.with_suffix(".partial")
    table = pq.read_table(path)
    try:
        _write_split(table, path, partial)
        same = bool(pq.read_table(partial).equals(table))
    except (pa.ArrowException, OSError, TypeError) as error:
        print(f"{path.name}: not recompressed: {error}", flush=True)
        same = False
    if same:
        partial.replace(path)
    else:
        partial.unlink(missing_ok=True)
    return same


def _write_split(table: Any, path: Path, target: Path) -> None:
    schema = pq.ParquetFile(path).schema
    paths = [schema.column(i).path for i in range(len(schema.names))]
    split = [p for p in paths if "." in p]  # elements of the list columns
    pq.write_table(
        table, target, compression="zstd", compression_level=19, write_page_checksum=True,
        use_dictionary=[p for p in paths if p not in split], use_byte_stream_split=split,
        row_group_size=max(1, table.num_rows),
    )  # fmt: skip
