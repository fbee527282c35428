"""Links: how one expert block gets from the host slab into a device slot, and when it has arrived."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foreload.backend.cuda.throttle import Stopwatch


def transfer_ns(size_bytes: int, bytes_per_second: int) -> int:
    """Nanoseconds that so many bytes take at a rate."""
    return size_bytes * 10**9 // bytes_per_second


class Order:
    """How the decoding thread's kernels and the copies into slots are ordered against each other."""

    asynchronous: bool
    """Whether a kernel may be queued on a copy that is only issued (`when_landed` orders the two)."""

    def slot_used(self, slots: list[int]) -> None:
        """The kernels queued so far are the last that read `slots`; the next copy into one waits for them.

        Synchronous links have nothing to remember.
        """

    def when_landed(self, slot: int) -> None:
        """Make the kernels queued from now on wait for the copy last issued into `slot`.

        Synchronous links land before they say so.
        """


class Link(Order, ABC):
    """A first-in first-out channel, used by the copy thread. `issue` never blocks; `landed` says what has arrived."""

    @abstractmethod
    def issue(self, key: int, source: Tensor, target: Tensor, slot: int) -> None:
        """Start copying `source` [weights] on the host to the device slot `target`."""

    @abstractmethod
    def landed(self) -> list[int]:
        """Keys whose copies have arrived since the last call, in order."""

    @abstractmethod
    def throttle(self, bytes_per_second: int | None) -> None:
        """Make copies issued from now on take as long as over a link of this rate; None: as long as they take."""

    @abstractmethod
    def pause_s(self) -> float:
        """How long the copy thread may sleep before the oldest copy in flight can land."""

    @abstractmethod
    def block(self) -> None:
        """Sleep until the oldest copy in flight has landed."""


class HostLink(Link):
    """`device=cpu`: memory to memory, at the host's own speed or slowed to an emulated rate.

    The emulated link is busy from the later of issue and its previous end, so back-to-back copies keep the rate
    whatever the sleep's resolution is.
    """

    asynchronous = False

    def __init__(self, bytes_per_second: int | None, delay: Random | None = None) -> None:
        self._rate = bytes_per_second
        self._delay = delay
        self._free_at_ns = 0
        self._flying: deque[tuple[int, int]] = deque()  # (key, arrival time)

    def issue(self, key: int, source: Tensor, target: Tensor, slot: int) -> None:
        """Copy at once; the block counts as landed when the emulated transfer is over."""
        now = time.perf_counter_ns()
        target.copy_(source)
        duration = transfer_ns(source.numel() * source.element_size(), self._rate) if self._rate else 0
        if self._delay is not None:
            duration += self._delay.randrange(2_000_000)
        self._free_at_ns = max(now, self._free_at_ns) + duration
        self._flying.append((key, self._free_at_ns))

    def throttle(self, bytes_per_second: int | None) -> None:
        """See `Link`."""
        self._rate = bytes_per_second

    def landed(self) -> list[int]:
        """Keys whose transfer time is over."""
        now = time.perf_counter_ns()
        done = []
        while self._flying and self._flying[0][1] <= now:
            done.append(self._flying.popleft()[0])
        return done

    def pause_s(self) -> float:
        """Time until the oldest transfer ends."""
        return max(0, self._flying[0][1] - time.perf_counter_ns()) / 1e9

    def block(self) -> None:
        """Sleep until the oldest transfer ends."""
        time.sleep(self.pause_s())


class CudaLink(Link):
    """`device=cuda`: asynchronous copies on their own stream, ordered against the kernels by events."""

    asynchronous = True
    POLL_S = 20e-6

    def __init__(self, device: torch.device, delay: Random | None = None, bytes_per_second: int | None = None) -> None:
        """`bytes_per_second`: as for `throttle`; UsageError where Triton, which that takes, is not installed."""
        self._stream = torch.cuda.Stream(device)
        self._device, self._delay = device, delay
        self._watch: Stopwatch | None = None
        self._rate: int | None = None
        self.throttle(bytes_per_second)
        self._copied: dict[int, torch.cuda.Event] = {}
        self._used: dict[int, torch.cuda.Event] = {}
        self._flying: deque[tuple[int, torch.cuda.Event]] = deque()

    def issue(self, key: int, source: Tensor, target: Tensor, slot: int) -> None:
        """Queue the copy behind the last kernel that read the slot."""
        used = self._used.get(slot)
        with torch.cuda.stream(self._stream):
            if used is not None:
                self._stream.wait_event(used)
            if self._delay is not None:
                torch.cuda._sleep(self._delay.randrange(1, 1_000_000))
            watch, rate = self._watch, self._rate
            if watch is not None and rate is not None:
                watch.start()
            target.copy_(source, non_blocking=True)
            if watch is not None and rate is not None:
                watch.stop(transfer_ns(source.numel() * source.element_size(), rate))
            event = self._copied.setdefault(slot, torch.cuda.Event())
            event.record(self._stream)
        self._flying.append((key, event))

    def throttle(self, bytes_per_second: int | None) -> None:
        """See `Link`."""
        if bytes_per_second is not None and self._watch is None:
            from foreload.backend.cuda.throttle import Stopwatch, triton_ops

            self._watch = Stopwatch(triton_ops(), self._device)
        self._rate = bytes_per_second

    def landed(self) -> list[int]:
        """Keys whose event has fired."""
        done = []
        while self._flying and self._flying[0][1].query():
            done.append(self._flying.popleft()[0])
        return done

    def pause_s(self) -> float:
        """The polling interval."""
        return self.POLL_S

    def block(self) -> None:
        """Wait for the oldest copy's event."""
        self._flying[0][1].synchronize()

    def slot_used(self, slots: list[int]) -> None:
        """Remember the current point of the compute stream for `slots`."""
        event = torch.cuda.Event()
        event.record()
        for slot in slots:
            self._used[slot] = event

    def when_landed(self, slot: int) -> None:
        """Let the compute stream wait for the slot's copy."""
        torch.cuda.current_stream().wait_event(self._copied[slot])
