"""The blocks of a decode step in plain torch: the kernels' reference, and what serves where there is no Triton."""

from __future__ import annotations

import ctypes
import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from foreload.backend.cuda.kernels.layout import BlockLayout, Part
from foreload.backend.cuda.kernels.ops import (
    TAG,
    AttentionScratch,
    ExpertBuffers,
    HostInputs,
    HostOutputs,
    Ops,
    Ranking,
    Turn,
)
from foreload.backend.experts.packing import unpack_rows
from foreload.backend.models.attention import Rotary, rotate
from foreload.backend.models.routing import SMALLEST_SUM
from foreload.formats import row_bytes

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def _bytes_at(address: int, size: int) -> Tensor:
    """The `size` bytes of host memory at an address."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _strided(memory: Tensor, at: int, stride: int, rows: int, row_bytes: int) -> Tensor:
    """Rows [rows, row_bytes] of a block."""
    return torch.stack([memory[at + row * stride : at + row * stride + row_bytes] for row in range(rows)])


def matrix(memory: Tensor, layout: BlockLayout, part: Part, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
    """One matrix of a block in fp32 [rows, columns], and its bias [rows] or None."""
    bias = None
    if part.bias >= 0:
        kind = torch.float32 if layout.bias_bytes == 4 else torch.bfloat16
        bias = _strided(memory, part.bias, part.bias_stride, rows, layout.bias_bytes).view(kind)[:, 0].float()
    if layout.format == "mxfp4":
        packed = _strided(memory, part.at, part.stride, rows, columns // 2)
        codes = torch.stack([packed & 15, packed >> 4], -1).view(rows, columns)
        powers = _strided(memory, part.scales, part.scale_stride, rows, columns // 32).float() - 127
        return E2M1[codes.long()] * torch.exp2(powers).repeat_interleave(32, 1), bias
    if layout.format == "bf12":
        packed = _strided(memory, part.at, part.stride, rows, row_bytes("bf12", columns))
        return unpack_rows(packed, None, "bf12", columns).float(), bias
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
    dtype = dtypes[layout.format.removesuffix("_tile")]
    weights = _strided(memory, part.at, part.stride, rows, columns * dtype.itemsize).view(dtype).float()
    if part.scales >= 0:
        tile = layout.tile or columns
        scales = _strided(memory, part.scales, part.scale_stride, rows, 4 * -(-columns // tile)).view(torch.float32)
        weights = weights * scales.repeat_interleave(tile, 1)[:, :columns]
    return weights, bias


def _expert(address: int, layout: BlockLayout) -> list[tuple[Tensor, Tensor | None]]:
    """Gate, up and down of the block at an address, as `matrix` gives them."""
    memory, hidden, width = _bytes_at(address, layout.block_bytes), layout.hidden, layout.width
    parts = ((layout.gate, width, hidden), (layout.up, width, hidden), (layout.down, hidden, width))
    return [matrix(memory, layout, part, rows, columns) for part, rows, columns in parts]


def activated(gate: Tensor, up: Tensor, layout: BlockLayout) -> Tensor:
    """silu(gate) * up, or GPT-OSS's clamped form."""
    if layout.activation == "silu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=layout.limit), up.clamp(-layout.limit, layout.limit)
    return (up + 1) * gate * torch.sigmoid(layout.alpha * gate)


def _tables(tables: Rotary, at: int, n: int) -> Rotary:
    """Cosine and sine of `n` positions from `at` on, fp32 [n, 1, rotated dimensions]."""
    cos, sin = (table[at : at + n].float().view(n, 1, -1) for table in tables)
    return cos, sin


