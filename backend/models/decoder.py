"""The part of a decoder that stays on the device: embedding, attention, norms, gates, shared experts, dense layers.

One sequence. Layers are counted among the MoE layers: what stands before one without experts of its own is run with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from foreload.backend.models.attention import Attention, GroupedAttention, LatentAttention
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.rope import rotary_tables
from foreload.backend.models.routing import choice, route
from foreload.backend.models.tensors import FLOAT32


@dataclass(frozen=True)
class Gated:
    """A SwiGLU block that every token passes: down(silu(gate x) * up x), perhaps scaled by sigmoid(switch x)."""

    gate_up: Tensor  # [2 width, hidden]
    down: Tensor  # [hidden, width]
    switch: Tensor | None = None  # [1, hidden]

    @classmethod
    def of(cls, w: dict[str, Tensor], name: str) -> Gated:
        """The block called `name` among a layer's tensors."""
        gate_up = torch.cat([w[f"{name}_gate"], w[f"{name}_up"]])
        return cls(gate_up, w[f"{name}_down"], w.get(f"{name}_switch"))

    def __call__(self, h: Tensor) -> Tensor:
        """h [n, hidden] -> [n, hidden]."""
        gate, up = F.linear(h, self.gate_up).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, self.down)
        return out if self.switch is None else out * F.linear(h, self.switch).sigmoid()

    def tensors(self) -> list[Tensor]:
        """All device tensors."""
        return [self.gate_up, self.down] + ([] if self.switch is None else [self.switch])


@dataclass(frozen=True)
class Block:
    """A layer's norms and attention, and what it has besides routed experts."""

    input_norm: Tensor  # [hidden]
    attention: Attention
    moe_norm: Tensor  # [hidden], the norm before the experts or the dense block
    dense: Gated | None  # of a layer without experts

    def tensors(self) -> list[Tensor]:
        """All device tensors."""
        return [
            self.input_norm,
            self.moe_norm,
            *self.attention.tensors(),
            *(self.dense.tensors() if self.dense else []),
        ]


@dataclass(frozen=True)
class MoeLayer(Block):
    """An MoE layer, its experts apart, and the dense layers between it and the one before."""

    gate: Tensor  # [experts, hidden]
    gate_bias: Tensor | None  # [experts]
    correction: Tensor | None  # [experts], float32
    shared: Gated | None
    before: tuple[Block, ...]

    def tensors(self) -> list[Tensor]:
        """All device tensors."""
        some = [self.gate, self.gate_bias, self.correction, *(self.shared.tensors() if self.shared else [])]
        before = [tensor for block in self.before for tensor in block.tensors()]
        return [*super().tensors(), *before, *(tensor for tensor in some if tensor is not None)]


