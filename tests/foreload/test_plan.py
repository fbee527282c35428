"""`foreload plan`: byte budgets of published configurations, shortfalls to the byte, and GGUF headers."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from foreload.assets import ASSETS
from foreload.backend.models.inventory import take_inventory
from foreload.cli import main
from foreload.errors import BudgetError, FileError
from foreload.plan import make_plan
from foreload.settings import Settings

GIB = 1 << 30


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *args, "--json"])
    return code, json.loads(capsys.readouterr().out)


PUBLISHED = {
    "qwen3-30b-a3b": (30.5, 3.35, 9_437_184),
    "gpt-oss-20b": (20.9, 4.19, 13_236_480),
    "gpt-oss-120b": (116.8, 5.71, 13_236_480),
    "glm-4.7-flash": (29.9, 3.90, 18_874_368),
    "mixtral-8x7b": (46.7, 12.88, 352_321_536),
    "olmoe-1b-7b": (6.9, 1.28, 12_582_912),
    "deepseek-v2-lite": (15.7, 2.66, 17_301_504),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    """A folder with nothing but the configuration, as people look at before a download."""
    shutil.copy(ASSETS / "shapes" / f"{name}.json", tmp_path / "config.json")
    code, found = run(capsys, str(tmp_path))
    assert code == 0
    assert found["read_from"] == "configuration alone"
    total, active = round(found["total_params"] / 1e9, 1), round(found["active_params"] / 1e9, 2)
    assert (total, active, found["expert_bytes"]) == PUBLISHED[name]
    assert found["stored_format"] == ("mxfp4" if "oss" in name else "bf16")
    assert found["slots_per_layer"] is None


@pytest.mark.unit
def test_all_experts_count_not_the_active_ones() -> None:
    made = make_plan(take_inventory("shape:mixtral-8x7b"), Settings(), 2048, ram_bytes=100 * GIB)
    assert made.experts_bytes == 32 * 8 * 352_321_536


@pytest.mark.unit
@pytest.mark.parametrize("name", PUBLISHED)
def test_one_byte_less_than_needed_does_not_fit(name: str) -> None:
    inventory = take_inventory(f"shape:{name}")
    least = make_plan(inventory, Settings(), 4096).fixed_bytes + inventory.shape.top_k * inventory.slot_bytes
    made = make_plan(inventory, Settings(), 4096, vram_bytes=least)
    assert made.slots_per_layer == 0
    assert sum(made.device_rows().values()) == least
    with pytest.raises(BudgetError) as caught:
        make_plan(inventory, Settings(), 4096, vram_bytes=least - 1)
    assert (caught.value.budget, caught.value.shortfall_bytes) == ("vram", 1)


@pytest.mark.unit
def test_context_prefetching_and_drafts_take_slots() -> None:
    inventory = take_inventory("shape:qwen3-30b-a3b")

    def slots(context: int = 8192, **settings: Any) -> int:
        made = make_plan(inventory, Settings.parse(settings), context, vram_bytes=8 * GIB)
        assert sum(made.device_rows().values()) <= 8 * GIB
        return made.slots_per_layer or 0

    by_context = [slots(context) for context in (8192, 16384, 32768)]
    assert by_context == sorted(by_context, reverse=True)
    assert by_context[0] > by_context[-1]
    deep = {"predictor": "gate", "prefetch_depth": 2, "prefetch_width": 64}
    assert slots(**deep) < slots()
    assert slots(draft={"kind": "ngram", "gamma": 8}) < slots()
    assert slots(prefill_chunk_tokens=64) > slots()


@pytest.mark.unit
def test_the_largest_format_that_fits() -> None:
    inventory = take_inventory("shape:qwen3-30b-a3b")
    sizes = {gib: make_plan(inventory, Settings(), 2048, ram_bytes=gib * GIB).format for gib in (64, 54, 40, 20)}
    assert sizes == {64: "bf16", 54: "bf16", 40: "fp8", 20: "mxfp4"}
    with pytest.raises(BudgetError, match=r"cannot hold the experts, 14\.3 GiB in mxfp4") as caught:
        make_plan(inventory, Settings(), 2048, ram_bytes=10 * GIB)
    assert caught.value.budget == "ram"
    made = make_plan(inventory, Settings(), 2048, ram_bytes=10 * GIB + caught.value.shortfall_bytes)
    assert made.format == "mxfp4"


@pytest.mark.unit
def test_formats_of_the_settings() -> None:
    inventory = take_inventory("shape:olmoe-1b-7b")
    mixed = Settings(expert_format=("bf16", *("mxfp4",) * 15))
    made = make_plan(inventory, mixed, 2048)
    assert made.format == "bf16 + mxfp4"
    assert made.slot_bytes == inventory.formats["bf16"]
    assert made.experts_bytes == 64 * (inventory.formats["bf16"] + 15 * inventory.formats["mxfp4"])
    assert make_plan(inventory, Settings(expert_format="int8"), 2048).experts_bytes == 1024 * inventory.formats["int8"]
    with pytest.raises(BudgetError, match=r"in bf16 \+ mxfp4: 1 B \(1 bytes\) short"):
        make_plan(inventory, mixed, 2048, ram_bytes=made.experts_bytes - 1)


@pytest.mark.unit
def test_more_memory_is_never_slower() -> None:
    inventory = take_inventory("shape:glm-4.7-flash")
    found = [make_plan(inventory, Settings(), 2048, vram_bytes=n * GIB).tokens_per_s for n in (8, 16, 32, 64, 128)]
    speeds = [speed for speed in found if speed is not None]
    assert len(speeds) == 5
    assert speeds == sorted(speeds)
    assert all(slow < fast for slow, fast in speeds)


@pytest.mark.unit
def test_shortfall_exits_3_and_still_shows_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "shape:gpt-oss-120b", "--vram", "1GiB"]) == 3
    shown = capsys.readouterr()
    assert "keys and values" in shown.out
    assert "bytes) short" in shown.err
    code, found = run(capsys, "shape:gpt-oss-120b", "--vram", "1GiB")
    assert code == 3
    assert found["budget"] == "vram"
    assert found["shortfall_bytes"] > 0


@pytest.mark.unit
def test_an_index_without_a_needed_tensor(tmp_path: Path) -> None:
    shutil.copy(ASSETS / "shapes" / "olmoe-1b-7b.json", tmp_path / "config.json")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps(
            {"weight_map": {"model.layers.0.mlp.experts.0.gate_proj.weight": "model-00001-of-00001.safetensors"}}
        )
    )
    with pytest.raises(FileError, match=r"tensor 'model.embed_tokens.weight' is missing"):
        take_inventory(str(tmp_path))


@pytest.mark.unit
def test_mini_by_its_own_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(capsys, "mini", "--vram", "64MiB")
    assert code == 0
    assert found["read_from"] == "configuration and the index of 1 weight file"
    assert found["slots_per_layer"] == 32


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(fields: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int]]) -> bytes:
    """A GGUF header as the format's description has it: little-endian, strings with their length before them."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for name, value in fields.items():
        out += text(name)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            out += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        elif isinstance(value, float):
            out += struct.pack("<If", 6, value)
        else:
            out += struct.pack("<II", 4, value)
    for name, (sizes, kind) in tensors.items():
        out += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, 0)
    return out + b"\0" * 64


