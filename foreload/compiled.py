"""Compiled functions on disk: numba checks a cache against the file of its function, not against what it calls."""

from __future__ import annotations

from pathlib import Path


def drop_stale_caches(folder: Path, *called: Path) -> None:
    """Delete numba's caches in `folder` that are older than a source there or in the `called` folders."""
    sources = [source for place in (folder, *called) for source in place.glob("*.py")]
    newest = max(source.stat().st_mtime_ns for source in sources)
    for cached in (folder / "__pycache__").glob("*.nb[ci]"):
        try:
            if cached.stat().st_mtime_ns < newest:
                cached.unlink()
        except OSError:
            continue  # another process was first, or the folder is not ours to change: numba then keeps it elsewhere
