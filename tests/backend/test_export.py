"""Exports, each read by a parser of the documented syntax that shares no code with ours."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from export_parsers import (
    expert_names,
    freetoken_arguments,
    hits,
    kt_arguments,
    llama_arguments,
    other_names,
    override_rules,
    split_layers,
    vllm_arguments,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from foreload.backend.export import ENGINES, Target, check_help, explain, export
from foreload.backend.export.patterns import alternation, read_rules
from foreload.backend.export.sglang_kt import ratio
from foreload.backend.export.vllm import Grouping, grouping
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import BudgetError, FileError, UsageError
from foreload.presets import preset_settings
from foreload.settings import Settings
from foreload.shape import ModelShape

GB = 10**9


@pytest.fixture(scope="module")
def qwen() -> ModelShape:
    return Checkpoint.open("shape:qwen3-30b-a3b").shape


@pytest.fixture(scope="module")
def late(qwen: ModelShape) -> ModelShape:
    """As DeepSeek-V3 begins: three dense layers, a shared expert, a correction bias."""
    return replace(
        qwen, layers=12, moe_layers=tuple(range(3, 12)), dense_width=6144, shared_width=768, correction_bias=True
    )


def target(shape: ModelShape, fields: dict[str, Any], **more: Any) -> Target:
    return Target(shape=shape, settings=Settings.parse(fields), weights="model", **more)


def layered(shape: ModelShape, resident: set[int], other: int = 0) -> dict[str, Any]:
    """Settings with all experts of some decoder layers and `other` slots in the rest."""
    return {"slots_per_layer": [shape.experts if layer in resident else other for layer in shape.moe_layers]}


def check_rules(command: tuple[str, ...], shape: ModelShape, on_cpu: set[int]) -> None:
    """One -ot whose CPU rule hits every spelling of these layers' experts once, and no other tensor at all."""
    rules = override_rules(command)
    for layer in shape.moe_layers:
        for name in expert_names(layer):
            assert hits(rules, name) == (["CPU"] if layer in on_cpu else [])
    for name in other_names(range(shape.layers)):
        assert hits(rules, name) == []


@pytest.mark.unit
@pytest.mark.parametrize("engine", ["llama.cpp", "ik_llama"])
def test_layers_on_the_cpu(engine: str, qwen: ModelShape) -> None:
    kept = set(range(20)) | {45}
    made = export(engine, target(qwen, layered(qwen, kept)))
    check_rules(made.command, qwen, set(range(48)) - kept)
    read = llama_arguments(made.command)
    assert (read.c, read.ngl, read.ncmoe) == (8192, "all" if engine == "llama.cpp" else "999", None)
    assert read.fit == ("off" if engine == "llama.cpp" else None)
    assert "2026" in made.checked


@pytest.mark.unit
@pytest.mark.parametrize("engine", ["llama.cpp", "ik_llama"])
def test_leading_dense_layers_keep_their_numbers(engine: str, late: ModelShape) -> None:
    made = export(engine, target(late, layered(late, {3, 4, 11})))
    check_rules(made.command, late, {5, 6, 7, 8, 9, 10})


