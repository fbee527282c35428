"""Kernels that wait: for the host's words, and for how long a link takes that is made to look slower than it is."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer


@triton.jit
def follow(PDL: tl.constexpr, MORE: tl.constexpr) -> None:
    """Wait until the kernel before this one is done, and let the next one begin to (programmatic dependent launch).

    It comes before everything else that a kernel does, so whatever came before it is done as well. Without MORE, for
    kernels that wait for the host, the next one begins when this one ends: it would keep places that others need.
    """
    if PDL:
        gdc_wait()
        if MORE:
            gdc_launch_dependents()


@triton.jit
def turn_of(current: tl.tensor, LAYER: int, LAYERS: tl.constexpr) -> tl.tensor:
    """The turn of a layer, int64 (`ops.Turn`)."""
    return tl.load(current).to(tl.int64) * LAYERS + LAYER


@triton.jit
def words_of(words: tl.tensor, inside: tl.tensor, turn: tl.tensor) -> tl.tensor:
    """The lower halves, int64, of words the host writes, once the upper ones of those `inside` are at least `turn`.

    A word is read whole, so nothing needs to be ordered; one look costs as long as the link's queue is.
    """
    seen = tl.load(words, mask=inside, other=0, volatile=True)
    while tl.sum((inside & (seen >> 32 < turn)).to(tl.int32)) > 0:
        seen = tl.load(words, mask=inside, other=0, volatile=True)
    return seen & 0xFFFFFFFF


@triton.jit(do_not_specialize=["ITEMS", "LAYER"])
def await_host(
    current: tl.tensor,
    soon: tl.tensor,
    on_host: tl.tensor,
    ITEMS: int,
    LAYER: int,
    LAYERS: tl.constexpr,
    ITEMS_UP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: if any of ITEMS items is `on_host`, waits until the host's word `soon` [1] is this turn, or later.

    The many programs behind it, which look at all that the host has computed, would take the link's time meanwhile.
    """
    follow(PDL, False)
    it = tl.arange(0, ITEMS_UP)
    if tl.sum(tl.load(on_host + it, mask=it < ITEMS, other=0)) > 0:
        turn = turn_of(current, LAYER, LAYERS)
        seen = tl.load(soon, volatile=True)
        while seen < turn:
            seen = tl.load(soon, volatile=True)


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
