"""`explain`: what somebody's flags do, for the traps that people have reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreload.backend.export import Explanation, Target, explain
from foreload.errors import UsageError
from foreload.settings import Settings
from foreload.shape import ModelShape


@pytest.fixture
def late(shape: ModelShape) -> ModelShape:
    """Eight layers, the first three dense."""
    return replace(shape, layers=8, moe_layers=(3, 4, 5, 6, 7), dense_width=24)


def found(command: str, shape: ModelShape, engine: str | None = None, gpus: int = 0) -> Explanation:
    return explain(command, Target(shape, Settings(), "m", gpus=(10**9,) * gpus), engine)


def on_cpu(explanation: Explanation) -> list[int]:
    return [layer for layer, devices in explanation.expert_devices().items() if devices == {"CPU"}]


BASE = "llama-server -m m.gguf -ngl all -fit off -c 128"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "layers", "warning"),
    [
        ("", [], None),
        ("-cmoe", [3, 4, 5, 6, 7], None),
        ("-ncmoe 0", [], None),
        ("-ncmoe 5", [3, 4], "-ncmoe 5 counts 3 dense layers: experts of 2 layers are on the CPU"),
        (r'-ot "blk\.([4-6])\.ffn_.*_exps=CPU"', [4, 5, 6], "miss ffn_gate_chexps.weight"),
        (r"-ot 'blk\.4\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU'", [4], None),
        (r"-ot '\.3\.ffn.*exps=CPU' -ot '\.7\.ffn.*exps=CPU'", [7], "-ot is given 2 times: only the last counts"),
        (r"-ot '\.3\.ffn.*exps=CUDA0' -cmoe", [4, 5, 6, 7], None),
        (r"--override-tensor='\.3\.ffn.*exps=CPU' --n-cpu-moe=0", [3], None),
    ],
)
def test_llama_cpp(flags: str, layers: list[int], warning: str | None, late: ModelShape) -> None:
    explanation = found(f"{BASE} {flags}", late)
    assert on_cpu(explanation) == layers
    if warning is None:
        assert explanation.warnings == ()
    else:
        assert any(warning in one for one in explanation.warnings), explanation.warnings


@pytest.mark.unit
def test_split_expert_layers_are_seen(late: ModelShape) -> None:
    explanation = found(rf"{BASE} -ot '\.ffn_(gate|up)_exps=CPU'", late)
    assert explanation.expert_devices()[3] == {"CPU", "CUDA0"}
    assert any("ffn_down_exps.weight" in one for one in explanation.warnings)


@pytest.mark.unit
def test_the_same_flag_means_other_layers_in_ik_llama(late: ModelShape) -> None:
    command = "llama-server -m m.gguf -ngl 999 -c 128 -ncmoe 2"
    assert on_cpu(found(command + " -fit off", late)) == []
    assert on_cpu(found(command, late, "ik_llama")) == [6, 7]
    several = rf"{command.replace('-ncmoe 2', '')} -ot '\.3\.ffn.*exps=CPU' -ot '\.7\.ffn.*exps=CPU'"
    assert on_cpu(found(several, late, "ik_llama")) == [3, 7]
    with pytest.raises(UsageError, match="refuses both together"):
        found(command + " --fit", late, "ik_llama")
    with pytest.raises(UsageError, match="several devices"):
        found(command, late, "ik_llama", gpus=2)


@pytest.mark.unit
def test_default_fit_is_warned_of(late: ModelShape) -> None:
    warnings = found("./bin/llama-cli -m m.gguf -cmoe", late).warnings
    assert any("-fit is on by default" in one for one in warnings)
    assert any("-ngl is not given" in one for one in warnings)
    several = found(f"{BASE} -ncmoe 4 -ts 1,1", late).warnings
    assert any("leaves all resident experts to the last" in one for one in several)


@pytest.mark.unit
def test_overrides_change_the_bytes(late: ModelShape) -> None:
    without, with_rule = found(BASE, late), found(rf"{BASE} -ot '\.3\.ffn.*exps=CPU'", late)
    layer = 2 * 8 * late.expert_weights
    before, after = without.bytes_by_device(), with_rule.bytes_by_device()
    assert after["CUDA0"] == before["CUDA0"] - layer
    assert after["CPU"] == before["CPU"] + layer
    cached = found(f"{BASE} --moe-cache-mib 3", late).bytes_by_device()
    assert cached["CUDA0"] == before["CUDA0"] + 3 * 2**20


@pytest.mark.unit
def test_layers_beyond_ngl_and_over_devices(late: ModelShape) -> None:
    half = found("llama-server -m m -ngl 5 -fit off -c 1", late)
    assert {t.layer for t in half.tensors if t.device == "CPU"} == {-1, 0, 1, 2, 3}
    split = found(f"{BASE} -ts 3,6", late, gpus=2)
    assert {t.layer for t in split.tensors if t.device == "CUDA0"} == {0, 1, 2}
    assert next(t.device for t in split.tensors if t.role == "norm" and t.layer == -1) == "CUDA1"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "layers", "warning"),
    [
        ("--offload-backend prefetch --offload-group-size 4 --offload-params experts", [3, 7], None),
        ("--offload-backend prefetch --offload-group-size 4 --offload-params expert", [], None),
        (
            "--offload-backend prefetch --offload-group-size 4 --offload-num-in-group 2 --offload-params experts",
            [3, 6, 7],
            "--offload-prefetch-step 1 counts offloaded layers: below 2",
        ),
        ("--offload-group-size 4 --offload-params experts", [3, 7], "--offload-backend is not prefetch"),
        ("--cpu-offload-gb 10 --cpu-offload-params experts", [3, 4, 5, 6, 7], None),
        ("--cpu-offload-gb 0", [], None),
    ],
)
def test_vllm(flags: str, layers: list[int], warning: str | None, late: ModelShape) -> None:
    explanation = found(f"vllm serve m {flags}", late)
    assert on_cpu(explanation) == layers
    assert any(warning in one for one in explanation.warnings) if warning else explanation.warnings == ()


@pytest.mark.unit
def test_experts_shared_between_devices(late: ModelShape) -> None:
    command = "python -m sglang.launch_server --model m --kt-weight-path m --kt-num-gpu-experts"
    explanation = found(f"{command} 3", late)
    on_gpu = sum(t.bytes for t in explanation.tensors if t.role == "experts" and t.device == "CUDA0")
    assert on_gpu == 5 * 3 * 2 * late.expert_weights
    with pytest.raises(UsageError, match="it is per layer, and a layer has 8"):
        found(f"{command} 9", late)
    ratio = found(f"{command} 3 --kt-gpu-experts-ratio 0.5 --kt-expert-placement-strategy front-loading", late)
    assert ratio.expert_devices() == {3: {"CUDA0"}, 4: {"CUDA0"}, 5: {"CUDA0", "CPU"}, 6: {"CPU"}, 7: {"CPU"}}
    assert ratio.warnings == ("--kt-gpu-experts-ratio overrides --kt-num-gpu-experts",)


@pytest.mark.unit
def test_freetoken_counts_its_cache(late: ModelShape) -> None:
    without = found("ft serve --model m --moe-strategy hybrid --moe-cache-rate 0", late).bytes_by_device()
    with_cache = found("ft serve --model m --moe-strategy hybrid --moe-cache-rate 0.5", late).bytes_by_device()
    assert with_cache["CUDA0"] - without["CUDA0"] == 20 * 2 * late.expert_weights


@pytest.mark.unit
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "command line is empty"),
        ("llama-server -ot 'x", "cannot be read"),
        ("ollama serve", "whose command is this?"),
        ("llama-server -ot 'blk=CPU,rest'", "'rest' is no rule"),
        ("llama-server -ot 'a{1,2}=CPU'", "without a comma"),
        ("llama-server -ot '(?i)exps=CPU'", "not read alike"),
        ("llama-server -ot '(exps=CPU'", "no regular expression"),
        ("llama-server -ncmoe many", "-ncmoe is 'many': a whole number is needed"),
        ("llama-server -ts a,b", "-ts is 'a,b'"),
        ("llama-server -ts 0,0", "-ts is '0,0'"),
        ("llama-server -ot", "-ot needs a value"),
        ("vllm serve m --offload-group-size 2 --offload-num-in-group 3", "1 to the group size, 2"),
        ("vllm serve m --offload-group-size 2 --cpu-offload-gb 1", "exclude each other"),
        ("vllm serve m --offload-group-size 2 --offload-params", "--offload-params needs a value"),
        ("vllm serve m --cpu-offload-gb nan", "a number of at least 0"),
        ("ft serve --moe-cache-rate 2", "0 to 1 is needed"),
        ("x --kt-weight-path m --kt-expert-placement-strategy best", "one of uniform"),
    ],
)
def test_bad_commands_are_one_line(command: str, message: str, late: ModelShape) -> None:
    with pytest.raises(UsageError) as error:
        found(command, late)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
