"""Router kernels: scores to ranked experts, replayed routing in their place, and word of it to the host."""

from __future__ import annotations

import triton
import triton.language as tl

from foreload.backend.cuda.kernels.hold import follow, turn_of, words_of


@triton.jit
def top_k(
    logits: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    current: tl.tensor,
    words: tl.tensor,
    correction: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_UP: tl.constexpr,
    K: tl.constexpr,
    K_UP: tl.constexpr,
    NORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    SCALE: tl.constexpr,
    TELL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row): softmax over all experts in fp32, the K largest in rank order (ties: the lower id), times SCALE.

    SIGMOID: the scores are sigmoids instead; CORRECTED: ranked after `correction` [EXPERTS] fp32 is added.

    logits [n, EXPERTS] fp32; ids [n, K] int64, weights [n, K] fp32. _UP: the next power of two. TELL: the ids also go
    to `words` in host memory, as `publish` writes them.
    """
    follow(PDL, True)
    row = tl.program_id(0)
    experts, ranks = tl.arange(0, EXPERTS_UP), tl.arange(0, K_UP)
    inside = experts < EXPERTS
    left = tl.load(logits + row * EXPERTS + experts, mask=inside, other=float("-inf"))
    if not SIGMOID:
        highest = tl.max(left, axis=0)
        total = tl.sum(tl.exp(left - highest), axis=0)
    elif CORRECTED:
        left = tl.where(inside, tl.sigmoid(left) + tl.load(correction + experts, mask=inside, other=0.0), left)
    chosen, score = tl.zeros([K_UP], tl.int32), tl.full([K_UP], float("-inf"), tl.float32)
    for rank in range(K):
        best = tl.max(left, axis=0)
        first = tl.min(tl.where(left == best, experts, EXPERTS - 1), axis=0)
        chosen = tl.where(ranks == rank, first, chosen)
        score = tl.where(ranks == rank, best, score)
        left = tl.where(experts == first, float("-inf"), left)
    if SIGMOID and CORRECTED:
        score = tl.load(logits + row * EXPERTS + chosen, mask=ranks < K, other=float("-inf"))
    if SIGMOID:
        chances = tl.sigmoid(score)
        if NORMALISE:
            chances = chances / (tl.sum(chances, axis=0) + 1e-20)  # `routing.SMALLEST_SUM`
    else:
        chances = tl.exp(score - highest) / total
        if NORMALISE:
            chances = chances / tl.sum(chances, axis=0)
    chances *= SCALE
    tl.store(ids + row * K + ranks, chosen.to(tl.int64), mask=ranks < K)
    tl.store(weights + row * K + ranks, chances, mask=ranks < K)
    if TELL:
        tag = (tl.load(current) & 0x7FFF) << 16
        tl.store(words + row * K + ranks, tag | chosen, mask=ranks < K)


@triton.jit(do_not_specialize=["LAYER"])
def replay_routes(
    current: tl.tensor,
    table_ids: tl.tensor,
    table_weights: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    words: tl.tensor,
    LAYER: int,
    LAYERS: tl.constexpr,
    K: tl.constexpr,
    K_UP: tl.constexpr,
    TELL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row): ids and weights of this layer become the recorded ones; tables [rows, LAYERS, K].

    TELL: as for `top_k`.
    """
    follow(PDL, True)
    row = tl.program_id(0)
    ranks = tl.arange(0, K_UP)
    inside = ranks < K
    start = ((tl.load(current + 2) + row).to(tl.int64) * LAYERS + LAYER) * K
    found = tl.load(table_ids + start + ranks, mask=inside, other=0).to(tl.int32)
    tl.store(ids + row * K + ranks, found.to(tl.int64), mask=inside)
    if TELL:
        tag = (tl.load(current) & 0x7FFF) << 16
        tl.store(words + row * K + ranks, tag | (found & 0xFFFF), mask=inside)
    chances = tl.load(table_weights + start + ranks, mask=inside, other=0.0).to(tl.float32)
    tl.store(weights + row * K + ranks, chances, mask=inside)


