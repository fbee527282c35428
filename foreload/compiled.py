"""How functions are compiled, and where they are kept on disk.

numba checks what it keeps of a function against the date of that function's file alone. What it calls may be another by
then, above all where files have no dates of their own (images, stores), and compiled code that takes other structures
than its caller waits for ever. So each state of the sources of a package and of those it calls has a folder of its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import numba as compiler

F = TypeVar("F", bound=Callable[..., Any])

numba: Any = compiler  # its own annotations do not cover what is used here
if "NUMBA_OPT" not in os.environ:
    numba.config.OPT = type(numba.config.OPT)(1)
"""LLVM's first level: a third less time to compile than at numba's third, and no slower (256 x 48 x 8: 45, 31, 53 ms
against 51, 37, 57 in one run on two cores)."""

POLICY = "foreload.backend.policy"
CALLED = {
    POLICY: (),
    "foreload.backend.cuda": (POLICY,),
    "foreload.simulator": (POLICY,),
    "foreload.simulator.compiled": ("foreload.simulator", POLICY),
    "foreload.traces": (),
}
"""Packages with compiled functions, and the others whose functions those call."""


def plain(function: F) -> F:
    """Compile a function that may make arrays."""
    return _compiled(function)


def uncounted(function: F) -> F:
    """Compile a function that makes no array, without counting references; what it needs as scratch is handed in.

    Structures of many arrays go from function to function; counting references to each of them at every call takes more
    time than the functions. One that makes an array after all fails to compile.
    """
    return _compiled(function, _nrt=False)


def inlined(function: F) -> F:
    """The same for a short function that is called often: it becomes part of its callers.

    Structures go from function to function by value: handing a machine and a policy over takes longer than most of
    what is done with them.
    """
    return _compiled(function, _nrt=False, forceinline=True)


def unlocked(function: F) -> F:
    """The same for what Python calls and does not wait for: Python's lock is let go while it runs."""
    return _compiled(function, nogil=True, _nrt=False)


def _compiled(function: F, **how: bool) -> F:
    """What is not said of a function is that of whatever calls it when it is first compiled, so all is said."""
    said = {"forceinline": False, "_nrt": True} | how
    with kept_apart(function.__module__.rpartition(".")[0]):
        return cast(F, numba.njit(cache=True, **said)(function))


@contextmanager
def kept_apart(package: str) -> Iterator[None]:
    """What numba is told to keep meanwhile goes to the folder of the package's sources as they are."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder_of(package))
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


@cache
def folder_of(package: str) -> Path:
    """Where compiled functions of a package of `CALLED` are kept: beside it, else with the user's caches, or where
    `NUMBA_CACHE_DIR` says. Beside it, what was kept of other sources is deleted.
    """
    state = hashlib.sha256(Path(__file__).read_bytes())
    for one in (package, *CALLED[package]):
        state.update(_state_of(one))
    name, beside = f"compiled-{state.hexdigest()[:16]}", _sources(package) / "__pycache__"
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR) / name
    if not os.access(beside.parent, os.W_OK):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foreload" / name
    if not (beside / name).exists():
        for old in beside.glob("compiled-*"):
            shutil.rmtree(old, ignore_errors=True)  # another process may be at it
    return beside / name


@cache
def _state_of(package: str) -> bytes:
    """A digest of a package's sources."""
    state = hashlib.sha256()
    for source in sorted(_sources(package).glob("*.py")):
        state.update(source.name.encode() + b"\0" + source.read_bytes())
    return state.digest()


def _sources(package: str) -> Path:
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"{package} is no package")
    return Path(found.submodule_search_locations[0])