@pytest.mark.unit
def test_slots_of_other_layers_become_a_cache(qwen: ModelShape) -> None:
    made = export("llama.cpp", target(qwen, layered(qwen, {0, 1}, other=16), bits=4.5))
    check_rules(made.command, qwen, set(range(2, 48)))
    expert = 3 * 2048 * 768 * 4.5 / 8
    assert llama_arguments(made.command).moe_cache_mib == int(46 * 16 * expert // 2**20)


@pytest.mark.unit
@pytest.mark.parametrize("engine", ["llama.cpp", "ik_llama"])
def test_fixed_placement_is_what_the_engine_does(engine: str, qwen: ModelShape) -> None:
    """Nothing is admitted or evicted where layers are whole: only a first use differs, and is said."""

    def notes(fields: dict[str, Any]) -> str:
        return " ".join(export(engine, target(qwen, {"miss_action": "cpu", **fields})).notes)

    whole = layered(qwen, set(range(20, 48)))
    as_preset = preset_settings("llama_cpp", qwen, 4, slots=3000)
    assert "counterpart" not in notes(as_preset.model_dump(exclude_defaults=True))
    assert "from the start" not in notes({**whole, "admission": "none"})
    changing = notes({**whole, "eviction": "lfu", "admission": "background"})
    assert "there from the start" in changing
    assert "counterpart" not in changing
    for part in (layered(qwen, {1, 2}, other=16), {**whole, "pool": "shared"}):
        assert "admission=none: " in notes({**part, "admission": "none"})
    assert "predictor=gate: " in notes({**whole, "predictor": "gate", "prefetch_depth": 1})


@pytest.mark.unit
def test_nothing_to_move_is_said_and_not_left_out(qwen: ModelShape) -> None:
    made = export("llama.cpp", target(qwen, {"cache_ratio": 1.0}))
    assert llama_arguments(made.command).ncmoe == 0
    assert override_rules(made.command) == []


@pytest.mark.unit
def test_two_gpus_get_rules_by_device_and_never_overflow(qwen: ModelShape) -> None:
    gpus, ratio_of_21 = (16 * GB, 15 * GB), 21 / 48
    made = export("llama.cpp", target(qwen, {"cache_ratio": ratio_of_21}, gpus=gpus))
    read, rules = llama_arguments(made.command), override_rules(made.command)
    owner = split_layers(read.ts, 48)
    used, on_cpu = [0, 0], 0
    expert_layer, attention = 128 * 3 * 2048 * 768 * 2, (2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 132) * 2
    for layer in range(48):
        found = {device for name in expert_names(layer) for device in hits(rules, name)}
        assert len(found) == 1
        assert all(len(hits(rules, name)) == 1 for name in expert_names(layer))
        device = found.pop()
        on_cpu += device == "CPU"
        used[owner[layer]] += attention + 8192 * 2 * 512 * 2
        if device != "CPU":
            assert device == f"CUDA{owner[layer]}", "experts stay with their layer"
            used[owner[layer]] += expert_layer
    used[owner[48]] += 151936 * 2048 * 2
    assert on_cpu == 27
    assert all(need <= have for need, have in zip(used, gpus, strict=True))
    assert all(hits(rules, name) == [] for name in other_names(range(48)))


@pytest.mark.unit
def test_device_that_is_too_small_says_how_much(qwen: ModelShape) -> None:
    wanted = {"cache_ratio": 0.5}
    with pytest.raises(BudgetError, match="short") as short:
        export("llama.cpp", target(qwen, wanted, gpus=(20 * GB,)))
    missing = short.value.shortfall_bytes
    export("llama.cpp", target(qwen, wanted, gpus=(20 * GB + missing,)))
    with pytest.raises(BudgetError):
        export("llama.cpp", target(qwen, wanted, gpus=(20 * GB + missing - 1,)))


@pytest.mark.unit
def test_open_settings_take_what_fits_and_less_with_a_longer_context(qwen: ModelShape) -> None:
    def resident(context: int) -> int:
        made = export("ik_llama", target(qwen, {}, gpus=(24 * GB,), context=context))
        return 48 - sum(bool(hits(override_rules(made.command), f"blk.{n}.ffn_up_exps.weight")) for n in range(48))

    short, long = resident(8192), resident(65536)
    assert 0 < long < short < 48
    with pytest.raises(UsageError, match="--gpu"):
        export("ik_llama", target(qwen, {}))


@pytest.mark.unit
@pytest.mark.parametrize("slots", [16, 40, 64, 100, 120])
def test_vllm_groups(slots: int, qwen: ModelShape) -> None:
    made = export("vllm", target(qwen, {"slots_per_layer": [slots] * 48}))
    read = vllm_arguments(made.command)
    size, number, step = read.offload_group_size, read.offload_num_in_group, read.offload_prefetch_step
    assert (read.offload_backend, read.offload_params) == ("prefetch", ["experts"])
    assert step >= number >= 1
    kept = sum(layer % size < size - number for layer in range(48))
    assert (kept + step) * 128 <= 48 * slots + 8
    assert made.placement is not None
    assert kept == sum(device >= 0 for device in made.placement.experts)


@pytest.mark.unit
def test_vllm_without_room_for_a_buffer_reads_in_place(qwen: ModelShape, late: ModelShape) -> None:
    read = vllm_arguments(export("vllm", target(qwen, {"slots_per_layer": [1] * 48})).command)
    per_parameter = [128 * 2 * 768 * 2048 * 2, 128 * 768 * 2048 * 2] * 48
    moved, taken = 0, 0
    for size in per_parameter:
        if moved < read.cpu_offload_gb * 2**30:
            moved, taken = moved + size, taken + 1
    assert (taken, read.cpu_offload_params) == (96, ["experts"])
    everything = vllm_arguments(export("vllm", target(late, {"cache_ratio": 1.0})).command)
    assert (everything.cpu_offload_gb, everything.offload_group_size) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 48))
@pytest.mark.unit
def test_no_grouping_keeps_more(room: int) -> None:
    shape = Checkpoint.open("shape:qwen3-30b-a3b").shape

    def kept(size: int, number: int) -> int:
        return sum(layer % size < size - number for layer in range(48))

    best = max(kept(g, k) for g in range(1, 33) for k in range(1, g + 1) if kept(g, k) + k <= room)
    found = grouping(shape, room)
    assert isinstance(found, Grouping)
    assert kept(found.size, found.offloaded) == best


@pytest.mark.unit
def test_sglang_kt_with_a_file_of_counts(late: ModelShape) -> None:
    counts = np.random.default_rng(0).integers(1, 1000, (9, 128))
    made = export("sglang-kt", target(late, {"cache_ratio": 0.3, "cpu_threads": 12}, counts=counts, folder="out"))
    read = kt_arguments(made.command)
    assert int(read.kt_gpu_experts_ratio * 9 * 128) == 9 * 38
    assert (read.kt_cpuinfer, read.kt_max_deferred_experts_per_token) == (12, 0)
    assert (read.kt_expert_placement_strategy, read.init_expert_location) == ("frequency", "out/expert_counts.pt")
    table = torch.load(io.BytesIO(made.files["expert_counts.pt"]), weights_only=True)["logical_count"]
    assert table.shape == (1, 12, 128)
    assert table.dtype == torch.int32
    assert (table[0, 3:].numpy() == counts).all()
    counts[4] = 0
    with pytest.raises(FileError, match="MoE layer 7 was never used"):
        export("sglang-kt", target(late, {"cache_ratio": 0.3}, counts=counts))


