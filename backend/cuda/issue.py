"""`Issuer`: copies, events and graph launches by way of the native library (`backend/native/src/issue.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreload.backend.cuda.layers import Native
from foreload.backend.native.library import load
from foreload.backend.policy.calls import QueueCalls, table_of
from foreload.backend.policy.state import PolicyState
from foreload.errors import InternalError

MOST_LATE = 1024  # FC_MOST_LATE
RUNTIME = (
    "cudaSetDevice", "cudaStreamCreateWithFlags", "cudaStreamDestroy", "cudaStreamSynchronize", "cudaStreamWaitEvent",
    "cudaEventCreateWithFlags", "cudaEventDestroy", "cudaEventRecord", "cudaEventQuery", "cudaMemcpyAsync",
    "cudaGraphInstantiate", "cudaGraphExecDestroy", "cudaGraphLaunch", "cudaGetLastError",
)  # fmt: skip
"""The runtime's functions that the library calls, in the order of `fc_runtime`."""
CALLED = ("now", "told", "serve", "lock", "unlock", "run", "wait_landed", "computed")
"""The library's functions that a compiled step calls (`Native`)."""


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


class CBrain(ctypes.Structure):
    """`fc_brain`."""

    _fields_ = [*_pointers("next", "complete", "table", "status", "purpose", "slot"), ("experts", ctypes.c_int64)]


class CMemory(ctypes.Structure):
    """`fc_memory`."""

    _fields_ = [*_pointers("sources", "bytes", "targets"), ("slots", ctypes.c_int64)]


class CStep(ctypes.Structure):
    """`fc_step`."""

    _fields_ = [
        *_pointers("compute", "resident", "waves", "plan", "keys", "firsts", "counts"),
        ("late", ctypes.c_int64),
        *_pointers("used"),
        ("n_used", ctypes.c_int64),
        *_pointers("next", "bring"),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "fc_open": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]),
    "fc_close": (None, [ctypes.c_void_p]),
    "fc_lock": (ctypes.c_int64, [ctypes.c_void_p]),
    "fc_unlock": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]),
    "fc_bind": (ctypes.c_int, [ctypes.c_void_p, ctypes.POINTER(CBrain), ctypes.POINTER(CMemory)]),
    "fc_phase": (None, [ctypes.c_void_p, ctypes.c_int64]),
    "fc_delays": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]),
    "fc_throttle": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]),
    "fc_record_spans": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64]),
    "fc_spans": (ctypes.c_int64, [ctypes.c_void_p, ctypes.POINTER(ctypes.POINTER(ctypes.c_int64))]),
    "fc_settle": (ctypes.c_int, [ctypes.c_void_p]),
    "fc_take_ready": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]),
    "fc_wait_landed": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]),
    "fc_when_landed": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]),
    "fc_slot_used": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]),
    "fc_instantiate": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]),
    "fc_drop_graph": (None, [ctypes.c_void_p, ctypes.c_void_p]),
    "fc_launch": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]),
    "fc_told": (
        ctypes.c_int64,
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64],
    ),
    "fc_drive": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]),
    "fc_run": (ctypes.c_int64, [ctypes.c_void_p, ctypes.POINTER(CStep)]),
}


def issue_library() -> ctypes.CDLL | None:
    """The native library with the functions of this module declared; None where it was not built."""
    handle = load().handle
    if handle is None or not hasattr(handle, "fc_open"):
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments
    return handle


def cuda_runtime() -> list[int]:
    """Addresses of the CUDA runtime's functions, of the runtime that torch has loaded."""
    major = (torch.version.cuda or "").split(".")[0]
    library = ctypes.CDLL(f"libcudart.so.{major}")
    return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in RUNTIME]


@dataclass(frozen=True)
class Blocks:
    """Where expert blocks are, int64: host addresses [layers, experts], bytes [layers], device addresses [slots]."""

    sources: NDArray[np.int64]
    bytes: NDArray[np.int64]
    targets: NDArray[np.int64]


