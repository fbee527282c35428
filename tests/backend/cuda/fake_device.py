"""A CUDA device played by a thread: streams that run in any order that events allow, decided by a seed.

It stands in for the CUDA runtime's functions in the native library. Copies are memory copies; a "graph" is a Python
function. What a real device may do late, it does late: a copy or kernel that is ordered wrongly is seen.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import torch

from foreload.backend.cuda.issue import RUNTIME

NOT_READY = 600
POINTER, OUT = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
ARGUMENTS: dict[str, list[Any]] = {
    "cudaSetDevice": [ctypes.c_int],
    "cudaStreamCreateWithFlags": [OUT, ctypes.c_uint],
    "cudaStreamDestroy": [POINTER],
    "cudaStreamSynchronize": [POINTER],
    "cudaStreamWaitEvent": [POINTER, POINTER, ctypes.c_uint],
    "cudaEventCreateWithFlags": [OUT, ctypes.c_uint],
    "cudaEventDestroy": [POINTER],
    "cudaEventRecord": [POINTER, POINTER],
    "cudaEventQuery": [POINTER],
    "cudaMemcpyAsync": [POINTER, POINTER, ctypes.c_size_t, ctypes.c_int, POINTER],
    "cudaGraphInstantiate": [OUT, POINTER, ctypes.c_ulonglong],
    "cudaGraphExecDestroy": [POINTER],
    "cudaGraphLaunch": [POINTER, POINTER],
    "cudaGetLastError": [],
}


class FakeDevice:
    """`functions` for `Issuer`; itself a `Capture`; `log` of what ran: ("copy", address) or ("graph", number)."""

    def __init__(self, seed: int = 0, automatic: bool = True) -> None:
        self.log: list[tuple[str, int]] = []
        self.failing: dict[str, int] = {}  # function name -> the error it returns
        self.most_in_flight = 0
        self._random = Random(seed)
        self._lock = threading.Condition()
        self._streams: dict[int, deque[tuple[Any, ...]]] = {0: deque()}
        self._recorded: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._graphs: dict[int, Callable[[], None]] = {}
        self._next = 1
        self._callbacks = [ctypes.CFUNCTYPE(ctypes.c_int, *ARGUMENTS[name])(getattr(self, name)) for name in RUNTIME]
        self.functions = [ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in self._callbacks]
        self.error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True) if automatic else None
        if self._thread is not None:
            self._thread.start()

    # What runs

    def _runnable(self) -> list[int]:
        found = []
        for stream, queue in self._streams.items():
            if queue and not (queue[0][0] == "wait" and self._done.get(queue[0][1], 0) < queue[0][2]):
                found.append(stream)
        return found

    def advance(self, stream: int | None = None) -> bool:
        """Run one operation of a stream (None: of any that can); False if there is none."""
        with self._lock:
            ready = [s for s in self._runnable() if stream is None or s == stream]
            if not ready:
                return False
            queue = self._streams[self._random.choice(ready)]
            kind, *given = queue[0]
        if kind == "copy":
            ctypes.memmove(*given)
            self.log.append(("copy", given[0]))
        elif kind == "graph":
            with torch.inference_mode():
                self._graphs[given[0]]()
            self.log.append(("graph", given[0]))
        with self._lock:
            queue.popleft()  # only now is the stream done with it
            if kind == "record":
                self._done[given[0]] = given[1]
        return True

    def _run(self) -> None:
        try:
            while not self._stopped:
                if not self.advance():
                    time.sleep(1e-5)
                elif self._random.random() < 0.05:
                    time.sleep(2e-5)
        except BaseException as error:
            self.error = error

    @property
    def idle(self) -> bool:
        """Whether all streams are empty; raises what a graph has raised."""
        if self.error is not None:
            raise self.error
        with self._lock:
            return not any(self._streams.values())

    def close(self) -> None:
        """Stop the thread."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def __call__(self, piece: Callable[[], None]) -> int:
        """`Capture`: a number that `cudaGraphLaunch` knows."""
        number = self._new()
        self._graphs[number] = piece
        return number

    def drop(self, executable: int) -> None:
        """See `Capture`."""
        del self._graphs[executable]

    def queue(self, work: Callable[[], None]) -> None:
        """Put work into the compute stream."""
        self._push(0, "graph", self(work))

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _push(self, stream: int | None, *operation: Any) -> int:
        with self._lock:
            self._streams[stream or 0].append(operation)
            copies = sum(op[0] == "copy" for queue in self._streams.values() for op in queue)
            self.most_in_flight = max(self.most_in_flight, copies)
        return 0

    # The runtime's functions

    def cudaSetDevice(self, device: int) -> int:  # noqa: N802
        return self.failing.get("cudaSetDevice", 0)

    def cudaStreamCreateWithFlags(self, out: Any, flags: int) -> int:  # noqa: N802
        out[0] = self._new()
        self._streams[out[0]] = deque()
        return 0

    def cudaStreamDestroy(self, stream: int) -> int:  # noqa: N802
        return 0

    def cudaStreamSynchronize(self, stream: int) -> int:  # noqa: N802
        while self._streams[stream] and self.error is None:
            if self._thread is None:
                self.advance()
            time.sleep(1e-5)
        return 0

    def cudaStreamWaitEvent(self, stream: int | None, event: int, flags: int) -> int:  # noqa: N802
        return self._push(stream, "wait", event, self._recorded.get(event, 0))

    def cudaEventCreateWithFlags(self, out: Any, flags: int) -> int:  # noqa: N802
        out[0] = self._new()
        return 0

    def cudaEventDestroy(self, event: int) -> int:  # noqa: N802
        return 0

    def cudaEventRecord(self, event: int, stream: int | None) -> int:  # noqa: N802
        self._recorded[event] = self._recorded.get(event, 0) + 1
        return self._push(stream, "record", event, self._recorded[event])

    def cudaEventQuery(self, event: int) -> int:  # noqa: N802
        code = self.failing.get("cudaEventQuery", 0)
        return code or (0 if self._done.get(event, 0) == self._recorded.get(event, 0) else NOT_READY)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> int:  # noqa: N802
        return self.failing.get("cudaMemcpyAsync", 0) or self._push(stream, "copy", target, source, size)

    def cudaGraphInstantiate(self, out: Any, graph: int, flags: int) -> int:  # noqa: N802
        out[0] = graph
        return 0

    def cudaGraphExecDestroy(self, graph: int) -> int:  # noqa: N802
        return 0

    def cudaGraphLaunch(self, graph: int, stream: int | None) -> int:  # noqa: N802
        return self._push(stream, "graph", graph)

    def cudaGetLastError(self) -> int:  # noqa: N802
        return 0
