"""What the compiler makes of the kernels for an H100 or H200; needs Triton, but no GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from foreload.backend.cuda.kernels import attention, dense, experts, latent, prompt, route

PROGRAM = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from foreload.backend.cuda.kernels import experts
hidden, width = 2048, 768
matrix, row = 2 * hidden * width, 2 * hidden
fixed = dict(ENTRY=4, K=8, HIDDEN=hidden, WIDTH=width, ROWS=4, COLS=1024, ALIGN=int(sys.argv[1]), FORMAT="bfloat16",
    ACTIVATION="silu", ALPHA=1.7, LIMIT=7.0, GATE=0, UP=matrix, STRIDE=row, GATE_SCALES=-1, UP_SCALES=-1,
    SCALE_STRIDE=0, GATE_BIAS=-1, UP_BIAS=-1, BIAS_STRIDE=0, BIAS_BYTES=4, TILE=0, PDL=False)
tensors = dict(plan="*i64", items="*i64", x="*bf16", mid="*fp32")
aligned = {(at,): [["tt.divisibility", 16]] for at in range(len(tensors))}
source = ASTSource(experts.gate_up, {**tensors, **dict.fromkeys(fixed, "constexpr")}, fixed, aligned)
options = {"num_warps": 4, "enable_fp_fusion": True}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""
BY_WEIGHTS = ("gate_up", "down", "norm_linear", "linear_residual", "shared_gate_up", "fold_store", "latent_values")


def loads(alignment: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(alignment)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return re.findall(r"ld\.global\S*", done.stdout)


@pytest.mark.integration
def test_weights_are_read_sixteen_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address from a table says nothing about its alignment: unless told, each weight is a load of its own."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not [load for load in loads(16) if "b16" in load]
    assert [load for load in loads(16) if load == "ld.global.v4.b32"]
    assert [load for load in loads(1) if "b16" in load]


@pytest.mark.slow
def test_every_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter accepts more than the compiler does."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    program = Path(__file__).parent / "hopper.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) > 25
    assert found["publish"]["fence.acq_rel.sys"] == 1
    assert "fence.acq_rel.sys" not in found["publish ids"]
    for name, words in found.items():
        if name.startswith(BY_WEIGHTS) and "mxfp4" in name:  # a thread has one word, its neighbour the next
            assert "ld.global.b32" in words, name
            assert not any(word.endswith("16") for word in words if word.startswith("ld")), name
        elif name.startswith(BY_WEIGHTS):
            assert any(word.startswith("ld.global.v4") for word in words), name
        if name.startswith("latent_chunks"):
            assert any(word.startswith("cp.async.cg") for word in words), name
            assert "mma.sync" in words or " f " in name, name
        if name.startswith("tiles"):
            assert any(word.startswith("cp.async.cg") for word in words), name
            assert "mma_async" in words or "float32" in name, name


@pytest.mark.unit
def test_layers_recordings_and_rows_need_no_kernels_of_their_own() -> None:
    """What differs between them is handed in when a kernel runs: a constant would compile it for each value."""
    kernels = [
        value for module in (attention, dense, experts, latent, prompt, route) for value in vars(module).values()
    ]
    kinds = [item for kernel in kernels if hasattr(kernel, "fn") for item in kernel.fn.__annotations__.items()]
    varying = {"LAYER", "FIRST", "TABLE_ROWS", "N", "N_ITEMS", "IDS", "ELEMENTS", "WORDS"}
    assert {name for name, _ in kinds} >= varying
    assert {kind for name, kind in kinds if name in varying} == {"int"}
