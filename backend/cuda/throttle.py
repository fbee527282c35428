"""A link made to look slower: its stream stays busy after a copy until a slower link would have been done.

The rate is at most the one asked for; what a copy waits for behind others, and the copies themselves, stay real.
"""

from __future__ import annotations

import importlib.util

import torch

from foreload.backend.cuda.kernels.ops import Ops
from foreload.backend.cuda.programs import Capture
from foreload.errors import UsageError


class Stopwatch:
    """Begins with a copy and ends, at the earliest, when a link of some rate would have been done with it.

    Copies of one stream alone may share it: they follow each other.
    """

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._ops, self._device = ops, device
        self._begun = torch.zeros(1, dtype=torch.int64, device=device)
        self._least: dict[int, torch.Tensor] = {}

    def start(self) -> None:
        """Queue the beginning on the current stream."""
        self._ops.stamp(self._begun)

    def stop(self, least_ns: int) -> None:
        """Queue the end, `least_ns` after the beginning or later."""
        if least_ns not in self._least:
            self._least[least_ns] = torch.tensor([least_ns], device=self._device)
        self._ops.hold(self._begun, self._least[least_ns])


class CapturedStopwatch:
    """The same as two graphs, launched before and after every copy; all of them last equally long."""

    def __init__(self, ops: Ops, device: torch.device, capture: Capture) -> None:
        self._begun = torch.zeros(1, dtype=torch.int64, device=device)  # graphs know its address alone
        self._least = torch.zeros_like(self._begun)
        ops.stamp(self._begun)
        ops.hold(self._begun, self._least)  # compiled before it is captured
        self.before = capture(lambda: ops.stamp(self._begun))
        self.after = capture(lambda: ops.hold(self._begun, self._least))

    def last(self, least_ns: int) -> None:
        """How long a copy takes at least, from now on."""
        self._least.fill_(least_ns)


def triton_ops() -> Ops:
    """The kernels; UsageError where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise UsageError("a link of another rate than the real one needs Triton, which is not installed")
    from foreload.backend.cuda.kernels.triton_ops import TritonOps

    return TritonOps()
