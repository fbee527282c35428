"""The native kernels: every instruction set and format against float64, threads and company that change no bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreload.backend.experts.blocks import BlockCodec, run_expert
from foreload.backend.native import Isa, NativePool, Plan, c_layout, load
from foreload.backend.native.library import CWork
from foreload.formats import FORMATS, PackedFormat, block_layout
from foreload.shape import Activation, ModelShape

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "backend" / "native" / "src"
ISAS = load().supported()
EXPERTS, TOKENS = 3, 9
COUNTS = (1, 9, 5)
TOLERANCE = {"same": 2e-6, "bf16": 8e-3, "vnni": 2e-4}
"""Of the largest output. bf16: what is between the matrices is rounded to eight bits; vnni: inputs to sixteen."""

pytestmark = pytest.mark.skipif(not ISAS, reason="the native library is not there: no C compiler")


def shape_of(shape: ModelShape, hidden: int, width: int, activation: Activation, bias: bool) -> ModelShape:
    clamp = {"swiglu_alpha": 1.702, "swiglu_limit": 2.0} if activation == "swiglu_oai" else {}
    return replace(
        shape,
        hidden=hidden,
        expert_width=width,
        experts=EXPERTS,
        activation=activation,
        expert_bias=bias,
        expert_tile=48,
        **clamp,
    )


class Case:
    """Random experts in one format, random tokens, and what float64 makes of them."""

    def __init__(self, shape: ModelShape, format: PackedFormat, bf16: bool, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        self.shape, self.bf16 = shape, bf16
        hidden, width = shape.hidden, shape.expert_width
        self.layout = block_layout(format, shape)
        codec = BlockCodec(self.layout, shape, torch.float64)
        self.blocks = torch.zeros(EXPERTS, self.layout.bytes, dtype=torch.uint8)
        for block in self.blocks:
            codec.write(block, "gate_up", randn(2 * width, hidden) / hidden**0.5)
            codec.write(block, "down", randn(hidden, width) / width**0.5)
            if shape.expert_bias:
                codec.write(block, "gate_up_bias", randn(2 * width))
                codec.write(block, "down_bias", randn(hidden))
        self.x = randn(TOKENS, hidden).to(torch.bfloat16 if bf16 else torch.float32)
        self.rows = np.concatenate([generator_rows(count) for count in COUNTS]).astype(np.int32)
        self.first = np.cumsum([0, *COUNTS]).astype(np.int32)
        self.expect()

    def expect(self) -> None:
        """What the blocks mean."""
        codec = BlockCodec(self.layout, self.shape, torch.float64)
        views = [codec.views(block) for block in self.blocks]
        of = [self.x[self.rows[a:b]].double() for a, b in zip(self.first, self.first[1:], strict=False)]
        self.expected = torch.cat([run_expert(x, *v) for x, v in zip(of, views, strict=True)])

    def run(self, isa: Isa, threads: int, pairs: slice = slice(None), out_bf16: bool = False) -> torch.Tensor:
        """The outputs of all pairs together, or of some, each alone."""
        dtype = torch.bfloat16 if out_bf16 else torch.float32
        out = torch.full((len(self.rows), self.shape.hidden), float("nan"), dtype=dtype)
        pool, layout = NativePool(load(), threads, isa, 64), c_layout(self.layout, self.shape, self.bf16)
        addresses = np.array([block.data_ptr() for block in self.blocks], np.int64)
        places = np.arange(len(self.rows), dtype=np.int32)
        plans = [Plan(addresses, self.first, self.rows, places)]
        if pairs != slice(None):
            owner = np.repeat(np.arange(EXPERTS), COUNTS)
            zero_one = np.array([0, 1], np.int32)
            plans = [
                Plan(addresses[owner[p]][None], zero_one, self.rows[[p]], places[[p]]) for p in places[pairs].tolist()
            ]
        for plan in plans:
            ticket = pool.submit(layout, plan, (self.x.data_ptr(), TOKENS, self.bf16), (out.data_ptr(), out_bf16))
            pool.wait(ticket)
            assert pool.done(ticket)
        pool.close()
        return out

    def sums(self, isa: Isa, threads: int, weights: np.ndarray, tag: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Words [TOKENS, hidden] of weighted sums, 7 where nothing was written, and the word that foretells them."""
        out, soon = torch.full((TOKENS, self.shape.hidden), 7), torch.zeros(1, dtype=torch.int32)
        pool, layout = NativePool(load(), threads, isa, 64), c_layout(self.layout, self.shape, self.bf16)
        addresses = np.array([block.data_ptr() for block in self.blocks], np.int64)
        work = CWork(
            EXPERTS, TOKENS, self.bf16, 0, tag, addresses.ctypes.data, self.first.ctypes.data, self.rows.ctypes.data,
            None, weights.ctypes.data, soon.data_ptr(), self.x.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        handle = load().handle
        assert handle is not None
        ticket = handle.fl_submit(pool.handle, ctypes.byref(layout), ctypes.byref(work))
        pool.wait(ticket)
        work.soon = None  # nobody would be told
        assert handle.fl_submit(pool.handle, ctypes.byref(layout), ctypes.byref(work)) == -1
        pool.close()
        return out, soon

    def off(self, found: torch.Tensor) -> float:
        return float((found - self.expected).abs().max() / self.expected.abs().max())


def generator_rows(count: int) -> np.ndarray:
    return np.arange(count) * 4 % TOKENS


def tolerance(isa: Isa, format: PackedFormat, bf16: bool) -> float:
    if format == "mxfp4" and bf16 and isa in (Isa.AVX512_BF16, Isa.AVX512_ALL):
        return TOLERANCE["bf16"]
    if format == "int8" and isa in (Isa.AVX512_VNNI, Isa.AVX512_ALL):
        return TOLERANCE["vnni"]
    return TOLERANCE["same"]


@pytest.mark.unit
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name.lower())
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden", "width"), [(160, 48), (20, 12), (576, 320)])
def test_kernels_equal_float64(shape: ModelShape, isa: Isa, format: PackedFormat, hidden: int, width: int) -> None:
    for activation in get_args(Activation):
        for bf16 in (False, True):
            case = Case(shape_of(shape, hidden, width, activation, activation != "silu"), format, bf16)
            assert case.off(case.run(isa, 1)) < tolerance(isa, format, bf16)


