"""The bench: an engine whose layer-steps are driven one by one with experts of our choice."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count, islice, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.engine import Engine
from foreload.backend.observe import Marks, NoMarks
from foreload.backend.policy.window import merge_predictions
from foreload.backend.predict import Predictor
from foreload.settings import Settings

Spans = dict[str, float]
"""Microseconds per kind of `Marks` within one layer-step; `beside`: from the hand-off to the CPU to all being done."""


@dataclass(frozen=True)
class Stage:
    """Experts of a layer by where they are: `resident` on the device, `absent` on the host only."""

    resident: list[int]
    absent: list[int]


class Bench:
    """Drives one engine; leaves it with an empty cache and its own settings (`close`)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shape = engine.shape
        self.decoder = engine.forward.decoder
        self.gate = engine.predictor("gate")
        self._settings = engine.settings
        self._generator = torch.Generator().manual_seed(0)
        self._turns = count()
        self._resident = min(2 * self.shape.top_k, self.shape.experts - self.shape.top_k)

    def close(self) -> None:
        """Give the engine back as it was, with an empty cache."""
        self.engine.forward.marks = NoMarks()
        self.engine.apply(self._settings)
        self.engine.reset_cache()

    def hidden(self, tokens: int = 1) -> Tensor:
        """A random residual stream [tokens, hidden] of unit scale on the device."""
        x = torch.randn(tokens, self.shape.hidden, generator=self._generator)
        return x.to(self.engine.device, self.decoder.embedding.dtype)

    def stage(self, miss_action: str, threads: int = 1) -> Stage:
        """Fill every layer's cache with the same experts and fix it; misses then take `miss_action`."""
        base = {"slots_per_layer": (self._resident,) * self.shape.n_moe_layers, "cpu_threads": threads}
        base["expert_format"] = self._settings.expert_format
        self.engine.apply(Settings.parse({**base, "miss_action": "fetch"}))
        resident = list(range(self._resident))
        for layer in range(self.shape.n_moe_layers):
            for at in range(0, self._resident, self.shape.top_k):
                self.layer_step(layer, resident[at : at + self.shape.top_k])
        prefetch = {"predictor": "gate", "prefetch_depth": 1}
        self.engine.apply(Settings.parse({**base, **prefetch, "miss_action": miss_action, "admission": "none"}))
        self.engine.place_helpers()
        return Stage(resident, list(range(self._resident, self.shape.experts)))

    def layer_step(
        self,
        layer: int,
        experts: list[int] | NDArray[np.int64],
        context: int = 64,
        depth: int = 0,
        prefetched: list[int] | None = None,
        wait_us: int = 0,
        predictor: Predictor | None = None,
    ) -> Spans:
        """One whole layer-step of decode on random input, its experts chosen; microseconds per kind of block.

        `experts` are those of one token, or [tokens, experts each] of a window, which ends at `context`. `predictor`
        (default: the gate) looks `depth` layers ahead. `prefetched` experts of the next layer are copied meanwhile.
        `wait_us` is waited first, as for a copy.
        Blocks run in the engine's order, so that each finds caches as it does in decode; on a GPU each starts idle.
        """
        decoder, forward, marks = self.decoder, self.engine.forward, Marks()
        forward.marks = marks
        with torch.inference_mode():
            routed = np.atleast_2d(np.asarray(experts, np.int64))
            x = self.hidden(len(routed))
            self.start(marks)
            while wait_us and time.perf_counter_ns() < marks.since_ns + wait_us * 1000:
                time.sleep(0)
            if wait_us:
                marks.start()
            r = decoder.attend(layer, x, max(0, min(context, decoder.context_tokens) - len(routed)))
            self.end(marks, "attention")
            h = decoder.moe_input(layer, r)
            ids, weights = decoder.route(layer, h)
            ids.cpu().numpy()
            self.end(marks, "route")
            if depth:
                asked = predictor or self.gate
                found = asked.ahead(layer, r, ids, weights, depth)
                of_layers = asked.best(layer, found, self.shape.top_k).cpu().numpy()
                _ = [merge_predictions(of_layer) for of_layer in of_layers]
                self.end(marks, "predict")
            predicted = [np.asarray(prefetched, np.int32)] if prefetched else []
            out = r + forward.experts(layer, routed, h, weights[:, : routed.shape[1]], predicted)
            forward.finish()
            self.end(marks, "finish")
            if layer == self.shape.n_moe_layers - 1:
                tokens = decoder.logits(out).argmax(-1).tolist()
                self.end(marks, "head")
                decoder.embed(torch.tensor(tokens, device=self.engine.device))
                self.end(marks, "embed")
        spans: Spans = {}
        for kind, _, _, begun, done in marks.spans:
            spans[kind] = spans.get(kind, 0.0) + (done - begun) / 1e3
        spans["beside"] = sum(spans.get(kind, 0.0) for kind in ("submit", "experts_gpu", "wait_cpu"))
        return spans

    def discard(self) -> None:
        """Take back copies that nothing has used."""
        with self.engine.copies.lock:
            self.engine.brain.quiesce()
            self.engine.copies.settle()

    def start(self, marks: Marks) -> None:
        """Begin a block on an idle device."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        marks.start()

    def end(self, marks: Marks, kind: str) -> None:
        """End a block and begin the next on an idle device."""
        marks.mark(kind)
        self.start(marks)

    def pick(self, experts: list[int], count: int, turn: int) -> list[int]:
        """`count` of `experts`, others at every turn."""
        return [experts[(turn * count + i) % len(experts)] for i in range(count)]

    def copy_times(
        self, layer: int, experts: list[int], beside: list[int], at_once: int | None = None, submissions: int = 1
    ) -> list[float]:
        """Fetch `experts` while the CPU computes `beside` over and over; microseconds of each copy after the first.

        `at_once` of them (default: all), others each time, since those computed last are in the caches. So many
        `submissions` are made before each wait, for the CPU not to wait for Python.

        Back-to-back copies are told apart by their arrivals, so the rate is the link's, not the waiting thread's.
        """
        copies, brain = self.engine.copies, self.engine.brain
        copies.spans = []
        ids = np.asarray(sorted(experts), np.int32)
        keys = [layer * self.shape.experts + expert for expert in experts]
        with copies.lock:
            brain.begin(layer, ids, np.ones(len(ids), np.int32))
            copies.lock.notify_all()
        if beside:
            n = at_once or len(beside)
            x, rows = self.hidden().cpu(), [np.zeros(1, np.int64)] * n
            while brain.in_flight() or brain.can_issue():
                for turn in islice(self._turns, submissions):
                    of_layer = turn % self.shape.n_moe_layers
                    self.engine.cpu.submit(of_layer, self.pick(beside, n, turn), x, rows)
                self.engine.cpu.join()
        copies.wait_landed(keys)
        with copies.lock:
            brain.finish(layer)
        landed = [copy.landed_ns for copy in copies.spans]
        copies.spans = None
        return [(b - a) / 1e3 for a, b in pairwise(landed)]
