"""Replay: decode steps whose routing, predictions and acceptance come from a recording (design: section 7).

Attention, norms, gates and predictors run and cost their time; then what they said is overwritten on the device, before
it goes to the host. So a model of random weights moves the bytes of a real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from foreload.errors import SettingsError, UsageError
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.traces.remodel import of_shape
from foreload.traces.schema import DRAFT_VERIFY, PREFILL, Trace

if TYPE_CHECKING:
    from foreload.backend.predict.base import Predictor


@dataclass(frozen=True)
class ReplayStep:
    """One recorded decode step: its first row, its token ids, and how many tokens it added to the text."""

    row: int
    token_ids: list[int]
    emitted: int


class Replay:
    """A recording on the device, by row: ids int16 and weights float32 [rows, layers, k]."""

    def __init__(self, trace: Trace, shape: ModelShape, device: torch.device) -> None:
        """MismatchError if the recording is of other layers, experts or top-k than `shape`."""
        self.trace, self._shape, self._device = of_shape(trace, shape), shape, device
        self.ids = torch.from_numpy(np.ascontiguousarray(trace.experts)).to(device)
        uniform = np.full(trace.experts.shape, 1 / shape.top_k, np.float32)
        weights = uniform if trace.weights is None else trace.weights.astype(np.float32)
        self.weights = torch.from_numpy(weights).to(device)
        self.row = 0
        """The recorded row of the running step's first token."""
        self._guesses: dict[tuple[str, int, int], Tensor] = {}

    def check(self, settings: Settings) -> None:
        """SettingsError names what the settings use and the recording does not hold."""
        drafted = bool((self.trace.phase == DRAFT_VERIFY).any())
        meta, sampling = self.trace.meta, self.trace.meta.sampling
        kind, gamma = (sampling.get("draft", "?"), sampling.get("gamma", 0)) if drafted else ("none", 0)
        if (settings.draft.kind, settings.draft.gamma) != (kind, gamma):
            raise SettingsError(
                f"draft {settings.draft.kind!r} with gamma {settings.draft.gamma}: the recording holds "
                f"{kind!r} with gamma {gamma}"
            )
        layers = settings.speculated(self._shape)
        if (layers, settings.predictor if layers else "") != (meta.speculated, meta.speculated_by):
            held = (
                f"what {meta.speculated_by} did at {len(meta.speculated)} layers" if meta.speculated else "gates only"
            )
            raise SettingsError(
                f"speculate_layers: {len(layers)} layers by {settings.predictor!r}: the recording holds {held}"
            )
        for depth in range(1, settings.prefetch_depth + 1):
            self._column(settings.prediction(depth), depth, settings.width(self._shape))

    def _column(self, predictor: str, depth: int, width: int) -> np.ndarray:
        found = self.trace.predictions.get((predictor, depth))
        if found is None or found.shape[2] < width:
            held = ", ".join(f"{name} at depth {d}" for name, d in self.trace.predictions) or "none"
            wide = "" if found is None else f", {found.shape[2]} wide,"
            raise SettingsError(
                f"predictor {predictor!r} at depth {depth}, {width} wide: the recording holds {held}{wide} and no more"
            )
        return found

    def requests(self) -> tuple[int, ...]:
        """Recorded requests."""
        return self.trace.requests()

    def prompt(self, request: int) -> list[int]:
        """The prompt of a request, as far as it was recorded; unknown tokens are 0."""
        rows = (self.trace.request == request) & (self.trace.phase == PREFILL)
        return self._tokens(np.flatnonzero(rows))

    def _tokens(self, rows: np.ndarray) -> list[int]:
        return [int(token) for token in self.trace.token_id[rows].clip(min=0) % self._shape.vocab]

    def steps(self, request: int) -> list[ReplayStep]:
        """The decode steps of a request, in order; UsageError if there are none."""
        trace, starts = self.trace, self.trace.step_starts()
        found = []
        for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            if trace.request[first] == request and trace.phase[first] != PREFILL:
                kept = int(trace.accepted[first:end].sum())
                found.append(ReplayStep(first, self._tokens(np.arange(first, end)), kept))
        if not found:
            raise UsageError(f"trace: request {request} has no decode steps to replay")
        return found

    def text(self, request: int, skip: int, tokens: int) -> list[int]:
        """The last `tokens` tokens before step `skip`, for a drafter; what was not recorded repeats what was."""
        known = self.prompt(request)
        for step in self.steps(request)[:skip]:
            known += step.token_ids[: step.emitted]
        known = known or [0]
        return (known * -(-tokens // len(known)))[-tokens:] if tokens else []

    # What the forward puts in place

    def route(self, at: int, rows: int) -> tuple[Tensor, Tensor]:
        """Recorded ids int64 and weights of layer `at` for the running step's rows, [rows, k]."""
        here = slice(self.row, self.row + rows)
        return self.ids[here, at].long(), self.weights[here, at]

    def guessed(self, predictor: Predictor, at: int, ranked: Tensor) -> Tensor:
        """Recorded predictions of layers at + 1.. in place of `ranked` [targets, rows, width]."""
        targets, rows, width = ranked.shape
        table = self.guesses(predictor, targets, width)
        here = slice(self.row, self.row + rows)
        return torch.stack([table[target, here, at + 1 + target, :width] for target in range(targets)]).long()

    def guesses(self, predictor: Predictor, depth: int, width: int) -> Tensor:
        """Recorded predictions int16 [depth, all rows, layers, width]; those of layer l were made for it."""
        key = (predictor.key, depth, width)
        if key not in self._guesses:
            names = [predictor.name, *[predictor.key] * (depth - 1)]
            blocks = [self._column(name, d, width)[:, :, :width] for d, name in enumerate(names, 1)]
            self._guesses[key] = torch.from_numpy(np.ascontiguousarray(np.stack(blocks))).to(self._device)
        return self._guesses[key]
