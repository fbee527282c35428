"""`Ops`: the blocks of a decode step as functions on static tensors, once in Triton and once in torch.

n rows (positions) are fed at once, k experts serve each; an item is row * k + rank. Every output is written into a
tensor that is given, so that the calls can be captured in a CUDA graph. Shapes are in the kernels' docstrings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from foreload.backend.cuda.kernels.layout import ENTRY, BlockLayout
from foreload.errors import UsageError

TOKENS = 64
"""Items of one expert that a plan entry of a prompt chunk holds at most."""
TAG = 0x7FFF
"""The part of a step's number that goes with every id told to the host (`route.publish`)."""
PLANNED = 4
"""Words per item of a plan in host memory (`Ops.take_plan`)."""


@dataclass(frozen=True)
class Turn:
    """A layer of a step, told by one number: `current` int32 [1], the step's number, times `layers`, and `at`.

    Words that the host writes for the device carry it in their upper halves. They are there once that is the turn that
    is waited for, or a later one. No word tells of others, and one look is enough over a link that copies keep busy.
    """

    current: Tensor
    layers: int
    at: int


@dataclass(frozen=True)
class Ranking:
    """How `top_k` makes weights of logits: by softmax over all experts or sigmoids, in the end times `scale`.

    `normalise`: the weights of the k that are chosen add up to 1 before that.
    """

    normalise: bool
    sigmoid: bool = False
    scale: float = 1.0


@dataclass
class ExpertBuffers:
    """What expert kernels read and write, for at most `items` items.

    plan int64 [groups, ENTRY], listed int64 [items], mid fp32 [items, width], out fp32 [items, hidden].
    """

    plan: Tensor
    listed: Tensor
    mid: Tensor
    out: Tensor

    @classmethod
    def on(cls, device: torch.device, layout: BlockLayout, items: int) -> ExpertBuffers:
        """Buffers on a device."""
        plan = torch.zeros(items, ENTRY, device=device, dtype=torch.int64)
        listed = torch.zeros(items, device=device, dtype=torch.int64)
        mid = torch.empty(items, layout.width, device=device, dtype=torch.float32)
        out = torch.empty(items, layout.hidden, device=device, dtype=torch.float32)
        return cls(plan, listed, mid, out)

    def with_plan(self, plan: Tensor) -> ExpertBuffers:
        """The same outputs under another plan."""
        return ExpertBuffers(plan, self.listed, self.mid, self.out)


@dataclass(frozen=True)
class HostInputs:
    """What the host's experts work on, here and in host memory: rows [n, hidden] and weights float32 [n, k]."""

    rows: tuple[Tensor, Tensor]
    weights: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class HostOutputs:
    """What the host computes of a layer-step: weighted sums, of tokens with items whose on_host int64 [items] is set.

    out int64 [n, hidden] in host memory: the turn over the bits of a float32. Nobody need look before soon int32 [1],
    there too, is the turn.
    """

    out: Tensor
    on_host: Tensor
    soon: Tensor
    turn: Turn


