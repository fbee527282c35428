"""Several sequences decoded together with a static key-value cache; on a GPU one step is one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .live import Live, State
from .predictors import Predictor

PredictionKey = tuple[str, int]  # (predictor, depth)


@dataclass(frozen=True)
class Kept:
    """Routing kept of a run: S steps of N = sequences x positions tokens; host tensors."""

    tokens: Tensor  # [S, B, n] fed in
    positions: Tensor  # [S, B, n]
    ids: Tensor  # [S, L, B, n, k] int16
    weights: Tensor | None  # [S, L, B, n, k] fp16
    predictions: dict[PredictionKey, Tensor]  # [S, L, B, n, width] int16, -1 where there is none


class Decoder:
    """Feeds n tokens of each of B sequences per step and keeps their routing on the device.

    `tokens` and `positions` [B, n] are read by every step; `after(logits [B, n, V])` may update them in place.
    """

    def __init__(
        self, live: Live, rows: int, width: int, length: int, steps: int, *,
        predictor: Predictor | None = None, predictions: tuple[PredictionKey, ...] = (), weights: bool = False,
    ) -> None:  # fmt: skip
        c, device = live.c, live.device
        self.live, self.predictor, self.keys = live, predictor, predictions
        self.cache = torch.zeros(2, c.layers, rows, c.kv_heads, length, c.head_dim, device=device, dtype=live.kind)
        self.tokens = torch.zeros(rows, width, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.places = torch.arange(length, device=device)
        self.row = torch.arange(rows, device=device)[:, None]
        self.fed = torch.zeros(2, steps, rows, width, dtype=torch.long, device=device)
        size = (steps, c.layers, rows * width)
        self.ids = torch.zeros(*size, c.top_k, dtype=torch.int16, device=device)
        self.weights = torch.zeros(*size, c.top_k, dtype=torch.float16, device=device) if weights else None
        self.wide = min(2 * c.top_k, c.experts)
        self.predicted = {
            key: torch.full((*size, self.wide), -1, dtype=torch.int16, device=device) for key in predictions
        }
        self.logits = torch.zeros(rows, width, c.vocabulary, device=device)
        self.after: Callable[[Tensor], None] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def prefill(self, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fill the cache from prompts [B, P]; returns (logits of the last position, ids and weights [L, B, P, k])."""
        live, (rows, length) = self.live, prompts.shape
        cos, sin = (t[:length] for t in live.tables)
        ids: list[Tensor] = []
        weights: list[Tensor] = []

        def attend(n: int, x: Tensor) -> Tensor:
            q, k, v = live.project(n, x, cos, sin)
            self.cache[0, n, :, :, :length], self.cache[1, n, :, :, :length] = k, v
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return live.merge(n, x, out)

        def visit(state: State) -> None:
            ids.append(state.ids.to(torch.int16).view(rows, length, -1))
            weights.append(state.weights.half().view(rows, length, -1))

        hidden = live.forward(prompts, attend, visit)
        return live.logits(hidden[:, -1]), torch.stack(ids), torch.stack(weights)

    def _attend(self, n: int, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        c = self.live.c
        q, k, v = self.live.project(n, x, cos, sin)
        keys, values = self.cache[0, n], self.cache[1, n]
        keys[self.row, :, self.positions] = k.transpose(1, 2)
        values[self.row, :, self.positions] = v.transpose(1, 2)
        rows, width = x.shape[:2]
        grouped = q.reshape(rows, c.kv_heads, -1, c.head_dim)  # queries of one key head: [heads / kv_heads, n]
        scores = (grouped @ keys.mT).float() * c.head_dim**-0.5
        scores = scores.view(rows, c.kv_heads, -1, width, len(self.places)).masked_fill(mask, float("-inf"))
        out = scores.softmax(-1).to(self.live.kind).flatten(2, 3) @ values
        return self.live.merge(n, x, out.view(rows, c.heads, width, c.head_dim))

    def _visit(self, state: State) -> None:
        self.ids[:, state.layer].index_copy_(0, self.at, state.ids.to(torch.int16)[None])
        if self.weights is not None:
            self.weights[:, state.layer].index_copy_(0, self.at, state.weights.half()[None])
        for kind in dict.fromkeys(kind for kind, _ in self.keys):
            assert self.predictor is not None
            depth = max(h for name, h in self.keys if name == kind)
            for h, scores, _ in self.predictor.ahead(kind, state, depth, rolled=False):
                best = scores.topk(self.wide, -1).indices.to(torch.int16)
                self.predicted[kind, h][:, state.layer + h].index_copy_(0, self.at, best[None])

    def _body(self) -> None:
        cos, sin = (t[self.positions][:, None] for t in self.live.tables)
        mask = (self.places > self.positions[..., None])[:, None, None]
        self.fed.index_copy_(1, self.at, torch.stack([self.tokens, self.positions])[:, None])
        hidden = self.live.forward(self.tokens, lambda n, x: self._attend(n, x, cos, sin, mask), self._visit)
        self.logits.copy_(self.live.logits(hidden))
        if self.after is not None:
            self.after(self.logits)
        self.at += 1

    def capture(self) -> None:
        """Record one step as a CUDA graph (nothing on a CPU); tokens, positions and buffers start as they were.

        Where recording fails, steps run operator by operator: several times slower, with the same results.
        """
        if self.live.device.type != "cuda":
            return
        saved = self.tokens.clone(), self.positions.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._body()
                self._restore(*saved)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._body()
            self._graph = graph
        except RuntimeError as error:
            print(f"decode without a CUDA graph: {error}", flush=True)
        self._restore(*saved)

    def _restore(self, tokens: Tensor, positions: Tensor) -> None:
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.at.zero_()

    def step(self) -> None:
        """One step; on a GPU it is only queued."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._body()

    def kept(self, steps: int) -> Kept:
        """What the first `steps` steps left, on the host."""
        rows, width = self.tokens.shape

        def host(t: Tensor) -> Tensor:
            return t[:steps].cpu().view(steps, self.live.c.layers, rows, width, -1)

        return Kept(
            self.fed[0, :steps].cpu(), self.fed[1, :steps].cpu(), host(self.ids),
            None if self.weights is None else host(self.weights), {k: host(t) for k, t in self.predicted.items()},
        )  # fmt: skip


class Sampler:
    """Draws the next token at a temperature by the Gumbel rule from noise fixed per sequence; some tokens are given."""

    def __init__(
        self, decoder: Decoder, seeds: list[int], steps: int, temperature: float, given: Tensor, banned: int
    ) -> None:
        """given: [steps + 1, B], -1 where the model decides; the first row is the first token fed in."""
        device, vocabulary = decoder.live.device, decoder.live.c.vocabulary
        noise = torch.empty(steps + 1, len(seeds), vocabulary)
        for row, seed in enumerate(seeds):
            noise[:, row] = torch.rand(steps + 1, vocabulary, generator=torch.Generator().manual_seed(seed))
        self.noise = noise.to(device).clamp_(1e-20, 1 - 1e-7).log_().neg_().log_().neg_()
        self.given, self.decoder, self.temperature, self.banned = given.to(device), decoder, temperature, banned

    def draw(self, logits: Tensor, at: Tensor) -> Tensor:
        """Tokens [B] of place `at` [1] from logits [B, V]; the token `banned` (end of document) is never drawn."""
        scores = logits / self.temperature + self.noise.index_select(0, at)[0]
        scores[:, self.banned] = float("-inf")
        given = self.given.index_select(0, at)[0]
        return torch.where(given >= 0, given, scores.argmax(-1))

    def __call__(self, logits: Tensor) -> None:
        """The decoder's `after`: the next token of every sequence."""
        self.decoder.tokens.copy_(self.draw(logits[:, -1], self.decoder.at + 1)[:, None])
        self.decoder.positions += 1
