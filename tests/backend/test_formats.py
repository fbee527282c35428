"""Expert formats: packing against plain numpy and transformers, blocks, conversion on load, engines in each format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreload.backend.engine import Engine
from foreload.backend.experts import conversions
from foreload.backend.experts.blocks import BlockCodec
from foreload.backend.experts.packing import pack_rows, unpack_rows
from foreload.backend.experts.slab import HostSlab
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.family import ExpertPart
from foreload.backend.models.source import Found
from foreload.budget import slot_budget
from foreload.errors import SettingsError
from foreload.formats import FORMATS, PackedFormat, block_layout, layer_bytes, layer_formats, slot_bytes
from foreload.settings import Settings
from foreload.shape import ModelShape

MakeEngine = Callable[..., Engine]
PACKED: tuple[PackedFormat, ...] = ("bf12", "int8", "fp8", "mxfp4")
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

matrices = st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(0, 999), st.integers(-12, 12))


def matrix(drawn: tuple[int, int, int, int]) -> torch.Tensor:
    """Weights of mixed magnitudes, some rows of zeros."""
    rows, columns, seed, exponent = drawn
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, columns, generator=generator) * 2.0**exponent
    return weights * (torch.rand(rows, 1, generator=generator) > 0.1) * torch.randn(rows, 1, generator=generator).exp()


@pytest.mark.unit
@settings(max_examples=60, deadline=None)
@given(matrices)
def test_int8_is_plain_rounding(drawn: tuple[int, int, int, int]) -> None:
    weights = matrix(drawn)
    packed, scales = pack_rows(weights, "int8")
    w = weights.numpy()
    scale = np.abs(w).max(1) / np.float32(127)
    expected = np.rint(w / np.where(scale > 0, scale, 1)[:, None]).astype(np.int8)
    assert scales is not None
    np.testing.assert_array_equal(scales.numpy(), scale)
    np.testing.assert_array_equal(packed.numpy(), expected)
    error = np.abs(unpack_rows(packed, scales, "int8", w.shape[1]).numpy() - w)
    assert (error <= 0.5001 * scale[:, None]).all()


@pytest.mark.unit
@settings(max_examples=60, deadline=None)
@given(matrices)
def test_fp8_is_off_by_half_a_step(drawn: tuple[int, int, int, int]) -> None:
    weights = matrix(drawn)
    packed, scales = pack_rows(weights, "fp8")
    found, w = unpack_rows(packed, scales, "fp8", weights.shape[1]).numpy(), weights.numpy()
    assert scales is not None
    scale = scales.numpy()[:, None]
    # three bits of mantissa; below 2**-6 of a scale the step is 2**-9 of it
    assert (np.abs(found - w) <= np.maximum(np.abs(w) / 16, scale * 2.0**-10) * 1.0001).all()
    assert np.isfinite(found).all()


def nearest_block(values: np.ndarray, exponent: int) -> tuple[np.ndarray, float]:
    """A block of 32 in e2m1 under 2**exponent by brute force, ties to the even code, and its squared error."""
    scaled = values / 2.0**exponent
    distance = np.abs(np.abs(scaled)[:, None] - E2M1)
    best = distance.min(1, keepdims=True)
    code = [min(np.flatnonzero(d == b), key=lambda c: c % 2) for d, b in zip(distance, best, strict=True)]
    found = np.sign(scaled) * E2M1[code] * 2.0**exponent
    return found, float(((found - values) ** 2).sum())


@pytest.mark.unit
@settings(max_examples=40, deadline=None)
@given(matrices)
def test_mxfp4_is_the_nearest_under_the_better_of_two_powers(drawn: tuple[int, int, int, int]) -> None:
    weights = matrix(drawn)
    packed, scales = pack_rows(weights, "mxfp4")
    found = unpack_rows(packed, scales, "mxfp4", weights.shape[1]).double().numpy()
    padded = np.pad(weights.double().numpy(), ((0, 0), (0, -weights.shape[1] % 32)))
    for row, values in enumerate(padded):
        for at in range(0, len(values), 32):
            block, got = values[at : at + 32], found[row, at : at + 32]
            most = np.abs(block).max()
            low = int(np.floor(np.log2(most))) - 2 if most > 0 else -127
            choices = [nearest_block(block, low), nearest_block(block, low + 1)]
            least = min(error for _, error in choices)
            error = float(((got - block[: len(got)]) ** 2).sum())
            assert error <= least * (1 + 1e-5) + 1e-30


@pytest.mark.unit
def test_mxfp4_equals_transformers_and_comes_back_exactly() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 6, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, 6, 4), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(
        1, 2
    )  # [experts, rows, columns]
    for expert in range(2):
        ours = unpack_rows(blocks[expert].view(6, 64), scales[expert], "mxfp4", 128)
        assert torch.equal(ours, expected[expert])
        assert torch.equal(unpack_rows(*pack_rows(ours, "mxfp4"), "mxfp4", 128), ours)


@pytest.mark.unit
@settings(max_examples=60, deadline=None)
@given(matrices, st.sampled_from([1.0, 2.0**-30, 2.0**30, 2.0**-128, 0.0]))
def test_bf12_loses_nothing(drawn: tuple[int, int, int, int], other: float) -> None:
    """Also of rows with a few weights that are much smaller or larger; subnormal numbers, zeros of either sign."""
    weights = matrix(drawn).bfloat16()
    weights[:, ::7] *= other
    packed, scales = pack_rows(weights, "bf12")
    assert scales is None
    assert packed.shape == (len(weights), 48 * (-(-weights.shape[1] // 32) + 1))
    found = unpack_rows(packed, None, "bf12", weights.shape[1])
    assert torch.equal(found.view(torch.int16), weights.view(torch.int16))
    assert torch.equal(pack_rows(weights.float(), "bf12")[0], packed)


@pytest.mark.unit
def test_bf12_refuses_rows_that_are_too_mixed() -> None:
    weights = torch.ones(2, 64)
    weights[1, :12] = 2.0**-30
    with pytest.raises(
        SettingsError, match="a row has 12 weights outside of 15 neighbouring exponents, 11 are possible"
    ):
        pack_rows(weights, "bf12")
    weights[1, 0] = 1
    assert torch.equal(unpack_rows(pack_rows(weights, "bf12")[0], None, "bf12", 64).float(), weights)
    weights[1] = 2.0**-30
    weights[1, :11] = 1  # now these are the few
    assert torch.equal(unpack_rows(pack_rows(weights, "bf12")[0], None, "bf12", 64).float(), weights)


@pytest.mark.unit
def test_a_poisoned_block_reads_as_nan(shape: ModelShape) -> None:
    for format in FORMATS:
        layout = block_layout(format, shape)
        views = BlockCodec(layout, shape, torch.float32).views(torch.full((layout.bytes,), 0xFF, dtype=torch.uint8))
        assert torch.isnan(views.gate_up).all()
        assert torch.isnan(views.down).all()


@pytest.mark.unit
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_parts_of_a_block_do_not_overlap(shape: ModelShape, format: PackedFormat, bias: bool) -> None:
    odd = replace(shape, hidden=40, expert_width=24, expert_bias=bias, expert_tile=16)
    codec = BlockCodec(block_layout(format, odd), odd, torch.float32)
    block = torch.zeros(codec.layout.bytes, dtype=torch.uint8)
    parts = {"gate": torch.randn(24, 40), "up": torch.randn(24, 40), "down": torch.randn(40, 24)}
    biases = {"gate_up_bias": torch.randn(48), "down_bias": torch.randn(40)} if bias else {}
    for name, part in {**parts, **biases}.items():
        codec.write(block, name, part)  # type: ignore[arg-type]
    views = codec.views(block)
    got = {"gate": views.gate_up[:24], "up": views.gate_up[24:], "down": views.down}
    for name, part in parts.items():
        packed = pack_rows(part, format, tile=16)
        assert torch.equal(got[name], unpack_rows(*packed, format, part.shape[1], tile=16).float())
    kind = torch.bfloat16 if format == "bf16" else torch.float32
    for name, part in biases.items():
        assert torch.equal(getattr(views, name), part.to(kind).float())
    assert codec.layout.bytes % 64 == 0 or format in ("fp32", "bf16")


@pytest.mark.unit
def test_bytes_and_budget_follow_the_format(shape: ModelShape) -> None:
    real = replace(shape, hidden=2048, expert_width=768, expert_tile=128)
    sizes = {format: block_layout(format, real).bytes for format in FORMATS}
    weights = 3 * 2048 * 768
    rows = 2 * 768 + 2048
    assert sizes == {
        "fp32": 4 * weights,
        "bf16": 2 * weights,
        "int8": weights + 4 * rows,
        "fp8": weights + 4 * rows,
        "mxfp4": weights // 2 + weights // 32,
        "fp8_tile": weights + 4 * weights // 128,
        "bf12": weights + weights // 2 + 48 * rows,
    }
    mixed = layer_formats(("bf16", "mxfp4", "fp8"), real, "bfloat16")
    assert layer_bytes(mixed, real) == (sizes["bf16"], sizes["mxfp4"], sizes["fp8"])
    assert slot_bytes(mixed, real) == sizes["bf16"]
    assert layer_formats(None, replace(real, stored_experts="mxfp4"), "bfloat16") == ("mxfp4",) * 3
    plain, packed = (slot_budget(real, "bfloat16", 4 << 30, 512, Settings(expert_format=f)) for f in ("bf16", "mxfp4"))
    assert (
        packed == plain * sizes["bf16"] // sizes["mxfp4"] or abs(packed / plain - sizes["bf16"] / sizes["mxfp4"]) < 0.02
    )
    with pytest.raises(SettingsError, match="expert_format has 2 entries: the model has 3 MoE layers"):
        layer_formats(("bf16", "fp8"), real, "bfloat16")


FORMAT_CHOICES: dict[str, Settings] = {
    **{name: Settings(cache_ratio=0.25, expert_format=name) for name in ("bf16", *PACKED)},  # type: ignore[arg-type]
    "mixed": Settings(cache_ratio=0.25, expert_format=("mxfp4", "bf16", "int8")),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", FORMAT_CHOICES)
def test_where_an_expert_is_changes_no_bit_in_any_format(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Fetched with poisoned slots and random delays, or resident from the start: the same logits."""
    chosen, prompt = FORMAT_CHOICES[name], [3, 1, 4, 1, 5]
    runs = []
    for engine in (make_engine(chosen.changed(cache_ratio=1.0)), make_engine(chosen, debug_seed=1)):
        found: list[torch.Tensor] = []
        decode = engine.forward.decode
        monkeypatch.setattr(engine.forward, "decode", lambda *a, d=decode, f=found: (f.append(d(*a).clone()), f[-1])[1])
        engine.generate(prompt, 12, stop=False)
        runs.append(torch.cat(found))
        assert engine.slab_bytes == sum(8 * size for size in engine.layer_bytes)
        engine.brain.check_integrity()
    assert torch.equal(*runs)


