"""How functions are compiled, and their cache on disk: numba checks it against a function's file, not what it calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def uncounted(function: F) -> F:
    """Compile a function that makes no array, without counting references; what it needs as scratch is handed in.

    Structures of many arrays go from function to function; counting references to each of them at every call takes more
    time than the functions. One that makes an array after all fails to compile.
    """
    compiled: F = cast(Any, njit)(cache=True, _nrt=False)(function)
    return compiled


def inlined(function: F) -> F:
    """The same for a short function that is called often: it becomes part of its callers.

    Structures go from function to function by value: handing a machine and a policy over takes longer than most of
    what is done with them.
    """
    compiled: F = cast(Any, njit)(cache=True, _nrt=False, forceinline=True)(function)
    return compiled


def unlocked(function: F) -> F:
    """The same for what Python calls and does not wait for: Python's lock is let go while it runs."""
    compiled: F = cast(Any, njit)(cache=True, nogil=True, _nrt=False)(function)
    return compiled


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