class Issuer:
    """One link: its copy stream, its thread, and launches on compute streams. InternalError names a CUDA error."""

    def __init__(
        self, library: ctypes.CDLL, runtime: Sequence[int], device: int = 0, spins: int = 0, threaded: bool = True
    ) -> None:
        """`runtime`: the functions of `RUNTIME`. `spins`: pauses between two looks at the link, 0 to sleep instead."""
        self._library = library
        self._functions = (ctypes.c_void_p * len(RUNTIME))(*runtime)
        self._link = library.fc_open(ctypes.addressof(self._functions), device, spins, threaded)
        if not self._link:
            raise InternalError("CUDA gave no stream for copies")
        called = {name: getattr(library, f"fc_{name}") for name in CALLED}
        called |= {"submit": library.fl_submit, "ahead": library.fl_ahead}
        self._addresses = {name: ctypes.cast(call, ctypes.c_void_p).value or 0 for name, call in called.items()}
        self._kept: tuple[Any, ...] = ()  # what the library points to
        self._delays: Any = None

    def check(self, code: int) -> None:
        """InternalError for a code other than 0."""
        if code:
            raise InternalError(f"the copy thread stopped: CUDA error {code}")

    def lock(self) -> None:
        """Take the lock under which the brain is used."""
        self._library.fc_lock(self._link)

    def unlock(self, kick: bool = False) -> None:
        """Let go of the lock; `kick`: first issue what may be issued."""
        self.check(self._library.fc_unlock(self._link, kick))

    def bind(self, calls: QueueCalls, state: PolicyState, blocks: Blocks) -> None:
        """Serve this state (lock held, nothing in flight)."""
        table = table_of(state)
        self._kept = (calls, state, blocks, table)
        brain = CBrain(
            calls.next, calls.complete, table.ctypes.data, state.status.ctypes.data, state.purpose.ctypes.data,
            state.slot.ctypes.data, state.status.shape[1],
        )  # fmt: skip
        memory = CMemory(
            blocks.sources.ctypes.data, blocks.bytes.ctypes.data, blocks.targets.ctypes.data, len(blocks.targets)
        )
        self.check(self._library.fc_bind(self._link, ctypes.byref(brain), ctypes.byref(memory)))

    def phase(self, phase: int) -> None:
        """Which phase copies are counted in (lock held)."""
        self._library.fc_phase(self._link, phase)

    def delays(self, graphs: Sequence[int], seed: int) -> None:
        """Launch one of these graphs, chosen at random, before every copy (lock held)."""
        self._delays = (ctypes.c_void_p * len(graphs))(*graphs)
        self._library.fc_delays(self._link, ctypes.addressof(self._delays), len(graphs), seed)

    def throttle(self, before: int | None, after: int | None) -> None:
        """Launch these graphs around every copy from now on, in its stream; None: nothing (lock held)."""
        self._library.fc_throttle(self._link, before, after)

    def record_spans(self, most: int) -> None:
        """Keep when copies were issued and seen to have landed, at most so many; 0 stops (lock held)."""
        self.check(self._library.fc_record_spans(self._link, most))

    def spans(self) -> NDArray[np.int64]:
        """[n, 4]: key, purpose, issued, landed in perf_counter nanoseconds (lock held)."""
        pointer = ctypes.POINTER(ctypes.c_int64)()
        n = self._library.fc_spans(self._link, ctypes.byref(pointer))
        return np.ctypeslib.as_array(pointer, (n, 4)).copy() if n else np.zeros((0, 4), np.int64)

    def settle(self) -> None:
        """Wait until nothing is in flight (lock held)."""
        self.check(self._library.fc_settle(self._link))

    def take_ready(self, keys: NDArray[np.int64]) -> int:
        """Wait until a copy among `keys` is issued; the index of the first in link order."""
        found = int(self._library.fc_take_ready(self._link, keys.ctypes.data, len(keys)))
        if found < 0:
            self.lock()
            self.unlock()  # raises the error that the link has met
            raise InternalError("the copy thread stopped")
        return found

    def wait_landed(self, keys: NDArray[np.int64]) -> None:
        """Wait until all of `keys` have landed."""
        self.check(self._library.fc_wait_landed(self._link, keys.ctypes.data, len(keys)))

    def when_landed(self, slot: int, compute: int) -> None:
        """Make the stream wait for the copy last issued into a slot."""
        self.check(self._library.fc_when_landed(self._link, slot, compute))

    def slot_used(self, slots: NDArray[np.int32], compute: int) -> None:
        """The kernels queued so far are the last that read `slots` (lock held)."""
        self.check(self._library.fc_slot_used(self._link, slots.ctypes.data, len(slots), compute))

    def instantiate(self, graph: int) -> int:
        """An executable graph of a captured one."""
        executable = ctypes.c_void_p()
        self.check(self._library.fc_instantiate(self._link, graph, ctypes.byref(executable)))
        return executable.value or 0

    def drop_graph(self, executable: int) -> None:
        """Give an executable graph up."""
        self._library.fc_drop_graph(self._link, executable)

    def launch(self, executable: int, compute: int) -> None:
        """Launch a graph."""
        self.check(self._library.fc_launch(self._link, executable, compute))

    def told(self, address: int, words: int, tag: int, timeout_ns: int) -> bool:
        """Wait until the upper halves of the int32 `words` at an address are `tag`; False after the time."""
        return bool(self._library.fc_told(self._link, address, words, tag, timeout_ns))

    def drive(self, on: bool, home: int = -1) -> None:
        """The calling thread serves the link from now on, on core `home` if that is one; or the link's own does."""
        self.check(self._library.fc_drive(self._link, on, home))

    def native(self, pool: int, stream: int) -> Native:
        """What a compiled step calls: workers of CPU experts (0: none) and the compute stream beside this link."""
        return Native(**self._addresses, link=self._link, pool=pool, stream=stream)

    def run(self, step: CStep) -> None:
        """Run a layer-step's experts."""
        self.check(self._library.fc_run(self._link, ctypes.byref(step)))

    def close(self) -> None:
        """Wait for copies in flight and stop the thread."""
        if self._link:
            self._library.fc_close(self._link)
            self._link = None
