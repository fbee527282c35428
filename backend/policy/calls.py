"""The brain's queue functions as C function pointers, so that copies are issued without Python (and its lock).

A policy state is handed over as a table of int64: for every array of `PolicyState` its address and its dimensions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba as compiler
import numpy as np
from numba import types as numba_types
from numba.core import cgutils as code_generation
from numba.extending import intrinsic as numba_intrinsic
from numba.np import arrayobj
from numba.np.numpy_support import from_dtype
from numpy.typing import NDArray

from foreload.backend.policy.copies import complete, next_copy
from foreload.backend.policy.state import PolicyState, new_state
from foreload.compiled import POLICY, kept_apart

# numba's own annotations do not cover what is used here.
numba: Any = compiler
types: Any = numba_types
cgutils: Any = code_generation
intrinsic: Any = numba_intrinsic
populate_array: Any = arrayobj.populate_array

WORDS = 4  # of an array in the table: address and up to three dimensions


class QueueCalls(NamedTuple):
    """`next(table, phase)` -> key or -1, and `complete(table, key)`: addresses of C functions."""

    next: int
    complete: int
    owners: tuple[Any, Any]  # they keep the functions alive


def table_of(state: PolicyState) -> NDArray[np.int64]:
    """The table of a state, int64 [arrays * WORDS]; valid while the state's arrays live."""
    table = np.zeros((len(state), WORDS), np.int64)
    arrays: tuple[NDArray[Any], ...] = tuple(state)
    for row, array in zip(table, arrays, strict=True):
        row[0] = array.ctypes.data
        row[1 : 1 + array.ndim] = array.shape
    return table.reshape(-1)


def _state_type() -> Any:
    arrays: tuple[NDArray[Any], ...] = tuple(_example())
    return types.NamedTuple([types.Array(from_dtype(array.dtype), array.ndim, "C") for array in arrays], PolicyState)


def _example() -> PolicyState:
    return new_state(np.zeros(1, np.int32), 1, 1)


@intrinsic  # type: ignore[untyped-decorator]
def _state_at(context: Any, table: Any) -> Any:
    """The `PolicyState` of a table, its arrays in place."""
    kind = _state_type()

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = context.get_value_type(types.int64)
        words = builder.bitcast(arguments[0], word.as_pointer())
        arrays = []
        for at, array_type in enumerate(kind.types):
            address, *shape = (
                builder.load(cgutils.gep(builder, words, WORDS * at + i)) for i in range(1 + array_type.ndim)
            )
            array = context.make_array(array_type)(context, builder)
            size = context.get_constant(types.intp, np.dtype(array_type.dtype.name).itemsize)
            strides = [size]
            for dimension in shape[:0:-1]:
                strides.insert(0, builder.mul(strides[0], dimension))
            populate_array(
                array,
                data=builder.inttoptr(address, array.data.type),
                shape=cgutils.pack_array(builder, shape),
                strides=cgutils.pack_array(builder, strides),
                itemsize=size,
                meminfo=None,
            )
            arrays.append(array._getvalue())
        return context.make_tuple(builder, kind, arrays)

    return kind(table), build


def queue_calls() -> QueueCalls | None:
    """Compile (or load) the functions; None where numba compiles nothing (`NUMBA_DISABLE_JIT`)."""
    if numba.config.DISABLE_JIT:
        return None

    found = _compiled()
    return QueueCalls(found[0].address, found[1].address, found)


def _next_at(table: Any, phase: int) -> int:
    key: int = next_copy(_state_at(table), phase)
    return key


def _complete_at(table: Any, key: int) -> None:
    complete(_state_at(table), key)


def _compiled() -> tuple[Any, Any]:
    next_type, complete_type = types.int64(types.voidptr, types.int64), types.void(types.voidptr, types.int64)
    with kept_apart(POLICY):
        return numba.cfunc(next_type, cache=True)(_next_at), numba.cfunc(complete_type, cache=True)(_complete_at)