@pytest.mark.unit
def test_sglang_kt_without_counts_is_per_layer(qwen: ModelShape) -> None:
    made = export("sglang-kt", target(qwen, {"cache_ratio": 0.25, "expert_format": "fp8"}))
    read = kt_arguments(made.command)
    assert read.kt_method == "FP8"
    assert not any("expert_format" in note for note in made.notes)
    with pytest.raises(UsageError, match="one format for all layers"):
        export("sglang-kt", target(qwen, {"cache_ratio": 0.25, "expert_format": ["fp8"] * 48}))
    assert (read.kt_num_gpu_experts, read.kt_expert_placement_strategy) == (32, "uniform")
    assert read.kt_gpu_experts_ratio is None


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 15_000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
@pytest.mark.unit
def test_ratio_gives_back_the_number(pair: tuple[int, int]) -> None:
    chosen, total = pair
    assert int(total * float(ratio(chosen, total))) == chosen


@pytest.mark.unit
@pytest.mark.parametrize(
    ("miss", "strategy", "fetches"), [("fetch", "offload", None), ("cpu", "hybrid", 0), ("split", "hybrid", -1)]
)
def test_freetoken(miss: str, strategy: str, fetches: int | None, qwen: ModelShape) -> None:
    made = export("freetoken", target(qwen, {"cache_ratio": 0.25, "miss_action": miss, "cpu_threads": 8}, context=4096))
    read = freetoken_arguments(made.command)
    assert (read.moe_strategy, read.moe_hybrid_max_fetch, read.kv_reserve_tokens) == (strategy, fetches, 4096)
    assert int(read.moe_cache_rate * 48 * 128) == 48 * 32


@pytest.mark.unit
@pytest.mark.parametrize("engine", ENGINES)
def test_every_setting_is_expressed_or_named(engine: str, qwen: ModelShape) -> None:
    made = export(engine, target(qwen, {"cache_ratio": 0.5, "eviction": "lfu", "prefill_chunk_tokens": 64}))
    if engine == "foreload":
        assert Settings.model_validate_json(made.files["settings.json"]).eviction == "lfu"
    else:
        assert any("eviction=lfu" in note for note in made.notes)
        assert any("prefill_chunk_tokens=64" in note for note in made.notes)


@pytest.mark.unit
def test_one_gpu_engines_refuse_two(qwen: ModelShape) -> None:
    with pytest.raises(UsageError, match="vllm: exports are for one GPU"):
        export("vllm", target(qwen, {"cache_ratio": 0.5}, gpus=(80 * GB, 80 * GB)))
    with pytest.raises(UsageError, match=r"'exllama' is unknown: known are foreload, llama\.cpp"):
        export("exllama", target(qwen, {}))


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 130), min_size=1))
@pytest.mark.unit
def test_alternation_matches_exactly_its_numbers(numbers: set[int]) -> None:
    import re

    pattern = alternation(sorted(numbers))
    assert "," not in pattern
    found = {number for number in range(140) if re.search(rf"blk\.({pattern})\.", f"blk.{number}.ffn")}
    assert found == numbers


@pytest.mark.unit
def test_the_engines_own_help_is_asked(qwen: ModelShape) -> None:
    made = export("llama.cpp", target(qwen, {"cache_ratio": 0.5}))
    old = "-m, --model FNAME\n-ngl, --n-gpu-layers N\n-c N\n-fit [on|off]\n-ot, --override-tensor P=B\n-t N"
    with pytest.raises(UsageError, match="has no --moe-cache-mib"):
        check_help(made, old, "help.txt")
    assert check_help(made, old + "\n--moe-cache-mib N", "help.txt").checked.startswith("help.txt")


@pytest.mark.unit
@pytest.mark.parametrize("engine", ["llama.cpp", "ik_llama"])
def test_llama_cpp_itself_reads_the_rules(engine: str, qwen: ModelShape) -> None:
    """The parser of the real engine, as `xllamacpp` ships it; devices other than CPU are unknown to it here."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    made = export(engine, target(qwen, layered(qwen, {5, 6, 30})))
    value = made.command[made.command.index("-ot") + 1]
    params = xllamacpp.CommonParams()
    params.tensor_buft_overrides = value
    assert params.tensor_buft_overrides.rstrip(",") == value
    assert len(read_rules(value)) == 1


@pytest.mark.unit
def test_explained_bytes_are_those_of_the_model(late: ModelShape) -> None:
    made = target(late, {})
    for command in ("llama-server -m x.gguf -ngl all -fit off", "vllm serve x", "ft serve --model x"):
        found = explain(command, made)
        assert sum(tensor.bytes for tensor in found.tensors) == 2 * late.total_weights
