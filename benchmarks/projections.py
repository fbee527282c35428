"""How many tokens a program of a projection should compute at once.

    python -m benchmarks.projections --out FILE [--model shape:qwen3-30b-a3b] [--tokens 1,2,3,5,9] [--seconds 110]

A chain of all layers' norm and projection to queries, keys and values, projection back, and norm and gate, each with
weights of its own, in one graph. By tokens at once: microseconds a layer by the tokens of a step, the largest relative
difference from float32, and whether a token's numbers are the same whatever the number of tokens. Writes FILE (JSON).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreload.backend.cuda.kernels.ops import Ops
from foreload.backend.cuda.kernels.triton_ops import TritonOps
from foreload.backend.models.checkpoint import Checkpoint
from foreload.files import write_json
from foreload.machine import machine_name, software

EPS = 1e-6
REPLAYS = 40
TOGETHER = (1, 2, 3, 4, 5)


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

    def run(self, ops: Ops, n: int, layers: int | None = None) -> None:
        """The projections of a step over `n` tokens."""
        for layer in self.layers[:layers]:
            ops.norm_linear(self.x[:n], layer.norms[0], layer.qkv, None, self.qkv[:n], None, EPS)
            ops.linear_residual(self.mixed[:n], layer.back, None, self.x[:n], self.r[:n])
            ops.norm_linear(self.r[:n], layer.norms[1], layer.gate, None, self.scores[:n], None, EPS)

    def results(self, ops: Ops, n: int) -> list[Tensor]:
        """What the first layer gives for `n` tokens."""
        for tensor in (self.qkv, self.scores, self.r):
            tensor.fill_(float("nan"))
        self.run(ops, n, 1)
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


def difference(chain: Chain, ops: Ops, n: int) -> float:
    """The largest difference from float32, over the largest number."""
    pairs = zip(chain.results(ops, n), chain.expected(n), strict=True)
    return max(float((found - wanted).abs().max() / wanted.abs().max()) for found, wanted in pairs)


def alike(chain: Chain, ops: Ops, tokens: Sequence[int]) -> bool:
    """Whether the first token's numbers are the same bits whatever the number of tokens."""
    first, *others = [[tensor[0] for tensor in chain.results(ops, n)] for n in tokens]
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def layer_us(chain: Chain, ops: Ops, n: int) -> float:
    """Median microseconds a layer, in a graph of all of them."""
    return graph_us(lambda: chain.run(ops, n)) / len(chain.layers)


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
    """By tokens at once, as far as there is time until `until` (monotonic); also in `out` after each."""
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    device = torch.cuda.get_device_name()
    found: dict[str, Any] = {"device": device, "machine": machine_name(), "software": software(), "rows": []}
    for together in TOGETHER:
        if time.monotonic() > until:
            break
        ops = TritonOps(pdl=pdl, together=together)
        one: dict[str, Any] = {"together": together}
        try:
            one["difference"] = difference(chain, ops, max(tokens))
            one["alike"] = alike(chain, ops, tokens)
            one["layer_us"] = {str(n): layer_us(chain, ops, n) for n in tokens}
        except Exception as error:  # what a card cannot take must not cost the others
            one["failed"] = f"{type(error).__name__}: {error}"[:300]
        found["rows"].append(one)
        write_json(out, found)
        times = " ".join(f"{us:6.2f}" for us in one.get("layer_us", {}).values())
        print(
            f"{together} at once {times} {one.get('failed', '') or (one['alike'], round(one['difference'], 4))}",
            flush=True,
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
