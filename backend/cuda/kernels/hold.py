"""Kernels that keep a stream busy: how a link is made to look slower than it is."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def stamp(begun: tl.tensor) -> None:
    """One program: the device's time in nanoseconds goes to `begun` [1] int64."""
    tl.store(begun, globaltimer())


@triton.jit
def hold(begun: tl.tensor, least: tl.tensor) -> None:
    """One program: does not end before `least` [1] int64 nanoseconds have passed since `begun` [1]."""
    until = tl.load(begun) + tl.load(least)
    now = globaltimer()
    while now < until:
        now = globaltimer()