@dataclass
class AttentionScratch:
    """Attention by chunk, fp32: largest and weight [n, heads, chunks], partial [n, heads, chunks, dim]."""

    chunk: int
    largest: Tensor
    weight: Tensor
    partial: Tensor

    @classmethod
    def on(cls, device: torch.device, rows: int, heads: int, dim: int, context: int) -> AttentionScratch:
        """Scratch for `rows` rows; chunks depend on the context's size alone, so results do not depend on n."""
        chunk = chunk_tokens(context)
        chunks = -(-context // chunk)
        largest = torch.empty(rows, heads, chunks, device=device, dtype=torch.float32)
        partial = torch.empty(rows, heads, chunks, dim, device=device, dtype=torch.float32)
        return cls(chunk, largest, torch.empty_like(largest), partial)


def chunk_tokens(context: int) -> int:
    """Keys per chunk of attention: at most 256 chunks, none under 64 keys."""
    return max(64, power_of_two(-(-context // 256)))


def tiles(count: int, size: int) -> int:
    """Tiles of a size that hold so many."""
    return -(-count // size)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


class Ops(ABC):
    """The blocks; see the module for what n, k and items are."""

    @abstractmethod
    def embed(self, given: Tensor, current: Tensor, table: Tensor, x: Tensor) -> None:
        """x [n, hidden] from the tokens in `given`, whose first three numbers go to `current`."""

    @abstractmethod
    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        y: Tensor,
        normed: Tensor | None,
        eps: float,
    ) -> None:
        """y = weights @ rms_norm(x) + bias; `normed` receives the norm's output. x may be columns of a wider tensor."""

    @abstractmethod
    def rope_store(
        self,
        qkv: Tensor,
        qk_norm: Tensor | None,
        tables: tuple[Tensor, Tensor],
        current: Tensor,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        eps: float,
        ring: bool = False,
    ) -> None:
        """Per-head norm and rotation of q and k; k and v go into the layer's cache at the current position.

        `ring`: the cache holds the newest positions, each at its number modulo the cache's size.
        """

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        current: Tensor,
        scratch: AttentionScratch,
        out: Tensor,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        """Causal attention of q [n, heads, dim] over the cache up to each row's position; out [n, heads * dim].

        `window` 0: all positions; else so many, and the cache is a ring. `sinks` [heads]: logits without a value.
        """

    @abstractmethod
    def fold_store(
        self,
        queries: Tensor,
        kept: Tensor,
        norm: Tensor,
        tables: tuple[Tensor, Tensor],
        current: Tensor,
        key_up: Tensor,
        q: Tensor,
        rows: Tensor,
        eps: float,
    ) -> None:
        """Queries and rows of latent attention, at the current position.

        queries [n, heads * (nope + rope)]: those parts that are not rotated go through key_up [heads, nope, rank], the
        others are rotated, into q [n, heads, rank + rope]. kept [n, rank + rope]: the latent is normed (`norm` [rank]),
        the key rotated; they go into the layer's rows [context, rank + rope].
        """

    @abstractmethod
    def latent_attend(
        self,
        q: Tensor,
        rows: Tensor,
        current: Tensor,
        scratch: AttentionScratch,
        mixed: Tensor,
        value_up: Tensor,
        out: Tensor,
        scale: float,
    ) -> None:
        """Causal attention of q [n, heads, rank + rope] over latent rows up to each row's position.

        mixed float32 [n, heads * rank] receives the latents, out [n, heads * value] what value_up [heads, value, rank]
        makes of them.
        """

    @abstractmethod
    def linear_residual(self, x: Tensor, weights: Tensor, bias: Tensor | None, residual: Tensor, y: Tensor) -> None:
        """y = residual + weights @ x + bias."""

    @abstractmethod
    def top_k(
        self,
        logits: Tensor,
        ids: Tensor,
        weights: Tensor,
        ranking: Ranking,
        current: Tensor,
        words: Tensor | None,
        correction: Tensor | None = None,
    ) -> None:
        """The k largest of all experts in rank order (ties: the lower id); the ids also go to `words`.

        `correction` float32 [experts] is added to sigmoids to rank them, but not to the weights.
        """

    @abstractmethod
    def replay_routes(
        self,
        current: Tensor,
        tables: tuple[Tensor, Tensor],
        layer: int,
        ids: Tensor,
        weights: Tensor,
        words: Tensor | None,
    ) -> None:
        """Recorded ids and weights ([rows, layers, k]) in place of the router's; the ids also go to `words`."""

    @abstractmethod
    def replay_predictions(self, current: Tensor, table: Tensor, first: int, predicted: Tensor) -> None:
        """Recorded predictions (int16 [depths, rows, layers, stored width]) in place of those of layers `first`.. ."""

    @abstractmethod
    def publish(self, current: Tensor, ids: Tensor, words: Tensor, inputs: HostInputs | None = None) -> None:
        """Ids to host memory, each tagged with the step's number; before them what the host's experts work on."""

    @abstractmethod
    def take_plan(
        self,
        words: Tensor,
        plan: Tensor,
        listed: Tensor,
        on_host: Tensor,
        turn: Turn | None,
    ) -> None:
        """A plan from host memory: int64 [groups, ENTRY], the items it lists and whether an item is the host's [items].

        words int64 [PLANNED, items]: of entry i the lower and the upper half of the address, and its first item with,
        16 bits up, how many it has; of place i the item that is listed there with, at bit 31, whether item i is the
        host's. Each is a turn over 32 bits; with `turn` that one is waited for.
        """

    @abstractmethod
    def plan_resident(self, ids: Tensor, addresses: Tensor, layer: int, plan: Tensor, listed: Tensor) -> None:
        """The plan of a layer whose experts are all resident, from the table of addresses int64 [layers, experts]."""

    @abstractmethod
    def experts(self, layout: BlockLayout, k: int, x: Tensor, buffers: ExpertBuffers) -> None:
        """Unweighted fp32 outputs of the planned items."""

    @abstractmethod
    def bring(self, given: Tensor, there: Tensor) -> None:
        """Plans int64 [tiles, ENTRY] from host memory that the device reads to the device."""

    @abstractmethod
    def chunk_experts(
        self, layout: BlockLayout, k: int, x: Tensor, plan: Tensor, listed: Tensor, mid: Tensor, out: Tensor
    ) -> None:
        """Unweighted outputs out [items, hidden] of a prompt chunk's planned items, by way of mid [items, width].

        plan int64 [tiles, ENTRY], at most TOKENS items each, and listed int64 [items] are on the device; mid and out
        are of x's type. UsageError for a layout that has no `tile_columns`.
        """

    @abstractmethod
    def shared_gate_up(self, x: Tensor, gate_up: Tensor, switch: Tensor | None, mid: Tensor) -> None:
        """mid float32 [n, width] = silu(gate x) * up x, for gate_up [2 width, hidden], gate's rows first.

        `switch` [1, hidden]: times sigmoid(switch x).
        """

    @abstractmethod
    def weigh(self, r: Tensor, weights: Tensor, out: Tensor, x: Tensor) -> None:
        """x [n, hidden] = r + outputs out [n k, hidden], weighted [n, k], in rank order, in fp32."""

    @abstractmethod
    def combine(self, r: Tensor, weights: Tensor, out: Tensor, x: Tensor, host: HostOutputs | None = None) -> None:
        """x = r + weighted outputs in rank order, in fp32; with `host` its sums come last, once they are there."""

    @abstractmethod
    def stamp(self, begun: Tensor) -> None:
        """begun int64 [1] = the time now, in nanoseconds of a clock of the device."""

    @abstractmethod
    def hold(self, begun: Tensor, least: Tensor) -> None:
        """Keep the stream busy until `least` int64 [1] nanoseconds have passed since `begun`."""


def tile_columns(layout: BlockLayout) -> int:
    """Columns that kernels of prompt chunks take at once; 0 if they cannot, for tiles of scale that end amid them."""
    most = 32 if layout.format == "float32" else 64
    columns = min(most, layout.tile & -layout.tile) if layout.tile else most
    return columns if columns >= 16 else 0


def check_layout(layout: BlockLayout) -> None:
    """UsageError for a block the kernels cannot read."""
    if layout.format == "mxfp4" and (layout.hidden % 32 or layout.width % 32):
        raise UsageError(f"mxfp4 experts need sizes in multiples of 32, not {layout.hidden} and {layout.width}")
    if layout.format == "bf12" and (layout.hidden % 4 or layout.width % 4):
        raise UsageError(f"bf12 experts need sizes in multiples of 4, not {layout.hidden} and {layout.width}")
    places = (layout.block_bytes, layout.gate.at, layout.up.at, layout.down.at)
    if layout.format in ("mxfp4", "bf12") and any(place % 4 for place in places):
        raise UsageError(f"{layout.format} experts need blocks and matrices at multiples of 4 bytes, not {places}")
