"""Default vectors and the shared estimator, from training text (nothing that is recorded or measured later)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foreload.backend.predict.calibration import Calibration, CalibrationMeta
from foreload.backend.predict.network import Estimator
from foreload.machine import software
from recipes.train.data import Windows

from .live import Live, State

Batch = Callable[[], Tensor]


@torch.no_grad()
def default_vectors(live: Live, batch: Batch, tokens: int) -> tuple[Tensor, Tensor]:
    """(dv [layers, experts, hidden] fp32, tokens seen per expert [layers, experts]); unseen experts are zero."""
    c = live.c
    sums = torch.zeros(c.layers, c.experts, c.hidden, device=live.device)
    counts = torch.zeros(c.layers, c.experts, dtype=torch.long, device=live.device)
    experts = torch.arange(c.experts, device=live.device)

    def visit(state: State) -> None:
        rows, order = live.expert_rows(state.layer, state.h, state.ids)
        flat = state.ids.reshape(-1)
        # A product with the one-hot matrix: adding row by row would queue on few addresses.
        chosen = (flat[order] == experts[:, None]).float()
        sums[state.layer] += chosen @ rows.float()
        counts[state.layer] += chosen.sum(-1).long()

    seen = 0
    while seen < tokens:
        ids = batch()
        live.forward(ids, visit=visit)
        seen += ids.numel()
    return sums / counts.clamp(min=1)[..., None], counts


class _Pairs:
    """A `visit` that gathers (q_l, router distribution of l + 1) for a random part of the tokens."""

    def __init__(self, live: Live, calibration: Calibration, rows: Tensor) -> None:
        self.live, self.calibration, self.rows = live, calibration, rows
        self.inputs: list[Tensor] = []
        self.targets: list[Tensor] = []

    def __call__(self, state: State) -> None:
        """Keep this layer's target for the layer before, and its own input for the layer after."""
        rows = self.rows
        if state.layer:
            self.targets.append(state.scores[rows].softmax(-1))
        if state.layer + 1 < self.live.c.layers:
            d = self.calibration.default(state.layer, state.ids[rows], state.weights[rows])
            self.inputs.append(self.live.moe_input(state.layer + 1, state.r[rows] + d))


def train_estimator(
    live: Live, calibration: Calibration, batch: Batch, seconds: float, sample: int, rate: float = 2e-3
) -> dict[str, Any]:
    """Train `calibration.estimator` in place with a KL loss, annealed by elapsed time; returns what was done."""
    began, share, steps, seen, curve = time.perf_counter(), 0.0, 0, 0, []
    estimator = calibration.estimator
    optimizer = torch.optim.AdamW(estimator.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.98))
    layers = torch.arange(live.c.layers - 1, device=live.device)
    while share < 1.0:
        with torch.no_grad():
            ids = batch()
            rows = torch.randperm(ids.numel(), device=live.device)[:sample]
            pairs = _Pairs(live, calibration, rows)
            live.forward(ids, visit=pairs)
            q, target = torch.stack(pairs.inputs), torch.stack(pairs.targets)
        scores = estimator(q, layers).log_softmax(-1)
        loss = functional.kl_div(scores, target, reduction="none").sum(-1).mean()
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (steps + 1) / 50) * min(1.0, (1.0 - share) / 0.6)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        steps, seen = steps + 1, seen + len(rows)
        if steps % 20 == 0 or steps == 1:
            curve.append({"step": steps, "kl": round(loss.item(), 4)})
        share = (time.perf_counter() - began) / seconds
    estimator.requires_grad_(False)
    return {
        "seconds": round(time.perf_counter() - began, 1), "steps": steps, "tokens": seen,
        "parameters": sum(p.numel() for p in estimator.parameters()), "final_kl_nats": round(loss.item(), 4),
        "curve": curve[:: max(1, len(curve) // 20)],
    }  # fmt: skip


def calibrate(
    live: Live,
    windows: Windows,
    weights_sha256: str,
    *,
    shape: tuple[int, int],
    dv_tokens: int,
    seconds: float,
    sample: int,
    seed: int,
) -> tuple[Calibration, dict[str, Any]]:
    """Both parts; `shape` is (rows, length) of a batch. The hybrid's choice and recall come later (`finished`)."""
    began = time.perf_counter()

    def batch() -> Tensor:
        return windows.batch(*shape)[0]

    dv, counts = default_vectors(live, batch, dv_tokens)
    torch.manual_seed(seed)
    c = live.c
    meta = CalibrationMeta(
        model="topo", weights_hash=weights_sha256[:16], moe_layers=c.layers, experts=c.experts, hidden=c.hidden,
        texts=("windows of the training text",), tokens={"vectors": dv_tokens}, seed=seed,
        unseen_experts=int((counts == 0).sum()), estimator={}, hybrid=(), recall={}, software=software(),
    )  # fmt: skip
    shared = torch.zeros(c.layers, c.hidden, device=live.device)
    estimator = Estimator(c.hidden, c.experts, c.layers).to(live.device)
    calibration = Calibration(meta, dv, shared, estimator)
    report = {
        "default_vector_tokens": dv_tokens, "unseen_experts": int((counts == 0).sum()),
        "default_vector_seconds": round(time.perf_counter() - began, 1), "seed": seed,
        "text": "windows of the training text, drawn by the seed",
    }  # fmt: skip
    report["estimator"] = train_estimator(live, calibration, batch, seconds, sample)
    return calibration, report


def finished(calibration: Calibration, report: dict[str, Any], hybrid: list[list[Any]]) -> Calibration:
    """With how the estimator was trained and what the selection split chose: ready to be saved."""
    trained = report["estimator"]
    update = {
        "hybrid": tuple(map(tuple, hybrid)),
        "tokens": {**calibration.meta.tokens, "train": trained["tokens"]},
        "estimator": {name: float(trained[name]) for name in ("steps", "parameters", "final_kl_nats")},
    }
    return replace(calibration, meta=calibration.meta.model_copy(update=update))
