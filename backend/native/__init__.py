"""The native library: experts on the CPU in C, with their own threads; `src/native.h` says what it offers."""

from foreload.backend.native.library import Isa, Library, chosen_isa, describe, load
from foreload.backend.native.pool import OPEN, NativePool, Plan, c_layout

__all__ = ["OPEN", "Isa", "Library", "NativePool", "Plan", "c_layout", "chosen_isa", "describe", "load"]