FIELDS: dict[str, Any] = {
    "general.architecture": "qwen3moe",
    "qwen3moe.block_count": 2,
    "qwen3moe.context_length": 4096,
    "qwen3moe.embedding_length": 512,
    "qwen3moe.attention.head_count": 8,
    "qwen3moe.attention.head_count_kv": 2,
    "qwen3moe.attention.key_length": 128,
    "qwen3moe.rope.freq_base": 1e6,
    "qwen3moe.expert_count": 16,
    "qwen3moe.expert_used_count": 4,
    "qwen3moe.expert_feed_forward_length": 256,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}
Q4_K, Q6_K, F32 = 12, 14, 0
TENSORS: dict[str, tuple[tuple[int, ...], int]] = {
    "token_embd.weight": ((512, 1000), Q6_K),
    **{f"blk.{n}.ffn_{name}_exps.weight": ((512, 256, 16), Q4_K) for n in range(2) for name in ("gate", "up")},
    "blk.0.ffn_down_exps.weight": ((256, 512, 16), Q4_K),
    "blk.1.ffn_down_exps.weight": ((256, 512, 16), Q6_K),
    **{f"blk.{n}.ffn_gate_inp.weight": ((512, 16), F32) for n in range(2)},
    "blk.1.ffn_up_shexp.weight": ((512, 256), Q6_K),
}


