"""Kernels that wait: for the host's word, and for how long a link takes that is made to look slower than it is."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def awaited(word: tl.tensor, number: tl.tensor, FENCE: tl.constexpr) -> tl.tensor:
    """The host's `word` [1] once it is at least `number`; a load that depends on it comes behind the host's stores."""
    seen = tl.load(word, volatile=True)
    while seen < number:
        seen = tl.load(word, volatile=True)
    if FENCE:
        seen = tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [seen], dtype=tl.int32, is_pure=False, pack=1
        )
    return seen


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