class TorchOps(Ops):
    """Blocks on the CPU; blocks of experts are read at their addresses in host memory."""

    def embed(self, given: Tensor, current: Tensor, table: Tensor, x: Tensor) -> None:  # noqa: D102
        x.copy_(table[given[3 : 3 + len(x)].long()])
        current[:3] = given[:3]

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
        value = F.rms_norm(x.float(), (x.shape[1],), norm.float(), eps).to(x.dtype)
        if normed is not None:
            normed.copy_(value)
        y.copy_(_rows(value, weights, bias))

    def rope_store(  # noqa: D102
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
        n, heads, dim = q.shape
        kv_heads, at = cache[0].shape[0], int(current[1])
        rows = qkv.view(n, heads + 2 * kv_heads, dim).float()
        qk = rows[:, : heads + kv_heads]
        if qk_norm is not None:
            qk = F.rms_norm(qk, (dim,), None, eps) * qk_norm.float()
        qk = rotate(qk, _tables(tables, at, n), 0)
        q.copy_(qk[:, :heads])
        places = torch.arange(at, at + n)
        if ring:
            places %= cache[0].shape[1]
        cache[0][:, places] = qk[:, heads:].transpose(0, 1).to(q.dtype)
        cache[1][:, places] = rows[:, heads + kv_heads :].transpose(0, 1).to(q.dtype)

    def attend(  # noqa: D102
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
        n, heads, dim = q.shape
        group = heads // cache[0].shape[0]
        for row in range(n):  # one at a time: a row does not depend on its company
            end = int(current[1]) + row + 1
            start = max(0, end - window) if window else 0
            places = torch.arange(start, end) % cache[0].shape[1]
            keys, values = (part[:, places].float().repeat_interleave(group, 0) for part in cache)
            scores = (keys @ q[row].float()[..., None])[..., 0] * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks.float()[:, None]], 1)
            chances = scores.softmax(-1)[:, : end - start]
            out[row] = (chances[:, None] @ values)[:, 0].reshape(heads * dim)

    def fold_store(  # noqa: D102
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
        (heads, nope, rank), at, rope = key_up.shape, int(current[1]), rows.shape[1] - key_up.shape[2]
        rotary = _tables(tables, at, len(q))
        for row in range(len(q)):  # one at a time: a row does not depend on its company
            plain, turned = queries[row].float().view(heads, -1).split([nope, rope], 1)
            q[row, :, :rank] = (plain[:, None] @ key_up.float())[:, 0]
            q[row, :, rank:] = rotate(turned[None], rotary, row)[0]
            latent, key = kept[row].float().split([rank, rope])
            rows[at + row, :rank] = F.rms_norm(latent, (rank,), norm.float(), eps)
            rows[at + row, rank:] = rotate(key[None, None], rotary, row)[0, 0]

    def latent_attend(  # noqa: D102
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
        for row in range(len(q)):
            seen = rows[: int(current[1]) + row + 1].float()
            chances = (q[row].float() @ seen.T * scale).softmax(-1)
            latents = chances @ seen[:, : value_up.shape[2]]
            mixed[row] = latents.reshape(-1)
            out[row] = (value_up.float() @ latents[..., None]).reshape(-1)

    def linear_residual(self, x: Tensor, weights: Tensor, bias: Tensor | None, residual: Tensor, y: Tensor) -> None:  # noqa: D102
        y.copy_(residual.float() + _rows(x, weights, bias))

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
        scores = logits.float().sigmoid() if ranking.sigmoid else logits.float().softmax(-1)
        ranked = logits
        if ranking.sigmoid and correction is not None:
            ranked = scores + correction
        order = ranked.argsort(dim=-1, descending=True, stable=True)[:, : ids.shape[1]]
        chances = scores.gather(1, order)
        if ranking.normalise:
            chances = chances / (chances.sum(-1, keepdim=True) + (SMALLEST_SUM if ranking.sigmoid else 0.0))
        ids.copy_(order)
        weights.copy_(chances * ranking.scale)
        if words is not None:
            self.publish(current, ids, words)

    def replay_routes(  # noqa: D102
        self,
        current: Tensor,
        tables: tuple[Tensor, Tensor],
        layer: int,
        ids: Tensor,
        weights: Tensor,
        words: Tensor | None,
    ) -> None:
        at = int(current[2])
        ids.copy_(tables[0][at : at + len(ids), layer])
        weights.copy_(tables[1][at : at + len(ids), layer])
        if words is not None:
            self.publish(current, ids, words)

    def replay_predictions(self, current: Tensor, table: Tensor, first: int, predicted: Tensor) -> None:  # noqa: D102
        at = int(current[2])
        targets, n, width = predicted.shape
        for target in range(targets):
            predicted[target] = table[target, at : at + n, first + target, :width]

    def publish(  # noqa: D102
        self, current: Tensor, ids: Tensor, words: Tensor, inputs: HostInputs | None = None
    ) -> None:
        for here, there in () if inputs is None else (inputs.rows, inputs.weights):
            there.copy_(here)
        words.copy_((int(current[0]) & TAG) << 16 | (ids.reshape(-1) & 0xFFFF))

    def take_plan(  # noqa: D102
        self,
        words: Tensor,
        plan: Tensor,
        listed: Tensor,
        on_host: Tensor,
        turn: Turn | None,
    ) -> None:
        low, high, span, item = _values(words, turn)
        plan[:, 0], plan[:, 1], plan[:, 2] = high << 32 | low, span & 0xFFFF, span >> 16
        listed.copy_(item & 0x7FFFFFFF)
        on_host.copy_(item >> 31)

    def plan_resident(self, ids: Tensor, addresses: Tensor, layer: int, plan: Tensor, listed: Tensor) -> None:  # noqa: D102
        flat, at = ids.reshape(-1).tolist(), 0
        plan[: len(flat)] = 0
        for item, expert in enumerate(flat):
            if expert in flat[:item]:
                continue
            same = [other for other, its in enumerate(flat) if its == expert]
            plan[item, :3] = torch.tensor([int(addresses[layer, expert]), at, len(same)])
            listed[at : at + len(same)] = torch.tensor(same)
            at += len(same)

    def experts(self, layout: BlockLayout, k: int, x: Tensor, buffers: ExpertBuffers) -> None:  # noqa: D102
        for address, first, count, _ in buffers.plan.tolist():
            if not address:
                continue
            (gate, gate_bias), (up, up_bias), (down, down_bias) = _expert(address, layout)
            for item in buffers.listed[first : first + count].tolist():
                row = x[item // k][None].float()
                mid = activated(_rows(row, gate, gate_bias), _rows(row, up, up_bias), layout)
                buffers.mid[item] = mid[0]
                buffers.out[item] = _rows(mid, down, down_bias)[0]

    def shared_gate_up(self, x: Tensor, gate_up: Tensor, switch: Tensor | None, mid: Tensor) -> None:  # noqa: D102
        gate, up = _rows(x, gate_up, None).chunk(2, 1)
        mid.copy_(F.silu(gate) * up)
        if switch is not None:
            mid.mul_(_rows(x, switch, None).sigmoid())

    def bring(self, given: Tensor, there: Tensor) -> None:  # noqa: D102
        there.copy_(given)

    def chunk_experts(  # noqa: D102
        self, layout: BlockLayout, k: int, x: Tensor, plan: Tensor, listed: Tensor, mid: Tensor, out: Tensor
    ) -> None:
        for address, first, count, _ in plan.tolist():
            gate, up, down = _expert(address, layout)
            mine = listed[first : first + count]
            rows = x[mine // k].float()
            mid[mine] = activated(F.linear(rows, *gate), F.linear(rows, *up), layout).to(mid.dtype)
            out[mine] = F.linear(mid[mine].float(), *down).to(out.dtype)

    def weigh(self, r: Tensor, weights: Tensor, out: Tensor, x: Tensor) -> None:  # noqa: D102
        self.combine(r, weights, out, x)

    def combine(  # noqa: D102
        self, r: Tensor, weights: Tensor, out: Tensor, x: Tensor, host: HostOutputs | None = None
    ) -> None:
        total, k = torch.zeros(r.shape, dtype=torch.float32), weights.shape[1]
        there = torch.zeros(r.shape[0] * k, dtype=torch.bool) if host is None else host.on_host != 0
        for rank in range(k):
            items = torch.arange(len(r)) * k + rank
            total += weights[:, rank, None] * torch.where(there[items, None], 0, out[items])
        mine = there.view(-1, k).any(1)
        if host is not None and mine.any():
            total[mine] += _values(host.out, host.turn, mine).int().view(torch.float32)
        x.copy_(r.float() + total)

    def stamp(self, begun: Tensor) -> None:  # noqa: D102
        begun[0] = time.perf_counter_ns()

    def hold(self, begun: Tensor, least: Tensor) -> None:  # noqa: D102
        while time.perf_counter_ns() < int(begun) + int(least):
            time.sleep(1e-5)


def _values(words: Tensor, turn: Turn | None, wanted: Tensor | slice = slice(None)) -> Tensor:
    """The lower halves of the rows of words that are wanted, those of a turn once they are there."""
    seen = words[wanted].clone()
    while turn is not None and int((seen >> 32).min()) < int(turn.current[0]) * turn.layers + turn.at:
        time.sleep(1e-5)
        seen = words[wanted].clone()
    return seen & 0xFFFFFFFF


def _rows(x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weights^T + bias in fp32, row by row, so that a row's bits do not depend on the others."""
    found = torch.stack([torch.mv(weights.float(), row.float()) for row in x])
    return found if bias is None else found + bias.float()
