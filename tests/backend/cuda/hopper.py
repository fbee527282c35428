"""Compiles every kernel for compute capability 9.0, without a GPU, at published sizes; prints one JSON object.

Kernel -> the global loads and stores, fences and matrix instructions in its PTX.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foreload.backend.cuda.kernels import attention, dense, experts, hold, latent, prompt, route
from foreload.backend.cuda.kernels.ops import power_of_two
from foreload.backend.cuda.kernels.triton_attention import (
    FOLD_DIMS,
    FOLD_TILE,
    LATENT_DIMS,
    LATENT_HEADS,
    LATENT_ROWS,
    VALUE_ROWS,
)
from foreload.backend.cuda.kernels.triton_ops import TOGETHER
from foreload.backend.models.checkpoint import Checkpoint
from foreload.formats import row_bytes

WORDS = re.compile(
    r"(?:ld|st)\.global\.\S*|cp\.async\.cg\S*|fence\.acq_rel\.sys|mma\.sync|mma_async|griddepcontrol\.[a-z_]+"
    r"|prefetch\.global\.L2"
)
SHARED_BYTES = 99 << 10
"""Shared memory that a program may have on any card since compute capability 8.6."""
FOUND: dict[str, dict[str, int]] = {}
POINTERS = {"b": "*bf16", "f": "*fp32", "i": "*i32", "l": "*i64", "s": "*i16"}


def build(name: str, kernel: Any, tensors: str, warps: int = 4, stages: int = 3, **fixed: Any) -> None:
    """Compile with pointer arguments of these kinds (letters of POINTERS), all aligned, and constants."""
    names = kernel.arg_names[: len(tensors)]
    if "PDL" in kernel.arg_names:
        fixed = {**fixed, "PDL": True}
    numbers = {arg: fixed.pop(arg) for arg in list(fixed) if arg in kernel.do_not_specialize}
    signature = {arg: POINTERS[kind] for arg, kind in zip(names, tensors, strict=True)}
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(len(tensors))}
    kinds = {**signature, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(fixed, "constexpr")}
    source = ASTSource(kernel, kinds, fixed, aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= SHARED_BYTES, (name, compiled.metadata.shared)
    FOUND[name] = dict(Counter(WORDS.findall(compiled.asm["ptx"])))


ROW: dict[str, Any] = {"ROWS": 4, "COLS": 1024}
HEADS: dict[str, Any] = {"HEADS": 32, "KV_HEADS": 4, "DIM": 128, "DIMS": 128, "CONTEXT": 2048}
CHUNKS: dict[str, Any] = {"CHUNKS": 32, "CHUNK": 64}

build("embed", dense.embed, "iibb", HIDDEN=2048, COLS=1024)
for rows, together in ((1, 1), (9, TOGETHER)):
    build(
        f"norm_linear {rows}",
        dense.norm_linear,
        "bbbbfb",
        N=rows,
        HIDDEN=2048,
        STRIDE=2048,
        OUT=5120,
        EPS=1e-6,
        BIAS=False,
        KEEP=True,
        **ROW,
        TOGETHER=together,
    )
    both = {"N": rows, "TOGETHER": together}
    build(f"linear_residual {rows}", dense.linear_residual, "bbbbb", WIDTH=4096, OUT=2048, BIAS=False, **ROW, **both)
    fixed = {"N": rows, "BLOCK": 64, "M": 16 if rows == 1 else 128, "SCALE": 0.088, **HEADS, **CHUNKS}
    build(f"attend_chunks {rows}", attention.attend_chunks, "bbbifff", WINDOW=0, **fixed)
    build(f"attend_chunks window {rows}", attention.attend_chunks, "bbbifff", WINDOW=128, **fixed)
build("rope_store", attention.rope_store, "fbbbibbb", 1, EPS=1e-6, NORM=True, RING=True, **HEADS)
merge = {"HEADS": 32, "DIM": 128, "DIMS": 128, "CHUNKS_UP": 32, "USED": 32, "BLOCK": 16, "SINKS": True, **CHUNKS}
build("attend_merge", attention.attend_merge, "fffbib", **merge)
top = {"EXPERTS": 128, "EXPERTS_UP": 128, "K": 8, "K_UP": 8, "NORMALISE": True, "TELL": True}
softmax = {"SIGMOID": False, "CORRECTED": False, "SCALE": 1.0}
build("top_k", route.top_k, "flfiif", 1, **softmax, **top)
build("top_k sigmoid", route.top_k, "flfiif", 1, **top, SIGMOID=True, CORRECTED=True, SCALE=1.8)
for name in ("deepseek-v2-lite", "glm-4.7-flash"):
    shape = Checkpoint.random(name).shape
    assert shape.latent is not None
    parts, hidden = shape.latent, shape.hidden
    wide, rank = shape.heads * shape.head_dim, parts.query_rank
    down = (rank or wide) + parts.row
    sizes = {"HEADS": shape.heads, "RANK": parts.rank, "RANK_UP": power_of_two(parts.rank)}
    rope = {"ROPE": parts.rope_dim, "ROPE_UP": power_of_two(parts.rope_dim)}
    norm: dict[str, Any] = {"N": 1, "EPS": 1e-6, "BIAS": False, "KEEP": False, "TOGETHER": 1, **ROW}
    build(f"norm_linear {name}", dense.norm_linear, "bbbbfb", HIDDEN=hidden, STRIDE=hidden, OUT=down, **norm)
    if rank:
        build(f"norm_linear q {name}", dense.norm_linear, "fbbbff", HIDDEN=rank, STRIDE=down, OUT=wide, **norm)
    fold: dict[str, Any] = {"NOPE": parts.nope_dim, "Q_STRIDE": wide if rank else down, "KEPT_STRIDE": down}
    fold |= {"DIMS": FOLD_DIMS, "TILE": FOLD_TILE, "EPS": 1e-6, **sizes, **rope}
    build(f"fold_store {name}", latent.fold_store, "ffbbbibbb", **fold)
    for kind, size in (("b", 2), ("f", 4)):
        heads = min(LATENT_HEADS // size, power_of_two(shape.heads))
        fixed = {"BLOCK": LATENT_ROWS // size, "M": heads, "SCALE": 0.1, **sizes, **rope, **CHUNKS}
        build(f"latent_chunks {kind} {name}", latent.latent_chunks, 2 * kind + "ifff", 8, 2, **fixed)
    merge |= {"HEADS": shape.heads, "DIM": parts.rank, "DIMS": LATENT_DIMS, "SINKS": False}
    build(f"attend_merge {name}", attention.attend_merge, "ffffif", **merge)
    expand = {"N": 1, "VALUE": parts.value_dim, "ROWS": VALUE_ROWS, **sizes}
    build(f"latent_values {name}", latent.latent_values, "fbb", **expand)
    last: dict[str, Any] = {"N": 1, "OUT": hidden, "BIAS": False, "TOGETHER": 1, **ROW}
    width = shape.heads * parts.value_dim
    build(f"linear_residual {name}", dense.linear_residual, "bbbbb", WIDTH=width, **last)
    build(f"linear_residual shared {name}", dense.linear_residual, "fbbbb", WIDTH=shape.shared_width, **last)
    for switch in (False, True):
        both: dict[str, Any] = {"N": 1, "HIDDEN": hidden, "WIDTH": shape.shared_width, "ROWS": 2, "COLS": 2048}
        build(f"shared_gate_up {switch} {name}", experts.shared_gate_up, "bbbf", 1, SWITCH=switch, **both)
build("replay_routes", route.replay_routes, "isflfi", 1, LAYER=3, LAYERS=48, K=8, K_UP=8, TELL=True)
turn = {"LAYER": 3, "LAYERS": 48}
for rows in (1, 9):
    taken = {"ITEMS": 8 * rows, "ITEMS_UP": 8 if rows == 1 else 128, "ENTRY": 4, "KINDS": 4, "WAIT": True, **turn}
    build(f"take_plan {rows}", route.take_plan, "illll", 1, **taken)
build("await_host", hold.await_host, "iil", 1, ITEMS=72, ITEMS_UP=128, **turn)
guess = {"TABLE_ROWS": 1000, "FIRST": 3, "LAYERS": 48, "STORED": 16, "WIDTH": 8, "WIDTH_UP": 8}
build("replay_predictions", route.replay_predictions, "isl", 1, **guess)
told = {"IDS": 8, "IDS_UP": 8, "COLS": 1024, "FENCE": True}
build("publish", route.publish, "ilbfibf", ELEMENTS=2048, ALONE=False, **told)
build("publish ids", route.publish, "illliii", ELEMENTS=0, ALONE=True, **told)
build("plan_resident", route.plan_resident, "llll", LAYER=3, EXPERTS=128, N_ITEMS=72, ITEMS_UP=128, ENTRY=4)
build("combine", experts.combine, "bffllib", K=8, HIDDEN=2048, COLS=256, HOST=True, **turn)
build("stamp", hold.stamp, "l", 1)
build("hold", hold.hold, "ll", 1)
SIZE = 2880  # gpt-oss: no power of two
for format_, halves in (
    ("bfloat16", 4),
    ("float32", 8),
    ("fp8", 2),
    ("int8", 2),
    ("mxfp4", 1),
    ("fp8_tile", 2),
    ("bf12", 3),
):
    row, packed = (SIZE * halves // 2, halves <= 2) if format_ != "bf12" else (row_bytes("bf12", SIZE), False)
    block = {"ENTRY": 4, "HIDDEN": SIZE, "WIDTH": SIZE, "ALIGN": 16, "FORMAT": format_, "STRIDE": row, "BIAS_BYTES": 4}
    scales = 3 * SIZE * row if packed else -1
    block |= {"SCALE_STRIDE": {"mxfp4": 90, "fp8_tile": 92}.get(format_, 4), "BIAS_STRIDE": 8}
    block |= {"TILE": 128 if format_ == "fp8_tile" else 0}
    both = {
        "GATE": 0,
        "UP": SIZE * row,
        "GATE_SCALES": scales,
        "UP_SCALES": scales,
        "ALPHA": 1.702,
        "LIMIT": 7.0,
        "K": 4,
    }
    warps = 1 if format_ == "mxfp4" else 4
    for activation, bias in (("silu", -1), ("swiglu_oai", 16)):
        build(
            f"gate_up {format_} {activation}", experts.gate_up, "llbf",
            ACTIVATION=activation, GATE_BIAS=bias, UP_BIAS=bias, warps=warps, **both, **block, **ROW,
        )  # fmt: skip
    last = {"DOWN": 2 * SIZE * row, "SCALES": scales, "BIAS": -1}
    build(f"down {format_}", experts.down, "llff", warps=warps, **last, **block, **ROW)
    tiles = {"TOKENS": 64, "ROWS": 64, "COLS": 32 if format_ == "float32" else 64, "PLAIN": False, "stages": 3}
    kind = "f" if format_ == "float32" else "b"
    build(
        f"tiles gate_up {format_}", prompt.gate_up_tiles, "ll" + 2 * kind,
        ACTIVATION="swiglu_oai", GATE_BIAS=16, UP_BIAS=16, **both, **block, **tiles,
    )  # fmt: skip
    build(f"tiles down {format_}", prompt.down_tiles, "ll" + 2 * kind, **last, **block, **tiles)
build("bring", prompt.bring, "ll", WORDS=8000, BLOCK=1024)
build("weigh", prompt.weigh, "bfbb", K=8, HIDDEN=2048, COLS=1024)
print(json.dumps(FOUND))