def write_gguf(path: Path, fields: dict[str, Any] | None = None, tensors: Any = None) -> str:
    path.write_bytes(gguf(FIELDS if fields is None else fields, TENSORS if tensors is None else tensors))
    return str(path)


@pytest.mark.unit
def test_gguf_header(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = run(capsys, write_gguf(tmp_path / "model.gguf"), "--context", "1000", "--vram", "64MiB")
    assert code == 0
    matrix, q4, q6 = 512 * 256, 144 / 256, 210 / 256
    assert found["stored_format"] == "Q4_K + Q6_K"
    assert found["experts_bytes"] == int(16 * matrix * (5 * q4 + q6))
    assert found["expert_bytes"] == int(matrix * (2 * q4 + q6))
    assert found["total_params"] == 512_000 + 6 * 16 * matrix + 2 * 512 * 16 + matrix
    assert found["total_params"] - found["active_params"] == 6 * 12 * matrix
    assert found["device_bytes"]["embeddings"] == int(512_000 * q6)
    assert found["device_bytes"]["shared experts"] == int(matrix * q6)
    assert found["device_bytes"]["keys and values"] == 2 * 2 * 2 * 128 * 2 * 1000
    assert found["slots_per_layer"] == 16


@pytest.mark.unit
def test_split_gguf(tmp_path: Path) -> None:
    whole = take_inventory(write_gguf(tmp_path / "model.gguf"))
    names = list(TENSORS)
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", None, {n: TENSORS[n] for n in names[:4]})
    with pytest.raises(FileError, match=r"m-00002-of-00002.gguf: file 2 of 2 is missing"):
        take_inventory(first)
    write_gguf(tmp_path / "m-00002-of-00002.gguf", {}, {n: TENSORS[n] for n in names[4:]})
    split = take_inventory(first)
    assert split.read_from == "header of 2 GGUF files"
    assert (split.total_weights, split.experts_bytes) == (whole.total_weights, whole.experts_bytes)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fields", "tensors", "said"),
    [
        ({}, {"blk.0.ffn_up.weight": ((512, 256), F32)}, "this is no Mixture-of-Experts model"),
        ({"qwen3moe.expert_count": 8}, {}, "do not fit 2 layers of 8 experts"),
        ({"qwen3moe.block_count": 1}, {}, "do not fit 1 layers of 16 experts"),
        ({"qwen3moe.expert_used_count": 17}, {}, "17 experts per token of 16"),
        ({"qwen3moe.embedding_length": "wide"}, {}, "field 'qwen3moe.embedding_length' is 'wide'"),
        ({}, {"blk.0.ffn_gate_exps.weight": ((512, 256, 16), 99)}, "has type 99: known are F32, F16"),
        ({}, {"blk.0.ffn_gate_exps.weight": ((100, 256, 16), Q4_K)}, "Q4_K needs rows in multiples of 256"),
    ],
)
def test_odd_gguf(tmp_path: Path, fields: dict[str, Any], tensors: dict[str, Any], said: str) -> None:
    kept = {} if "no Mixture" in said else TENSORS
    with pytest.raises(FileError, match=said):
        take_inventory(write_gguf(tmp_path / "odd.gguf", {**FIELDS, **fields}, {**kept, **tensors}))


@pytest.mark.unit
def test_truncated_gguf(tmp_path: Path) -> None:
    whole = gguf(FIELDS, TENSORS)[:-64]
    path = tmp_path / "cut.gguf"
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(FileError, match=r"cut.gguf: (the header ends early|not a GGUF)"):
            take_inventory(str(path))


@pytest.mark.unit
def test_rates_of_a_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path, make_profile: Any) -> None:
    shape = take_inventory("mini").shape
    path = tmp_path / "profile.json"
    make_profile(shape=asdict(shape), shape_hash=shape.hash, expert_bytes=shape.expert_bytes("float32")).save(path)
    _, measured = run(capsys, "mini", "--vram", "32MiB", "--profile", str(path))
    _, assumed = run(capsys, "mini", "--vram", "32MiB")
    assert measured["rates_source"] == "measured on AMD EPYC 9B14, emulated link 2000 MB/s"
    assert measured["tokens_per_s"] != assumed["tokens_per_s"]
    assert measured["slots_per_layer"] == assumed["slots_per_layer"]
    code, refused = run(capsys, "shape:olmoe-1b-7b", "--vram", "12GiB", "--profile", str(path))
    assert code == 2
    assert "shape" in refused["error"]
