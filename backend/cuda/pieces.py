"""The pieces of a decode step on static memory, each a function that can be captured in a graph (design: section 7).

`attend` runs from the stream that enters a layer to its routing, `experts` a plan, `combine` their weighted sum; `head`
gives the logits. A step of n rows has pieces of its own, since kernels are compiled for n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from foreload.backend.cuda.buffers import DeviceMemory, HostMemory
from foreload.backend.cuda.kernels.layout import BlockLayout
from foreload.backend.cuda.kernels.ops import PLANNED, ExpertBuffers, HostInputs, HostOutputs, Ops, Ranking, Turn
from foreload.backend.models.attention import LATENT_EPS, GroupedAttention, LatentAttention
from foreload.backend.models.decoder import Block, Decoder
from foreload.backend.models.routing import route
from foreload.backend.predict.base import Predictor
from foreload.backend.replay import Replay
from foreload.shape import ModelShape


@dataclass(frozen=True)
class Behaviour:
    """What pieces do besides the model: change it and they are captured anew.

    `depth`, `width`: predictions for so many layers ahead and so many experts; `speculated` layers execute what was
    predicted for them; `cpu`: the host computes experts; `replay`: routing comes from a recording; `watched`: someone
    reads what is on the device in every layer, so that nothing may wait for the host there.
    """

    predictor: Predictor | None = field(default=None, compare=False)
    key: tuple[str, int] = ("", 0)  # what tells predictors apart: name, and the calibration's identity
    depth: int = 0
    width: int = 0
    speculated: frozenset[int] = frozenset()
    cpu: bool = False
    replay: Replay | None = None
    watched: bool = False

    def guesses(self, rows: int) -> int:
        """Words of predictions that a layer tells of."""
        return rows * self.depth * self.width


@dataclass
class Guess:
    """Memory of predictions by gates."""

    scores: Tensor  # float32 [rows, experts]
    chances: Tensor  # float32 [rows, width]
    best: Tensor  # int64 [depth, rows, width]

    @classmethod
    def on(cls, device: torch.device, experts: int, rows: int, behaviour: Behaviour) -> Guess:
        """Zeros for steps of so many rows."""
        depth, width = behaviour.depth, behaviour.width
        return cls(
            torch.zeros(rows, experts, device=device),
            torch.zeros(rows, width, device=device),
            torch.zeros(depth, rows, width, device=device, dtype=torch.int64),
        )


def ranking_of(shape: ModelShape) -> Ranking:
    """How gates without groups make weights of their logits (`routing.route`)."""
    normalise = shape.normalise_weights or shape.scoring == "topk_softmax"
    return Ranking(normalise, shape.scoring == "sigmoid_topk", shape.routed_scale)


class Pieces:
    """Pieces for steps of `rows` rows. All read and write the tensors of `device` and `host`, which stay."""

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        layouts: Sequence[BlockLayout],
        device: DeviceMemory,
        host: HostMemory,
        rows: int,
        behaviour: Behaviour,
    ) -> None:
        self.shape, self.rows, self.behaviour = decoder.shape, rows, behaviour
        self.m, self.host = device.of(rows, decoder.shape.top_k), host
        self._decoder, self._ops, self.layouts = decoder, ops, tuple(layouts)
        self.items = rows * decoder.shape.top_k
        self._ranking = ranking_of(decoder.shape)
        self._guess = Guess.on(decoder.device, decoder.shape.experts, rows, behaviour)

    # A layer up to its routing

    def begin(self) -> None:
        """The step's numbers and tokens come from the host."""
        self._ops.embed(self.host.given, self.m.current, self._decoder.embedding, self.m.x)

    def attend(self, at: int, whole: bool = False) -> None:
        """From x to r, the experts' input h and their ids and weights; the host is told of ids and predictions.

        In a `whole` step nothing is prefetched: predictions are made only for a layer that executes them.
        """
        layer = self._decoder.layers[at]
        for block in layer.before:
            self._dense(block)
        self._attention(layer)
        if at in self.behaviour.speculated:
            self._speculated(at)
        else:
            self._route(at)
        wanted = at + 1 in self.behaviour.speculated if whole else self.behaviour.depth > 0
        if wanted and at + 1 < self.shape.n_moe_layers:
            self._predict(at)

    def _attention(self, block: Block) -> None:
        if isinstance(block.attention, LatentAttention):
            self._latent(block, block.attention)
        elif isinstance(block.attention, GroupedAttention):
            self._grouped(block, block.attention)

    def _grouped(self, block: Block, attention: GroupedAttention) -> None:
        m, ops, shape = self.m, self._ops, self.shape
        if shape.qk_norm == "full" or shape.clip_qkv:
            both, v = attention.project(self._norm(m.x, block.input_norm))
            m.qkv.copy_(torch.cat([both, v], 1).view(self.rows, -1))
        else:
            ops.norm_linear(m.x, block.input_norm, attention.qkv, attention.qkv_bias, m.qkv, None, shape.norm_eps)
        head_norm = attention.qk_norm if shape.qk_norm == "head" else None
        cache, ring = (attention.keys, attention.values), attention.window > 0
        ops.rope_store(m.qkv, head_norm, attention.rotary, m.current, m.q, cache, shape.norm_eps, ring)
        ops.attend(m.q, cache, m.current, m.scratch, m.mixed, shape.score_scale, attention.window, attention.sinks)
        ops.linear_residual(m.mixed, attention.o, attention.o_bias, m.x, m.r)

    def _latent(self, block: Block, attention: LatentAttention) -> None:
        m, ops, latent, rotary = self.m, self._ops, attention.latent, attention.rotary
        ops.norm_linear(m.x, block.input_norm, attention.down, None, m.qkv, None, self.shape.norm_eps)
        queries, kept = m.qkv.split([m.qkv.shape[1] - latent.row, latent.row], 1)
        if attention.q_a_norm is not None and attention.q_b is not None:
            ops.norm_linear(queries, attention.q_a_norm, attention.q_b, None, m.queries, None, LATENT_EPS)
            queries = m.queries
        rows, now = attention.rows, m.current
        ops.fold_store(queries, kept, attention.kv_a_norm, rotary, now, attention.key_up, m.q, rows, LATENT_EPS)
        ops.latent_attend(m.q, rows, now, m.scratch, m.latents, attention.value_up, m.mixed, self.shape.score_scale)
        ops.linear_residual(m.mixed, attention.o, None, m.x, m.r)

    def _dense(self, block: Block) -> None:
        """A layer without experts, from x to x."""
        self._attention(block)
        assert block.dense is not None
        self.m.x.copy_(self.m.r + block.dense(self._norm(self.m.r, block.moe_norm)))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.hidden,), weight, self.shape.norm_eps)

    def _route(self, at: int) -> None:
        m, ops, shape, layer = self.m, self._ops, self.shape, self._decoder.layers[at]
        ops.norm_linear(m.r, layer.moe_norm, layer.gate, layer.gate_bias, m.scores, m.h, shape.norm_eps)
        # What the host must be told last waits for what comes after the gate.
        late, replay = self.behaviour.cpu, self.behaviour.replay
        words = self.host.words[at, : self.items]
        if shape.groups > 1:
            ids, weights = route(m.scores, layer.correction, shape)
            m.ids.copy_(ids)
            m.weights.copy_(weights)
            late |= replay is None
        else:
            told = None if late or replay else words
            ops.top_k(m.scores, m.ids, m.weights, self._ranking, m.current, told, layer.correction)
        self._replayed(at, None if late else words)
        if late:
            self._tell(at)

    def _speculated(self, at: int) -> None:
        """What was predicted for this layer a layer ago is executed; its gate does not run."""
        m = self.m
        m.h.copy_(self._norm(m.r, self._decoder.layers[at].moe_norm))
        m.ids.copy_(m.guess_ids)
        m.weights.copy_(m.guess_weights)
        self._replayed(at, None)
        self._tell(at)

    def _replayed(self, at: int, words: Tensor | None) -> None:
        m, replay = self.m, self.behaviour.replay
        if replay is not None:
            self._ops.replay_routes(m.current, (replay.ids, replay.weights), at, m.ids, m.weights, words)

    def _tell(self, at: int) -> None:
        m, host, inputs = self.m, self.host, None
        if self.behaviour.cpu:
            inputs = HostInputs((m.h, host.rows[: self.rows]), (m.weights, host.weights[: self.rows]))
        self._ops.publish(m.current, m.ids, host.words[at, : self.items], inputs)

    def _predict(self, at: int) -> None:
        m, behaviour = self.m, self.behaviour
        predictor = behaviour.predictor
        assert predictor is not None
        if at + 1 not in behaviour.speculated and self.shape.groups <= 1 and predictor.plain:
            self._predict_by_gates(at, predictor)
            return
        found = predictor.ahead(at, m.r, m.ids, m.weights, behaviour.depth)
        best = predictor.best(at, found, behaviour.width)
        if behaviour.replay is not None:
            table = behaviour.replay.guesses(predictor, behaviour.depth, behaviour.width)
            self._ops.replay_predictions(m.current, table, at + 1, best)
        self._ops.publish(m.current, best, self.host.guesses[at, : best.numel()])
        if at + 1 in behaviour.speculated:
            ids, weights = predictor.gates.choose(at + 1, found[0][0])
            m.guess_ids.copy_(ids)
            m.guess_weights.copy_(weights)

    def _predict_by_gates(self, at: int, predictor: Predictor) -> None:
        """A `plain` predictor, each layer ahead in two kernels, the second of which tells the host."""
        m, behaviour, ops, guess = self.m, self.behaviour, self._ops, self._guess
        stream = predictor.start(at, m.r, m.ids, m.weights)
        found = guess.best[: min(behaviour.depth, self.shape.n_moe_layers - 1 - at)]
        words = self.host.guesses[at, : found.numel()].view(len(found), -1)
        for ahead, best in enumerate(found):
            layer = self._decoder.layers[at + 1 + ahead]
            ops.norm_linear(
                stream, layer.moe_norm, layer.gate, layer.gate_bias, guess.scores, None, self.shape.norm_eps
            )
            told = None if behaviour.replay is not None else words[ahead]
            ops.top_k(guess.scores, best, guess.chances, self._ranking, m.current, told, layer.correction)
        if behaviour.replay is not None:
            table = behaviour.replay.guesses(predictor, behaviour.depth, behaviour.width)
            ops.replay_predictions(m.current, table, at + 1, found)
            ops.publish(m.current, found, words.reshape(-1))

    # Experts

    def planned(self, layout: BlockLayout, at: int | None = None) -> None:
        """The experts of the host's plan, in blocks of a layout; with `at` once the plan of that layer is there."""
        m, words = self.m, self.host.plan[: PLANNED * self.items].view(PLANNED, self.items)
        self._ops.take_plan(words, m.plan, m.listed, m.on_host, None if at is None else self._turn(at))
        self._experts(layout, ExpertBuffers(m.plan, m.listed, m.mid, m.out))

    def wave(self, number: int, layout: BlockLayout) -> None:
        """One late expert, whose items the plan lists. Works for steps of any number of rows: its entry says which."""
        m = self.m
        self._experts(layout, ExpertBuffers(m.waves[number : number + 1], m.listed, m.mid, m.out))

    def bring_waves(self) -> None:
        """The entries of late experts come to the device, so that none of them waits for its own behind its copy."""
        self._ops.bring(self.host.waves, self.m.waves)

    def resident(self, at: int, addresses: Tensor) -> None:
        """All experts of a layer whose experts are all resident, by the table of addresses int64 [layers, experts]."""
        m = self.m
        self._ops.plan_resident(m.ids, addresses, at, m.plan, m.listed)
        self._experts(self.layouts[at], ExpertBuffers(m.plan, m.listed, m.mid, m.out))

    def _experts(self, layout: BlockLayout, buffers: ExpertBuffers) -> None:
        self._ops.experts(layout, self.shape.top_k, self.m.h, buffers)

    def combine(self, at: int, cpu: bool) -> None:
        """From r and the outputs to x; `cpu`: some outputs are the host's."""
        m, shared, base = self.m, self._decoder.layers[at].shared, self.m.r
        if shared is not None:
            base = m.base
            self._ops.shared_gate_up(m.h, shared.gate_up, shared.switch, m.shared)
            self._ops.linear_residual(m.shared, shared.down, None, m.r, base)
        host = HostOutputs(self.host.out[: self.rows], m.on_host, self.host.soon, self._turn(at)) if cpu else None
        self._ops.combine(base, m.weights, m.out, m.x, host)

    def _turn(self, at: int) -> Turn:
        return Turn(self.m.current, self.shape.n_moe_layers, at)

    def head(self) -> None:
        """From x to the logits."""
        m, decoder = self.m, self._decoder
        for block in decoder.after:
            self._dense(block)
        self._ops.norm_linear(m.x, decoder.final_norm, decoder.head_weight, None, m.logits, None, self.shape.norm_eps)
