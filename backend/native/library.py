"""Loading the native library and choosing its instruction set.

`FORELOAD_CPU_ISA` overrides the choice: a name of `Isa` in lower case, or `torch` to do without the library.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

from foreload.errors import UsageError

ABI = 5
PATH = Path(__file__).parent / "_experts.so"
VARIABLE = "FORELOAD_CPU_ISA"


class Isa(IntEnum):
    """Instruction sets of the CPU experts; `AVX512_ALL` has bf16 pairs and VNNI. Arm runs `SCALAR`, as built."""

    SCALAR = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AVX512_VNNI = 4
    AVX512_ALL = 5


class CLayout(ctypes.Structure):
    """`fl_layout`: what one expert's block holds, and where."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                "format",
                "activation",
                "interleaved",
                "bf16_inputs",
                "hidden",
                "width",
                "tile",
            )
        ),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
        *((f"{part}{kind}", ctypes.c_int64) for kind in ("", "_scale", "_bias") for part in ("gate_up", "down")),
    ]


class CWork(ctypes.Structure):
    """`fl_work`: one layer-step's experts, tokens and results."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("experts", "tokens", "x_bf16", "out_bf16", "tag")),
        *((name, ctypes.c_void_p) for name in ("blocks", "first", "x_rows", "out_rows", "weights", "soon", "x", "out")),
    ]


@dataclass(frozen=True)
class Library:
    """The loaded library (None where it is not there, and `missing` says why)."""

    handle: ctypes.CDLL | None
    missing: str = ""

    def supported(self) -> list[Isa]:
        """Instruction sets that this processor and this build can run."""
        return [isa for isa in Isa if self.handle is not None and self.handle.fl_isa_supported(int(isa))]


def _declare(handle: ctypes.CDLL) -> str:
    """Enter argument types; returns what is wrong with the library, or nothing."""
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    handle.fl_abi.restype = handle.fl_isa_supported.restype = i32
    handle.fl_done.restype = handle.fl_pool_place.restype = i32
    handle.fl_layout_size.restype = handle.fl_work_size.restype = handle.fl_submit.restype = i64
    handle.fl_pool_new.restype, handle.fl_pool_free.restype, handle.fl_wait.restype = pointer, None, None
    handle.fl_isa_supported.argtypes = [i32]
    handle.fl_pool_new.argtypes = [i32, i32, i32]
    handle.fl_pool_free.argtypes = [pointer]
    handle.fl_pool_place.argtypes = [pointer, pointer, i32]
    handle.fl_submit.argtypes = [pointer, ctypes.POINTER(CLayout), ctypes.POINTER(CWork)]
    handle.fl_ahead.restype, handle.fl_ahead.argtypes = i64, [pointer, pointer, pointer]
    handle.fl_done.argtypes = [pointer, i64]
    handle.fl_wait.argtypes = [pointer, i64, ctypes.POINTER(i64 * 2)]
    sizes = (handle.fl_layout_size(), handle.fl_work_size())
    if handle.fl_abi() != ABI or sizes != (ctypes.sizeof(CLayout), ctypes.sizeof(CWork)):
        return f"{PATH.name} was built from other sources: install the package again"
    return ""


@cache
def load() -> Library:
    """The native library; never raises."""
    if not PATH.exists():
        return Library(None, f"{PATH.name} was not built: a C compiler is needed when the package is installed")
    try:
        handle = ctypes.CDLL(str(PATH))
        wrong = _declare(handle)
    except (OSError, AttributeError) as error:
        return Library(None, f"{PATH.name} cannot be loaded: {error}")
    return Library(None, wrong) if wrong else Library(handle)


def chosen_isa(library: Library | None = None) -> Isa | None:
    """The instruction set to use; None: torch does the work. UsageError for a choice this machine cannot run."""
    found = (library or load()).supported()
    name = os.environ.get(VARIABLE, "")
    if name == "torch":
        return None
    if name:
        known = [isa.name.lower() for isa in found]
        if name not in known:
            raise UsageError(f"{VARIABLE} is {name!r}: this machine runs {', '.join([*known, 'torch'])}")
        return Isa[name.upper()]
    return found[-1] if found else None


def describe() -> str:
    """How experts run on this machine's CPU, on one line."""
    isa = chosen_isa()
    if isa is not None:
        return f"native, {isa.name.lower()}"
    return f"torch: {load().missing or f'{VARIABLE}=torch'}"