@pytest.mark.unit
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name.lower())
@pytest.mark.parametrize("format", FORMATS)
def test_threads_and_company_change_no_bit(shape: ModelShape, isa: Isa, format: PackedFormat) -> None:
    case = Case(shape_of(shape, 160, 72, "silu", False), format, True)
    together = case.run(isa, 1)
    assert torch.equal(together, case.run(isa, 4))
    assert torch.equal(together, case.run(isa, 2, slice(0, None)))
    assert torch.equal(together.bfloat16(), case.run(isa, 3, out_bf16=True))


@pytest.mark.unit
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("threads", [1, 3, 7])
def test_what_is_read_ahead_changes_no_bit(shape: ModelShape, format: PackedFormat, threads: int) -> None:
    """Whichever expert it is, also one that the work does not have."""
    case = Case(shape_of(shape, 160, 72, "silu", False), format, True)
    expected, layout = case.run(ISAS[-1], 1), c_layout(case.layout, case.shape, True)
    addresses = np.array([block.data_ptr() for block in case.blocks], np.int64)
    elsewhere = case.blocks[1].clone()
    pool = NativePool(load(), threads, ISAS[-1], 64)
    for block in (*addresses.tolist(), elsewhere.data_ptr(), 0):
        pool.read_ahead(layout, block)
        time.sleep(0.002)  # workers read
        out = torch.full((len(case.rows), case.shape.hidden), float("nan"))
        plan = Plan(addresses, case.first, case.rows, np.arange(len(case.rows), dtype=np.int32))
        pool.wait(pool.submit(layout, plan, (case.x.data_ptr(), TOKENS, True), (out.data_ptr(), False)))
        assert torch.equal(out, expected)
    pool.close()


@pytest.mark.unit
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name.lower())
@pytest.mark.parametrize("hidden", [160, 44])
def test_sums_carry_their_turn(shape: ModelShape, isa: Isa, hidden: int) -> None:
    """In the order of the pairs, the same bits on any number of threads; rows of other tokens stay as they were."""
    case, tag = Case(shape_of(shape, hidden, 72, "silu", False), "bf16", True), 2**31 - 9
    case.rows[case.rows == TOKENS - 1] = 0
    weights = np.random.default_rng(3).random(len(case.rows), np.float32)
    words, soon = case.sums(isa, 1, weights, tag)
    assert torch.equal(words, case.sums(isa, 4, weights, tag)[0])
    assert soon.item() == tag
    assert (words[TOKENS - 1] == 7).all()
    assert (words[:-1] >> 32 == tag).all()
    found, expected = (words[:-1] & 0xFFFFFFFF).int().view(torch.float32), torch.zeros(TOKENS - 1, hidden)
    for pair, output in enumerate(case.run(isa, 1)):
        expected[case.rows[pair]] += float(weights[pair]) * output
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.unit
@settings(max_examples=25, deadline=None)
@given(
    hidden=st.integers(1, 140), width=st.integers(1, 140), format=st.sampled_from(FORMATS),
    isa=st.sampled_from(ISAS or [Isa.SCALAR]), seed=st.integers(0, 99), bf16=st.booleans(),
)  # fmt: skip
def test_any_size(hidden: int, width: int, format: PackedFormat, isa: Isa, seed: int, bf16: bool) -> None:
    base = ModelShape(
        "qwen3_moe", 1, (0,), 8, 1, 1, 8, 8, EXPERTS, 2, 8, "softmax_topk", True, 1e4, 1e-6, 64, True
    )  # fmt: skip
    case = Case(shape_of(base, hidden, width, "silu", False), format, bf16, seed)
    found = case.run(isa, 2)
    assert case.off(found) < 2 * tolerance(isa, format, bf16)
    assert torch.equal(found, case.run(isa, 1, slice(0, None)))


@pytest.mark.integration
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_library_is_clean_under_a_sanitizer(tmp_path: Path, sanitizer: str) -> None:
    compiler = shutil.which("cc")
    assert compiler is not None
    flags = ["-std=gnu11", "-g", "-O1", "-Wno-psabi", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    program, sources = tmp_path / "harness", [HERE / "native_harness.c", *sorted(SOURCES.glob("*.c"))]
    subprocess.run([compiler, *flags, f"-I{SOURCES}", "-o", program, *sources, "-lpthread", "-lm"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "all the same bits" in done.stdout