@pytest.mark.integration
@pytest.mark.parametrize("name", FORMAT_CHOICES)
def test_cpu_experts_unpack_alike(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The native library and torch give the logits of resident experts within what their rounding allows."""
    chosen, runs = FORMAT_CHOICES[name], []
    for isa, action in (("torch", "fetch"), ("torch", "cpu"), ("scalar", "cpu"), ("", "cpu")):
        monkeypatch.setenv("FORELOAD_CPU_ISA", isa)
        engine = make_engine(chosen.changed(miss_action=action, cache_ratio=0.0))
        with torch.inference_mode():
            engine.forward.prefill([3, 1, 4, 1, 5], 0, True)
            runs.append(torch.cat([engine.forward.decode([token], 5 + n).clone() for n, token in enumerate([2, 7, 1])]))
    for run in runs[1:]:
        assert (run - runs[0]).abs().max() < 2e-3 * runs[0].abs().max()


@pytest.mark.integration
def test_bf12_gives_the_logits_of_bf16(make_engine: MakeEngine) -> None:
    runs = []
    for format in ("bf16", "bf12"):
        engine = make_engine(Settings(cache_ratio=0.25, expert_format=format))
        with torch.inference_mode():
            engine.forward.prefill([3, 1, 4, 1, 5], 0, True)
            runs.append(torch.cat([engine.forward.decode([token], 5 + n).clone() for n, token in enumerate([2, 7, 1])]))
    assert torch.equal(*runs)


@pytest.mark.integration
def test_what_a_format_cannot_hold_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Checkpoint.read_stored

    def mixed(checkpoint: Checkpoint, device: torch.device) -> Iterator[tuple[int, int, ExpertPart, Found]]:
        for at, expert, part, tensor in read(checkpoint, device):
            if (at, expert, part) == (1, 5, "up"):
                assert isinstance(tensor, torch.Tensor)
                tensor = tensor.float()
                tensor[2, ::2] = 2.0**-60
            yield at, expert, part, tensor

    monkeypatch.setattr(Checkpoint, "read_stored", mixed)
    with pytest.raises(SettingsError, match=r"MoE layer 1, expert 5, up: expert_format bf12: a row has \d+ weights"):
        HostSlab(Checkpoint.open(str(tiny)), torch.float32, False, formats=("bf12",) * 3)


@pytest.mark.integration
def test_another_format_needs_a_reload(make_engine: MakeEngine) -> None:
    engine = make_engine(Settings(cache_ratio=0.5, expert_format="int8"))
    engine.apply(Settings(cache_ratio=0.25, expert_format=("int8",) * 3))
    with pytest.raises(SettingsError, match="expert_format 'fp8' needs reload: the experts are loaded as int8"):
        engine.apply(Settings(cache_ratio=0.25, expert_format="fp8"))
    assert engine.settings.cache_ratio == 0.25


@pytest.mark.integration
def test_a_conversion_is_kept_and_taken_up(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(conversions, "SMALLEST_BYTES", 0)
    checkpoint, calls = Checkpoint.open(str(tiny)), []

    def load(*formats: PackedFormat) -> torch.Tensor:
        calls.clear()
        return HostSlab(checkpoint, torch.float32, False, lambda *a: calls.append(a), formats).blocks

    first = load("mxfp4", "int8", "fp32")
    assert calls
    [kept] = (tmp_path / "foreload" / "experts").iterdir()
    assert torch.equal(load("mxfp4", "int8", "fp32"), first)
    assert not calls
    load("mxfp4", "int8", "int8")
    assert calls
    for damage in (
        lambda b: b[:-1],
        lambda b: b[:200] + bytes([b[200] ^ 1]) + b[201:],
        lambda _: b"",
        lambda _: b"[]\n",
    ):
        kept.write_bytes(damage(kept.read_bytes()))
        assert torch.equal(load("mxfp4", "int8", "fp32"), first)
        assert calls
    load("fp32", "fp32", "fp32")
    assert len(list(kept.parent.iterdir())) == 2
