"""The blocks of a decode step as Triton kernels. Tile sizes suit Hopper."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton import knobs

from foreload.backend.cuda.kernels import dense, experts, hold, prompt, route
from foreload.backend.cuda.kernels.layout import ENTRY, BlockLayout, Format
from foreload.backend.cuda.kernels.ops import (
    PLANNED,
    TOKENS,
    ExpertBuffers,
    HostInputs,
    HostOutputs,
    Ranking,
    Turn,
    check_layout,
    power_of_two,
    tile_columns,
    tiles,
)
from foreload.backend.cuda.kernels.triton_attention import BUILD, TritonAttention
from foreload.errors import UsageError

ROWS, COLS = 4, 1024
"""A program of a matrix-vector kernel: rows, and columns it reads at once."""
TOGETHER = 3
"""Tokens that a program of a projection computes at once: on an H200 those of a layer take 28 us instead of 33 over
three tokens and 59 instead of 69 over nine (Qwen3-30B-A3B)."""
HOST_COLS = 256
"""Columns of the host's sums that a program looks at."""
GATE_UP, DOWN = {"ROWS": 2, "num_warps": 1}, {"ROWS": 4, "num_warps": 2}
UP_COLS, DOWN_COLS = 2048, 256
"""The same of experts of 16 or 32 bit numbers: on an H200 6 and 10 % faster (8 experts of 2048 x 768, bf16)."""
CODED = {"ROWS": ROWS, "num_warps": 1}
PROGRAMS: dict[Format, tuple[dict[str, int], dict[str, int], int, int]] = {
    "bfloat16": (GATE_UP, DOWN, UP_COLS, DOWN_COLS),
    "float32": (GATE_UP, DOWN, UP_COLS, DOWN_COLS),
    "bf12": (GATE_UP, DOWN, 1024, DOWN_COLS),  # which takes more registers
    "mxfp4": (CODED, CODED, 1024, 256),
}
"""Programs of gate and up and of down, and columns that they read at once, by format; of the others `OTHERS`."""
OTHERS = {"ROWS": ROWS, "num_warps": 4}, {"ROWS": ROWS, "num_warps": 4}, COLS, COLS
TILE_ROWS, STAGES = 64, 3
"""A program of prompt chunks: rows of weights, and blocks of columns that are loaded ahead."""


def _cols(width: int, most: int = COLS) -> int:
    return min(most, max(16, power_of_two(width)))


def _layer(turn: Turn | None) -> dict[str, Any]:
    """Which layer of how many, for kernels that wait for its turn."""
    return {"LAYER": 0, "LAYERS": 0} if turn is None else {"LAYER": turn.at, "LAYERS": turn.layers}


def _gate_up(layout: BlockLayout) -> dict[str, Any]:
    """Where kernels find gate and up, and what they make of them."""
    gate, up = layout.gate, layout.up
    activation = {"ACTIVATION": layout.activation, "ALPHA": layout.alpha, "LIMIT": layout.limit}
    scales = {"GATE_SCALES": gate.scales, "UP_SCALES": up.scales, "SCALE_STRIDE": gate.scale_stride}
    biases = {"GATE_BIAS": gate.bias, "UP_BIAS": up.bias, "BIAS_STRIDE": gate.bias_stride}
    return {"GATE": gate.at, "UP": up.at, "STRIDE": gate.stride, **activation, **scales, **biases}


def _down(layout: BlockLayout) -> dict[str, Any]:
    """Where kernels find down."""
    down = layout.down
    scales = {"SCALES": down.scales, "SCALE_STRIDE": down.scale_stride}
    return {"DOWN": down.at, "STRIDE": down.stride, **scales, "BIAS": down.bias, "BIAS_STRIDE": down.bias_stride}