@triton.jit(do_not_specialize=["TABLE_ROWS", "FIRST"])
def replay_predictions(
    current: tl.tensor,
    table: tl.tensor,
    predicted: tl.tensor,
    TABLE_ROWS: int,
    FIRST: int,
    LAYERS: tl.constexpr,
    STORED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_UP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row, target): predictions for layer FIRST + target become the recorded ones.

    table int16 [depths, TABLE_ROWS, LAYERS, STORED]; predicted int64 [targets, n, WIDTH].
    """
    follow(PDL, True)
    row, target = tl.program_id(0), tl.program_id(1)
    ranks = tl.arange(0, WIDTH_UP)
    inside = ranks < WIDTH
    rows = tl.num_programs(0)
    here = tl.load(current + 2).to(tl.int64) + row
    start = ((target * TABLE_ROWS + here) * LAYERS + FIRST + target) * STORED
    found = tl.load(table + start + ranks, mask=inside, other=-1).to(tl.int64)
    tl.store(predicted + (target * rows + row) * WIDTH + ranks, found, mask=inside)


@triton.jit(do_not_specialize=["IDS", "ELEMENTS"])
def publish(
    current: tl.tensor,
    ids: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    words: tl.tensor,
    host_rows: tl.tensor,
    host_weights: tl.tensor,
    IDS: int,
    ELEMENTS: int,
    IDS_UP: tl.constexpr,
    COLS: tl.constexpr,
    ALONE: tl.constexpr,
    FENCE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: ids (or predictions, -1: none) go to host memory, unless ALONE after ELEMENTS of the experts' input
    and what its outputs are weighted by [IDS].

    words int32 [IDS]: the lower 15 bits of the step's number over 16 bits of the id, so that each word says by itself
    whether it has arrived. The barrier and the system-wide fence put all stores of the block before the words.
    """
    follow(PDL, True)
    for first in range(0, ELEMENTS, COLS):
        cols = first + tl.arange(0, COLS)
        tl.store(host_rows + cols, tl.load(rows + cols, mask=cols < ELEMENTS), mask=cols < ELEMENTS)
    number = tl.load(current)
    at = tl.arange(0, IDS_UP)
    if not ALONE:
        tl.store(host_weights + at, tl.load(weights + at, mask=at < IDS), mask=at < IDS)
        tl.debug_barrier()
        if FENCE:
            number = tl.inline_asm_elementwise(
                "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
            )
    found = tl.load(ids + at, mask=at < IDS, other=0).to(tl.int32) & 0xFFFF
    tl.store(words + at, ((number & 0x7FFF) << 16) | found, mask=at < IDS)


@triton.jit(do_not_specialize=["ITEMS", "LAYER"])
def take_plan(
    current: tl.tensor,
    words: tl.tensor,
    plan: tl.tensor,
    items: tl.tensor,
    on_host: tl.tensor,
    ITEMS: int,
    LAYER: int,
    LAYERS: tl.constexpr,
    ITEMS_UP: tl.constexpr,
    ENTRY: tl.constexpr,
    KINDS: tl.constexpr,
    WAIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: the host's words int64 [KINDS, ITEMS] become a plan, its items and whose they are (`Ops.take_plan`).

    Many programs read them here: plan int64 [ITEMS, ENTRY], items and on_host int64 [ITEMS].

    WAIT: once all words are of the turn (`turn_of`), or a later one's.
    """
    follow(PDL, False)
    at = tl.arange(0, KINDS * ITEMS_UP)
    kind, it = at // ITEMS_UP, at % ITEMS_UP
    inside = it < ITEMS
    turn = turn_of(current, LAYER, LAYERS) if WAIT else 0
    found = words_of(words + kind * ITEMS + it, inside, turn)
    # Each word has a store of its own, masked; an address in its two halves.
    halves = plan.to(tl.pointer_type(tl.int32))
    tl.store(halves + 2 * it * ENTRY + kind, found.to(tl.int32), mask=inside & (kind < 2))
    tl.store(plan + it * ENTRY + 1, found & 0xFFFF, mask=inside & (kind == 2))
    tl.store(plan + it * ENTRY + 2, found >> 16, mask=inside & (kind == 2))
    tl.store(items + it, found & 0x7FFFFFFF, mask=inside & (kind == 3))
    tl.store(on_host + it, found >> 31, mask=inside & (kind == 3))


@triton.jit(do_not_specialize=["LAYER", "N_ITEMS"])
def plan_resident(
    ids: tl.tensor,
    addresses: tl.tensor,
    plan: tl.tensor,
    items: tl.tensor,
    LAYER: int,
    N_ITEMS: int,
    EXPERTS: tl.constexpr,
    ITEMS_UP: tl.constexpr,
    ENTRY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program: the plan of a layer whose experts are all resident; addresses int64 [layers, EXPERTS].

    The group of an expert stands where its first item does, so groups need no counting across items.
    """
    follow(PDL, True)
    at = tl.arange(0, ITEMS_UP)
    inside = at < N_ITEMS
    expert = tl.load(ids + at, mask=inside, other=-1)
    same = (expert[:, None] == expert[None, :]) & inside[:, None] & inside[None, :]
    first = tl.min(tl.where(same, at[None, :], ITEMS_UP), axis=1)
    count = tl.sum(same.to(tl.int32), axis=1)
    before = tl.sum((same & (at[None, :] < at[:, None])).to(tl.int32), axis=1)
    leads = (first == at) & inside
    # Items sorted by (group, item): those of groups that begin earlier come first.
    start = tl.sum(tl.where(inside[None, :] & (first[None, :] < first[:, None]), 1, 0), axis=1)
    address = tl.load(addresses + LAYER * EXPERTS + expert, mask=leads, other=0)
    tl.store(plan + at * ENTRY, address, mask=inside)
    tl.store(plan + at * ENTRY + 1, start.to(tl.int64), mask=inside)
    tl.store(plan + at * ENTRY + 2, count.to(tl.int64), mask=inside)
    tl.store(items + start + before, at.to(tl.int64), mask=inside)
