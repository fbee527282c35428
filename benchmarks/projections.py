"""Ways to compute the projections of a decode step over one token and over several, timed beside those in use.

    python -m benchmarks.projections --out FILE [--model shape:qwen3-30b-a3b] [--tokens 1,2,3,5,9] [--seconds 110]

A chain of all layers' norm and projection to queries, keys and values, projection back, and norm and gate, each with
weights of its own, in one graph. `rows` are matrix-vector kernels, a token after the other or each in programs of its
own (`apart`), or two at once (`pairs`); `tiles` use tensor cores, whose columns are tokens. Of each way: microseconds a
layer by tokens, the largest relative difference from float32, and whether a token's numbers are the same whatever the
number of tokens; and what a layer of one token takes behind a rest, as behind CPU experts, without and with its weights
brought to the L2 cache before it. Writes FILE (JSON).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreload.backend.cuda.kernels.dense import fetch
from foreload.backend.cuda.kernels.hold import follow
from foreload.backend.cuda.kernels.ops import tiles
from foreload.backend.cuda.kernels.triton_ops import TritonOps
from foreload.backend.models.checkpoint import Checkpoint
from foreload.files import write_json
from foreload.machine import machine_name, software

EPS = 1e-6
REPLAYS = 40
REST_CYCLES, BROUGHT_ROWS = 200_000, 32
"""A rest of about 100 us; rows that a program of `bring` asks for."""


@triton.jit(do_not_specialize=["N"])
def tiles_norm_linear(
    x: tl.tensor,
    norm: tl.tensor,
    weights: tl.tensor,
    y: tl.tensor,
    N: int,
    HIDDEN: tl.constexpr,
    OUT: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row tile of `weights`): y [N, OUT] = weights @ rms_norm(x [N, HIDDEN]); N <= TOKENS."""
    tile = tl.program_id(0)
    if PDL:
        fetch(weights, tile * ROWS, ROWS, HIDDEN, OUT)
    follow(PDL, True)
    rows, tokens = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    used, inside_rows = tokens < N, rows < OUT
    squares = tl.zeros([TOKENS, COLS], tl.float32)
    for at in range(0, HIDDEN, COLS):
        cols = at + tl.arange(0, COLS)
        mask = used[:, None] & (cols < HIDDEN)[None, :]
        value = tl.load(x + (tokens * HIDDEN)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += value * value
    scale = tl.rsqrt(tl.sum(squares, axis=1) / HIDDEN + EPS)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for at in range(0, HIDDEN, COLS):
        cols = at + tl.arange(0, COLS)
        inside = cols < HIDDEN
        place = (rows.to(tl.int64) * HIDDEN)[:, None] + cols[None, :]
        block = tl.load(weights + place, mask=inside_rows[:, None] & inside[None, :], other=0.0)
        mask = used[:, None] & inside[None, :]
        value = tl.load(x + (tokens * HIDDEN)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        value = value * scale[:, None] * tl.load(norm + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        total = tl.dot(block, tl.trans(value.to(block.dtype)), total, input_precision="ieee")
    there = y + (tokens * OUT)[None, :] + rows[:, None]
    tl.store(there, total.to(y.dtype.element_ty), mask=inside_rows[:, None] & used[None, :])


@triton.jit(do_not_specialize=["N"])
def tiles_linear_residual(
    x: tl.tensor,
    weights: tl.tensor,
    residual: tl.tensor,
    y: tl.tensor,
    N: int,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row tile of `weights`): y [N, OUT] = residual + weights @ x [N, WIDTH]; N <= TOKENS."""
    tile = tl.program_id(0)
    if PDL:
        fetch(weights, tile * ROWS, ROWS, WIDTH, OUT)
    follow(PDL, True)
    rows, tokens = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    used, inside_rows = tokens < N, rows < OUT
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for at in range(0, WIDTH, COLS):
        cols = at + tl.arange(0, COLS)
        inside = cols < WIDTH
        place = (rows.to(tl.int64) * WIDTH)[:, None] + cols[None, :]
        block = tl.load(weights + place, mask=inside_rows[:, None] & inside[None, :], other=0.0)
        mask = used[:, None] & inside[None, :]
        value = tl.load(x + (tokens * WIDTH)[:, None] + cols[None, :], mask=mask, other=0.0)
        total = tl.dot(block, tl.trans(value), total, input_precision="ieee")
    there = (tokens * OUT)[None, :] + rows[:, None]
    mask = inside_rows[:, None] & used[None, :]
    total += tl.load(residual + there, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + there, total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def rows_norm_linear(
    x: tl.tensor,
    norm: tl.tensor,
    weights: tl.tensor,
    y: tl.tensor,
    N: int,
    HIDDEN: tl.constexpr,
    OUT: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row tile of `weights`, token or PAIRS of them): as `tiles_norm_linear`."""
    tile, first = tl.program_id(0), tl.program_id(1) * (2 if PAIRS else 1)
    if PDL:
        fetch(weights, tile * ROWS, ROWS, HIDDEN, OUT)
    follow(PDL, True)
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside_rows, last = rows < OUT, N - 1 - first
    a, b = x + first * HIDDEN, x + (first + 1) * HIDDEN
    of_a, of_b = tl.zeros([COLS], tl.float32), tl.zeros([COLS], tl.float32)
    for at in range(0, HIDDEN, COLS):
        cols = at + tl.arange(0, COLS)
        value = tl.load(a + cols, mask=cols < HIDDEN, other=0.0).to(tl.float32)
        of_a += value * value
        if PAIRS:
            value = tl.load(b + cols, mask=(cols < HIDDEN) & (0 * cols < last), other=0.0).to(tl.float32)
            of_b += value * value
    scale_a = tl.rsqrt(tl.sum(of_a, axis=0) / HIDDEN + EPS)
    scale_b = tl.rsqrt(tl.sum(of_b, axis=0) / HIDDEN + EPS) if PAIRS else scale_a
    total_a, total_b = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for at in range(0, HIDDEN, COLS):
        cols = at + tl.arange(0, COLS)
        inside = cols < HIDDEN
        mask = inside_rows[:, None] & inside[None, :]
        place = (rows.to(tl.int64) * HIDDEN)[:, None] + cols[None, :]
        block = tl.load(weights + place, mask=mask, other=0.0).to(tl.float32)
        gain = tl.load(norm + cols, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(a + cols, mask=inside, other=0.0).to(tl.float32) * scale_a * gain
        total_a += block * value.to(x.dtype.element_ty).to(tl.float32)[None, :]
        if PAIRS:
            value = tl.load(b + cols, mask=inside & (0 * cols < last), other=0.0).to(tl.float32) * scale_b * gain
            total_b += block * value.to(x.dtype.element_ty).to(tl.float32)[None, :]
    tl.store(y + first * OUT + rows, tl.sum(total_a, axis=1).to(y.dtype.element_ty), mask=inside_rows)
    if PAIRS:
        found = tl.sum(total_b, axis=1).to(y.dtype.element_ty)
        tl.store(y + (first + 1) * OUT + rows, found, mask=inside_rows & (0 * rows < last))


@triton.jit(do_not_specialize=["N"])
def rows_linear_residual(
    x: tl.tensor,
    weights: tl.tensor,
    residual: tl.tensor,
    y: tl.tensor,
    N: int,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row tile of `weights`, token or PAIRS of them): as `tiles_linear_residual`."""
    tile, first = tl.program_id(0), tl.program_id(1) * (2 if PAIRS else 1)
    if PDL:
        fetch(weights, tile * ROWS, ROWS, WIDTH, OUT)
    follow(PDL, True)
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside_rows, last = rows < OUT, N - 1 - first
    total_a, total_b = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for at in range(0, WIDTH, COLS):
        cols = at + tl.arange(0, COLS)
        inside = cols < WIDTH
        mask = inside_rows[:, None] & inside[None, :]
        place = (rows.to(tl.int64) * WIDTH)[:, None] + cols[None, :]
        block = tl.load(weights + place, mask=mask, other=0.0).to(tl.float32)
        total_a += block * tl.load(x + first * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        if PAIRS:
            value = tl.load(x + (first + 1) * WIDTH + cols, mask=inside & (0 * cols < last), other=0.0)
            total_b += block * value.to(tl.float32)[None, :]
    there = first * OUT + rows
    found = tl.sum(total_a, axis=1) + tl.load(residual + there, mask=inside_rows, other=0.0).to(tl.float32)
    tl.store(y + there, found.to(y.dtype.element_ty), mask=inside_rows)
    if PAIRS:
        there += OUT
        mask = inside_rows & (0 * rows < last)
        found = tl.sum(total_b, axis=1) + tl.load(residual + there, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + there, found.to(y.dtype.element_ty), mask=mask)


@triton.jit
def bring(weights: tl.tensor, WIDTH: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr) -> None:
    """Program (row tile of `weights` [OUT, WIDTH]): it begins to come into the L2 cache."""
    follow(PDL, True)
    fetch(weights, tl.program_id(0) * ROWS, ROWS, WIDTH, OUT)


@dataclass(frozen=True)
class Way:
    """How both kinds of projection are computed: `norm_linear(x, norm, weights, y)` and
    `linear_residual(x, weights, residual, y)`, of tensors [tokens, ...].
    """

    name: str
    norm_linear: Callable[[Tensor, Tensor, Tensor, Tensor], object]
    linear_residual: Callable[[Tensor, Tensor, Tensor, Tensor], object]


def in_use(pdl: bool) -> Way:
    """What decode steps run."""
    ops = TritonOps(pdl=pdl)
    return Way(
        "in use",
        lambda x, norm, weights, y: ops.norm_linear(x, norm, weights, None, y, None, EPS),
        lambda x, weights, residual, y: ops.linear_residual(x, weights, None, residual, y),
    )


def by_tiles(pdl: bool, rows: int, cols: int, tokens: int, warps: int, stages: int) -> Way:
    """On tensor cores: `rows` of the weights by `tokens`, `cols` columns at a time."""
    build: dict[str, Any] = {"ROWS": rows, "COLS": cols, "TOKENS": tokens, "PDL": pdl, "launch_pdl": pdl}
    build |= {"num_warps": warps, "num_stages": stages}

    def norm_linear(x: Tensor, norm: Tensor, weights: Tensor, y: Tensor) -> None:
        (n, hidden), out = x.shape, y.shape[1]
        tiles_norm_linear[(tiles(out, rows),)](x, norm, weights, y, N=n, HIDDEN=hidden, OUT=out, EPS=EPS, **build)

    def linear_residual(x: Tensor, weights: Tensor, residual: Tensor, y: Tensor) -> None:
        (n, width), out = x.shape, y.shape[1]
        tiles_linear_residual[(tiles(out, rows),)](x, weights, residual, y, N=n, WIDTH=width, OUT=out, **build)

    return Way(f"tiles {rows} x {cols}, {tokens} tokens, {warps} warps, {stages} stages", norm_linear, linear_residual)


def by_rows(pdl: bool, rows: int, cols: int, warps: int, pairs: bool) -> Way:
    """A program for each token, or for two of them."""
    build: dict[str, Any] = {"ROWS": rows, "COLS": cols, "PAIRS": pairs, "PDL": pdl, "launch_pdl": pdl}
    build["num_warps"] = warps

    def groups(n: int) -> int:
        return (n + 1) // 2 if pairs else n

    def norm_linear(x: Tensor, norm: Tensor, weights: Tensor, y: Tensor) -> None:
        (n, hidden), out = x.shape, y.shape[1]
        grid = (tiles(out, rows), groups(n))
        rows_norm_linear[grid](x, norm, weights, y, N=n, HIDDEN=hidden, OUT=out, EPS=EPS, **build)

    def linear_residual(x: Tensor, weights: Tensor, residual: Tensor, y: Tensor) -> None:
        (n, width), out = x.shape, y.shape[1]
        grid = (tiles(out, rows), groups(n))
        rows_linear_residual[grid](x, weights, residual, y, N=n, WIDTH=width, OUT=out, **build)

    return Way(f"rows {rows} x {cols}, {warps} warps, {'pairs' if pairs else 'apart'}", norm_linear, linear_residual)


def ways(pdl: bool) -> Iterator[Way]:
    """Those in use first, then the others from the most promising on."""
    yield in_use(pdl)
    for tokens in (16, 8):
        for rows, cols, warps, stages in (
            (32, 256, 4, 3), (16, 256, 4, 4), (32, 128, 4, 5), (16, 512, 4, 3), (64, 128, 4, 4), (16, 256, 2, 4),
            (32, 256, 8, 3), (16, 128, 2, 6),
        ):  # fmt: skip
            yield by_tiles(pdl, rows, cols, tokens, warps, stages)
    for rows, warps in ((4, 4), (2, 4), (8, 4), (8, 8), (2, 2)):
        for pairs in (False, True):
            yield by_rows(pdl, rows, 1024, warps, pairs)


@dataclass(frozen=True)
class Layer:
    """Weights of a layer's projections: [qkv, hidden], [hidden, mixed], [experts, hidden], and its norms'."""

    qkv: Tensor
    back: Tensor
    gate: Tensor
    norms: tuple[Tensor, Tensor]


class Chain:
    """All layers' projections, on `device` in `dtype`."""

    def __init__(self, sizes: tuple[int, int, int, int], layers: int, device: torch.device, dtype: torch.dtype) -> None:
        """sizes: hidden, qkv, mixed, experts."""
        hidden, qkv, mixed, experts = sizes
        random = torch.Generator(device).manual_seed(0)

        def made(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=random, device=device, dtype=dtype) * scale

        self.layers = [
            Layer(
                made(qkv, hidden, scale=hidden**-0.5),
                made(hidden, mixed, scale=mixed**-0.5),
                made(experts, hidden, scale=hidden**-0.5),
                (1 + made(hidden, scale=0.1), 1 + made(hidden, scale=0.1)),
            )
            for _ in range(layers)
        ]
        self.x, self.mixed = made(16, hidden), made(16, mixed)
        self.qkv = torch.empty(16, qkv, device=device, dtype=torch.float32)
        self.scores = torch.empty(16, experts, device=device, dtype=torch.float32)
        self.r = torch.empty_like(self.x)

    def run(self, way: Way, n: int, layers: int | None = None) -> None:
        """The projections of a step over `n` tokens."""
        for layer in self.layers[:layers]:
            way.norm_linear(self.x[:n], layer.norms[0], layer.qkv, self.qkv[:n])
            way.linear_residual(self.mixed[:n], layer.back, self.x[:n], self.r[:n])
            way.norm_linear(self.r[:n], layer.norms[1], layer.gate, self.scores[:n])

    def results(self, way: Way, n: int) -> list[Tensor]:
        """What the first layer gives for `n` tokens."""
        for tensor in (self.qkv, self.scores, self.r):
            tensor.fill_(float("nan"))
        self.run(way, n, 1)
        return [tensor[:n].float().clone() for tensor in (self.qkv, self.r, self.scores)]

    def expected(self, n: int) -> list[Tensor]:
        """The same in float32, rounded where the kernels round."""
        layer, dtype = self.layers[0], self.x.dtype

        def normed(x: Tensor, gain: Tensor) -> Tensor:
            x = x.float()
            return (x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * gain.float()).to(dtype).float()

        qkv = normed(self.x[:n], layer.norms[0]) @ layer.qkv.float().T
        r = (self.x[:n].float() + self.mixed[:n].float() @ layer.back.float().T).to(dtype)
        return [qkv, r.float(), normed(r, layer.norms[1]) @ layer.gate.float().T]


def difference(chain: Chain, way: Way, n: int) -> float:
    """The largest difference from float32, over the largest number."""
    pairs = zip(chain.results(way, n), chain.expected(n), strict=True)
    return max(float((found - wanted).abs().max() / wanted.abs().max()) for found, wanted in pairs)


def alike(chain: Chain, way: Way, tokens: Sequence[int]) -> bool:
    """Whether the first token's numbers are the same bits whatever the number of tokens."""
    first, *others = [[tensor[0] for tensor in chain.results(way, n)] for n in tokens]
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def bring_to_l2(weights: Tensor, pdl: bool) -> None:
    """All of it."""
    out, width = weights.shape
    bring[(tiles(out, BROUGHT_ROWS),)](weights, WIDTH=width, OUT=out, ROWS=BROUGHT_ROWS, PDL=pdl, launch_pdl=pdl)


def rested_us(chain: Chain, way: Way | None, brought: int, pdl: bool) -> float:
    """Median microseconds a layer of one token with a rest before it; the rest alone if there is no `way`. Before that
    the first `brought` weights are brought to the L2 cache: of queries, keys and values; back; of the gate.
    """

    def run() -> None:
        for layer in chain.layers:
            for weights in (layer.qkv, layer.back, layer.gate)[:brought]:
                bring_to_l2(weights, pdl)
            torch.cuda._sleep(REST_CYCLES)  # type: ignore[no-untyped-call]
            if way is not None:
                way.norm_linear(chain.x[:1], layer.norms[0], layer.qkv, chain.qkv[:1])
                way.linear_residual(chain.mixed[:1], layer.back, chain.x[:1], chain.r[:1])
                way.norm_linear(chain.r[:1], layer.norms[1], layer.gate, chain.scores[:1])

    return graph_us(run) / len(chain.layers)


def layer_us(chain: Chain, way: Way, n: int) -> float:
    """Median microseconds a layer, in a graph of all of them."""
    return graph_us(lambda: chain.run(way, n)) / len(chain.layers)


def graph_us(run: Callable[[], None]) -> float:
    """Median microseconds of a graph."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(REPLAYS):
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        done.record()
        done.synchronize()
        found.append(1e3 * begun.elapsed_time(done))
    return statistics.median(found)


def measure(chain: Chain, tokens: Sequence[int], until: float, out: Path) -> dict[str, Any]:
    """All ways for which there is time until `until` (monotonic); also in `out` after each."""
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    device = torch.cuda.get_device_name()
    found: dict[str, Any] = {"device": device, "machine": machine_name(), "software": software(), "ways": []}
    rests = {brought: rested_us(chain, None, brought, pdl) for brought in range(4)}
    for way in ways(pdl):
        if time.monotonic() > until:
            break
        one: dict[str, Any] = {"way": way.name}
        try:
            one["difference"] = difference(chain, way, max(tokens))
            one["alike"] = alike(chain, way, tokens)
            one["layer_us"] = {str(n): layer_us(chain, way, n) for n in tokens}
            one["rested_us"] = {str(n): rested_us(chain, way, n, pdl) - rest for n, rest in rests.items()}
        except Exception as error:  # a way that a card cannot take must not cost the others
            one["failed"] = f"{type(error).__name__}: {error}"[:300]
        found["ways"].append(one)
        write_json(out, found)
        kinds = [one.get(kind, {}).values() for kind in ("layer_us", "rested_us")]
        times = " | ".join(" ".join(f"{us:6.2f}" for us in kind) for kind in kinds)
        print(
            f"{way.name:50} {times} {one.get('failed', '') or (one['alike'], round(one['difference'], 4))}", flush=True
        )
    return found


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure on this GPU, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="shape:qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,2,3,5,9")
    parser.add_argument("--seconds", type=float, default=110.0)
    given = parser.parse_args(args)
    shape = Checkpoint.open(given.model).shape
    mixed = shape.heads * shape.head_dim
    sizes = (shape.hidden, mixed + 2 * shape.kv_heads * shape.head_dim, mixed, shape.experts)
    chain = Chain(sizes, shape.n_moe_layers, torch.device("cuda"), torch.bfloat16)
    tokens = [int(n) for n in given.tokens.split(",")]
    return measure(chain, tokens, time.monotonic() + given.seconds, given.out)


if __name__ == "__main__":
    main()