class TritonOps(TritonAttention):
    """Blocks on a GPU (or, with TRITON_INTERPRET=1, on the CPU).

    `fence`: words to the host are ordered by a fence. `pdl`: a kernel of a decode step begins while the one before it
    ends (compute capability 9.0 and later). `together`: tokens that a program of a projection computes at once.
    """

    def __init__(self, fence: bool = True, pdl: bool = False, together: int = TOGETHER) -> None:
        super().__init__(pdl)
        self._fence, self._together = fence, together

    def embed(self, given: Tensor, current: Tensor, table: Tensor, x: Tensor) -> None:  # noqa: D102
        hidden = x.shape[1]
        cols = _cols(hidden)
        dense.embed[(len(x), tiles(hidden, cols))](given, current, table, x, HIDDEN=hidden, COLS=cols, **self._build)

    def norm_linear(  # noqa: D102
        self,
        x: Tensor,
        norm: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        y: Tensor,
        normed: Tensor | None,
        eps: float,
    ) -> None:
        (n, hidden), out = x.shape, y.shape[1]
        dense.norm_linear[(tiles(out, ROWS), tiles(n, self._together))](
            x,
            norm,
            weights,
            norm if bias is None else bias,
            y,
            x if normed is None else normed,
            N=n,
            HIDDEN=hidden,
            STRIDE=x.stride(0),
            OUT=out,
            EPS=eps,
            ROWS=ROWS,
            COLS=_cols(hidden),
            TOGETHER=min(n, self._together),
            BIAS=bias is not None,
            KEEP=normed is not None,
            **self._build,
        )

    def linear_residual(self, x: Tensor, weights: Tensor, bias: Tensor | None, residual: Tensor, y: Tensor) -> None:  # noqa: D102
        (n, width), out = x.shape, y.shape[1]
        dense.linear_residual[(tiles(out, ROWS), tiles(n, self._together))](
            x,
            weights,
            residual if bias is None else bias,
            residual,
            y,
            N=n,
            WIDTH=width,
            OUT=out,
            ROWS=ROWS,
            COLS=_cols(width),
            TOGETHER=min(n, self._together),
            BIAS=bias is not None,
            **self._build,
        )

    def top_k(  # noqa: D102
        self,
        logits: Tensor,
        ids: Tensor,
        weights: Tensor,
        ranking: Ranking,
        current: Tensor,
        words: Tensor | None,
        correction: Tensor | None = None,
    ) -> None:
        (n, k), count = ids.shape, logits.shape[1]
        route.top_k[(n,)](
            logits,
            ids,
            weights,
            current,
            current if words is None else words,
            logits if correction is None else correction,
            EXPERTS=count,
            EXPERTS_UP=power_of_two(count),
            K=k,
            K_UP=power_of_two(k),
            NORMALISE=ranking.normalise,
            SIGMOID=ranking.sigmoid,
            CORRECTED=correction is not None,
            SCALE=ranking.scale,
            TELL=words is not None,
            num_warps=1,
            **self._build,
        )

    def replay_routes(  # noqa: D102
        self,
        current: Tensor,
        tables: tuple[Tensor, Tensor],
        layer: int,
        ids: Tensor,
        weights: Tensor,
        words: Tensor | None,
    ) -> None:
        n, k = ids.shape
        route.replay_routes[(n,)](
            current,
            *tables,
            ids,
            weights,
            current if words is None else words,
            LAYER=layer,
            LAYERS=tables[0].shape[1],
            K=k,
            K_UP=power_of_two(k),
            TELL=words is not None,
            num_warps=1,
            **self._build,
        )

    def replay_predictions(self, current: Tensor, table: Tensor, first: int, predicted: Tensor) -> None:  # noqa: D102
        targets, n, width = predicted.shape
        _, rows, layers, stored = table.shape
        route.replay_predictions[(n, targets)](
            current,
            table,
            predicted,
            TABLE_ROWS=rows,
            FIRST=first,
            LAYERS=layers,
            STORED=stored,
            WIDTH=width,
            WIDTH_UP=power_of_two(width),
            num_warps=1,
            **self._build,
        )

    def publish(  # noqa: D102
        self, current: Tensor, ids: Tensor, words: Tensor, inputs: HostInputs | None = None
    ) -> None:
        rows, weights = ((ids, words), (ids, words)) if inputs is None else (inputs.rows, inputs.weights)
        route.publish[(1,)](
            current,
            ids,
            rows[0],
            weights[0],
            words,
            rows[1],
            weights[1],
            IDS=ids.numel(),
            IDS_UP=power_of_two(ids.numel()),
            ELEMENTS=0 if inputs is None else rows[0].numel(),
            COLS=COLS,
            ALONE=inputs is None,
            FENCE=self._fence,
            **self._build,
        )

    def take_plan(  # noqa: D102
        self,
        words: Tensor,
        plan: Tensor,
        listed: Tensor,
        on_host: Tensor,
        turn: Turn | None,
    ) -> None:
        items = words.shape[1]
        route.take_plan[(1,)](
            words if turn is None else turn.current,
            words,
            plan,
            listed,
            on_host,
            ITEMS=items,
            **_layer(turn),
            ITEMS_UP=power_of_two(items),
            ENTRY=ENTRY,
            KINDS=PLANNED,
            WAIT=turn is not None,
            num_warps=1,
            **self._build,
        )

    def plan_resident(self, ids: Tensor, addresses: Tensor, layer: int, plan: Tensor, listed: Tensor) -> None:  # noqa: D102
        route.plan_resident[(1,)](
            ids,
            addresses,
            plan,
            listed,
            LAYER=layer,
            EXPERTS=addresses.shape[1],
            N_ITEMS=ids.numel(),
            ITEMS_UP=power_of_two(ids.numel()),
            ENTRY=ENTRY,
            **self._build,
        )

    def experts(self, layout: BlockLayout, k: int, x: Tensor, buffers: ExpertBuffers) -> None:  # noqa: D102
        check_layout(layout)
        groups, (gate_up, down, up_cols, down_cols) = len(buffers.plan), PROGRAMS.get(layout.format, OTHERS)
        build = {"ALIGN": 16 if layout.aligned else 1, "FORMAT": layout.format, "ENTRY": ENTRY, **self._build}
        build["BIAS_BYTES"] = layout.bias_bytes
        build["TILE"] = layout.tile
        experts.gate_up[(groups, tiles(layout.width, gate_up["ROWS"]))](
            buffers.plan,
            buffers.listed,
            x,
            buffers.mid,
            K=k,
            HIDDEN=layout.hidden,
            WIDTH=layout.width,
            COLS=_cols(layout.hidden, up_cols),
            **_gate_up(layout),
            **gate_up,
            **build,
        )
        experts.down[(groups, tiles(layout.hidden, down["ROWS"]))](
            buffers.plan,
            buffers.listed,
            buffers.mid,
            buffers.out,
            HIDDEN=layout.hidden,
            WIDTH=layout.width,
            COLS=_cols(layout.width, down_cols),
            **_down(layout),
            **down,
            **build,
        )

    def shared_gate_up(self, x: Tensor, gate_up: Tensor, switch: Tensor | None, mid: Tensor) -> None:  # noqa: D102
        (n, hidden), width = x.shape, mid.shape[1]
        experts.shared_gate_up[(tiles(width, GATE_UP["ROWS"]),)](
            x,
            gate_up,
            gate_up if switch is None else switch,
            mid,
            N=n,
            HIDDEN=hidden,
            WIDTH=width,
            COLS=_cols(hidden, UP_COLS),
            SWITCH=switch is not None,
            **GATE_UP,
            **self._build,
        )

    def bring(self, given: Tensor, there: Tensor) -> None:  # noqa: D102
        words = given.numel()
        prompt.bring[(tiles(words, COLS),)](given, there, words, BLOCK=COLS, **BUILD)

    def chunk_experts(  # noqa: D102
        self, layout: BlockLayout, k: int, x: Tensor, plan: Tensor, listed: Tensor, mid: Tensor, out: Tensor
    ) -> None:
        check_layout(layout)
        columns, count = tile_columns(layout), len(plan)
        if not columns:
            raise UsageError(f"prompt chunks cannot be computed from tiles of {layout.tile} columns to a scale")
        build: dict[str, Any] = {
            "ENTRY": ENTRY,
            "HIDDEN": layout.hidden,
            "WIDTH": layout.width,
            "TOKENS": TOKENS,
            "COLS": columns,
        }
        build |= {"ROWS": TILE_ROWS, "ALIGN": 16 if layout.aligned else 1, "FORMAT": layout.format}
        build |= {"BIAS_BYTES": layout.bias_bytes, "TILE": layout.tile, "num_stages": STAGES, **BUILD}
        build["PLAIN"] = knobs.runtime.interpret
        both, last = _gate_up(layout), _down(layout)
        prompt.gate_up_tiles[(tiles(layout.width, TILE_ROWS), count)](plan, listed, x, mid, K=k, **both, **build)
        prompt.down_tiles[(tiles(layout.hidden, TILE_ROWS), count)](plan, listed, mid, out, **last, **build)

    def weigh(self, r: Tensor, weights: Tensor, out: Tensor, x: Tensor) -> None:  # noqa: D102
        n, hidden = r.shape
        cols = _cols(hidden)
        prompt.weigh[(n, tiles(hidden, cols))](
            r, weights, out, x, K=weights.shape[1], HIDDEN=hidden, COLS=cols, **BUILD
        )

    def combine(  # noqa: D102
        self, r: Tensor, weights: Tensor, out: Tensor, x: Tensor, host: HostOutputs | None = None
    ) -> None:
        n, hidden = r.shape
        cols, k = _cols(hidden) if host is None else min(HOST_COLS, power_of_two(hidden)), weights.shape[1]
        layer = _layer(None if host is None else host.turn)
        if host is not None:
            count, soon = {"ITEMS": n * k, "ITEMS_UP": power_of_two(n * k)}, (host.turn.current, host.soon)
            hold.await_host[(1,)](*soon, host.on_host, **count, **layer, num_warps=1, **self._build)
        experts.combine[(n, tiles(hidden, cols))](
            r,
            weights,
            out,
            out if host is None else host.out,
            weights if host is None else host.on_host,
            weights if host is None else host.turn.current,
            x,
            **layer,
            K=k,
            HIDDEN=hidden,
            COLS=cols,
            HOST=host is not None,
            **self._build,
        )

    def stamp(self, begun: Tensor) -> None:  # noqa: D102
        hold.stamp[(1,)](begun, num_warps=1)

    def hold(self, begun: Tensor, least: Tensor) -> None:  # noqa: D102
        hold.hold[(1,)](begun, least, num_warps=1)