class Decoder:
    """Dense weights on the device, keys and values, and the blocks a step is made of.

    Activations are [n, hidden] in the weights' dtype; n = 1 in decode, more in a verify step, a chunk in prefill.
    `at` counts MoE layers from 0.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, context_tokens: int) -> None:
        shape = checkpoint.shape
        self.shape = shape
        self.device = device
        self.context_tokens = context_tokens
        self._dtype = dtype
        self.rotary = rotary_tables(shape, context_tokens, device, dtype)
        loaded: dict[int | None, dict[str, Tensor]] = {}
        for layer, name, tensor in checkpoint.read_dense(device):
            loaded.setdefault(layer, {})[name] = tensor.to(device, self._kept_as(name))
        everywhere = loaded[None]
        self.embedding, self.final_norm = everywhere["embed"], everywhere["final_norm"]
        self.head_weight = everywhere.get("head", self.embedding)
        self.layers: list[MoeLayer] = []
        waiting: list[Block] = []
        for layer in range(shape.layers):
            block = self._block(layer, loaded.pop(layer), waiting)
            if isinstance(block, MoeLayer):
                self.layers.append(block)
                waiting = []
            else:
                waiting.append(block)
        self.after = waiting

    def _kept_as(self, name: str) -> torch.dtype:
        whole = name in FLOAT32 or (name == "gate" and self.shape.router_float32)
        return torch.float32 if whole else self._dtype

    def _block(self, layer: int, w: dict[str, Tensor], before: list[Block]) -> Block:
        shape = self.shape
        attention: Attention
        if shape.latent is not None:
            attention = LatentAttention(shape, shape.latent, w, self.context_tokens, self.rotary)
        else:
            attention = GroupedAttention(shape, layer, w, self.context_tokens, self.rotary)
        if layer not in shape.moe_layers:
            return Block(w["input_norm"], attention, w["moe_norm"], Gated.of(w, "dense"))
        return MoeLayer(
            w["input_norm"],
            attention,
            w["moe_norm"],
            None,
            w["gate"],
            w.get("gate_bias"),
            w.get("correction"),
            Gated.of(w, "shared") if shape.shared_width else None,
            tuple(before),
        )

    @property
    def n_layers(self) -> int:
        """MoE layers."""
        return len(self.layers)

    @property
    def dense_bytes(self) -> int:
        """Bytes of weights, and of keys and values, on the device."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, each once, with where they belong."""
        yield from (("embedding", self.embedding), ("final norm", self.final_norm))
        yield from (("rotary table", table) for table in self.rotary)
        if not self.shape.tied_embeddings:
            yield "output head", self.head_weight
        for at, layer in enumerate(self.layers):
            yield from ((f"a tensor of MoE layer {at}", tensor) for tensor in layer.tensors())
        for block in self.after:
            yield from (("a tensor after the last MoE layer", tensor) for tensor in block.tensors())

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [n] -> [n, hidden]."""
        return F.embedding(token_ids, self.embedding)

    def attend(self, at: int, x: Tensor, position: int) -> Tensor:
        """Residual stream after the attention of MoE layer `at`, [n, hidden], dense layers before it included.

        x is what came out of the layer before; it holds positions `position`.. , whose keys and values are kept.
        """
        layer = self.layers[at]
        for block in layer.before:
            x = self._dense(block, x, position)
        return self._attend(layer, x, position)

    def _attend(self, block: Block, x: Tensor, position: int) -> Tensor:
        return x + block.attention.attend(self._norm(x, block.input_norm), position)

    def _dense(self, block: Block, x: Tensor, position: int) -> Tensor:
        r = self._attend(block, x, position)
        assert block.dense is not None
        return r + block.dense(self._norm(r, block.moe_norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.hidden,), weight, self.shape.norm_eps)

    def moe_input(self, at: int, r: Tensor) -> Tensor:
        """The norm before the experts of MoE layer `at`, applied to a residual stream r [n, hidden]."""
        return self._norm(r, self.layers[at].moe_norm)

    def scores(self, at: int, h: Tensor) -> Tensor:
        """What the gate of MoE layer `at` says of any normed input h [n, hidden]: its logits [n, experts]."""
        layer = self.layers[at]
        return F.linear(h.to(layer.gate.dtype), layer.gate, layer.gate_bias)

    def choose(self, at: int, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [n, k], best first, and fp32 weights [n, k] by a layer's scores [n, experts], true or predicted."""
        return route(scores, self.layers[at].correction, self.shape)

    def choice(self, at: int, scores: Tensor) -> Tensor:
        """What MoE layer `at` ranks its experts by, [n, experts], from scores [n, experts], true or predicted."""
        return choice(scores, self.layers[at].correction, self.shape)

    def route(self, at: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [n, k], best first, and fp32 weights [n, k] of the experts of any normed input h [n, hidden]."""
        return self.choose(at, self.scores(at, h))

    def shared(self, at: int, h: Tensor) -> Tensor | None:
        """What the shared experts of MoE layer `at` add for the normed input h [n, hidden]; None if there are none."""
        block = self.layers[at].shared
        return None if block is None else block(h)

    def finish(self, x: Tensor, position: int) -> Tensor:
        """The residual stream x [n, hidden] after the last MoE layer, through the dense layers that follow it."""
        for block in self.after:
            x = self._dense(block, x, position)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Output logits [n, vocab] of the last layer's residual stream x [n, hidden]."""
        return F.linear(self._norm(x, self.final_norm), self.head_weight)
