"""Model folders: what is read equals what `transformers` saved, and what cannot be run is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FIELDS, edit_config, edit_weights, save_tiny

from foreload.backend.engine import Engine
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import FileError, UsageError
from foreload.settings import Settings

KNOWN = "qwen3_moe, qwen2_moe, olmoe, mixtral, gpt_oss, deepseek_v2, deepseek_v3, glm4_moe_lite"
PROMPT = [5, 9, 33, 2, 17, 60, 41]
MakeEngine = Callable[..., Engine]


def check_against_transformers(engine: Engine, folder: Path, tokens: int = 12) -> None:
    """Greedy text of the engine is what the reference prefers at each position, unless by less than 1e-4."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generated = engine.generate(PROMPT, tokens, stop=False).token_ids
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT + generated])).logits[0, len(PROMPT) - 1 : -1]
    behind = logits.max(dim=-1).values - logits[torch.arange(tokens), generated]
    assert float(behind.max()) < 1e-4


@pytest.mark.integration
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="untied"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"norm_topk_prob": False}, id="weights_not_normalised"),
        pytest.param({"num_key_value_heads": 4}, id="no_grouped_heads"),
        pytest.param({"head_dim": 16, "rope_theta": 500.0}, id="wide_heads"),
        pytest.param({"num_experts_per_tok": 8}, id="all_experts"),
        pytest.param({"num_hidden_layers": 1}, id="one_layer"),
    ],
)
def test_saved_by_transformers(make_engine: MakeEngine, tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = save_tiny(tmp_path / "model", **fields)
    check_against_transformers(make_engine(model=folder), folder)


@pytest.mark.integration
def test_shards_load_like_the_single_file(make_engine: MakeEngine, spoilt: Path, tiny: Path) -> None:
    weights = load_file(spoilt / "model.safetensors")
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, spoilt / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (spoilt / "model.safetensors.index.json").write_text(json.dumps(index))
    (spoilt / "model.safetensors").unlink()
    sharded, single = make_engine(model=spoilt), make_engine(model=tiny)
    assert [path.name for path in sharded.checkpoint.files()] == list(files)
    assert torch.equal(sharded.slab.blocks, single.slab.blocks)
    assert sharded.generate(PROMPT, 8).token_ids == single.generate(PROMPT, 8).token_ids
    assert sharded.checkpoint.weights_hash != single.checkpoint.weights_hash


@pytest.mark.unit
def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", shard_size="40KB")
    checkpoint = Checkpoint.open(str(folder))
    assert len(checkpoint.files()) > 2
    lost = checkpoint.files()[1]
    lost.unlink()
    with pytest.raises(FileError, match=rf"{lost.name}: weights are missing"):
        Engine(checkpoint, *engine_arguments())


def engine_arguments() -> tuple[Any, Settings]:
    from foreload.backend.engine import EngineOptions

    return EngineOptions(context_tokens=16), Settings(cache_ratio=0.0)


def refusal(folder: Path) -> str:
    """The one line with which the folder is refused, by its configuration or when its weights are loaded."""
    with pytest.raises(FileError) as caught:
        Engine(Checkpoint.open(str(folder)), *engine_arguments()).close()
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.unit
def test_missing_folder_lists_the_bundled_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder here: give a Hugging Face folder or mini"):
        Checkpoint.open(str(tmp_path / "nowhere"))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "must be an object"),
        ("\xff", "JSON"),
    ],
)
def test_unreadable_configuration(spoilt: Path, text: str | None, said: str) -> None:
    path = spoilt / "config.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    message = refusal(spoilt)
    assert message.startswith(f"{path}: model configuration")
    assert said in message


@pytest.mark.unit
@pytest.mark.parametrize("model_type", ["llama", "", 7])
def test_unknown_family_lists_the_known(spoilt: Path, model_type: Any) -> None:
    path = edit_config(spoilt, model_type=model_type)
    assert refusal(spoilt) == f"{path}: model_type {model_type!r} is not known: known are {KNOWN}"


@pytest.mark.unit
@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size", "rms_norm_eps", "num_experts"])
@pytest.mark.parametrize("value", [None, "many", True, [1], float("nan"), float("inf")])
def test_wrong_field_is_named(spoilt: Path, field: str, value: Any) -> None:
    edit_config(spoilt, **{"num_local_experts": None, "num_experts": 8, field: value})
    message = refusal(spoilt)
    assert f"field {field!r} is {value!r}" in message
    assert message.endswith("is needed")


@pytest.mark.unit
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_counts_are_whole_and_positive(spoilt: Path, value: float) -> None:
    edit_config(spoilt, num_attention_heads=value)
    assert f"field 'num_attention_heads' is {value!r}: a whole number above 0 is needed" in refusal(spoilt)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers"),
        ({"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 4}, "decoder_sparse_step"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"sliding_window": 8, "use_sliding_window": True}, "use_sliding_window"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"num_experts_per_tok": 9}, "9 experts per token of 8"),
    ],
)
def test_what_cannot_be_run_is_refused(spoilt: Path, fields: dict[str, Any], named: str) -> None:
    edit_config(spoilt, **fields)
    assert named in refusal(spoilt)


@pytest.mark.unit
@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_both_spellings_of_the_expert_count(spoilt: Path, spelling: str) -> None:
    edit_config(spoilt, **{"num_experts": None, "num_local_experts": None, spelling: 8})
    assert Checkpoint.open(str(spoilt)).shape.experts == FIELDS["num_experts"]


@pytest.mark.unit
def test_missing_tensor_is_named(spoilt: Path) -> None:
    edit_weights(spoilt, layers__1__mlp__experts__3__up_proj__weight=None)
    assert "tensor 'model.layers.1.mlp.experts.3.up_proj.weight' is missing" in refusal(spoilt)


@pytest.mark.unit
def test_missing_dense_tensor_is_named(spoilt: Path) -> None:
    edit_weights(spoilt, lm_head__weight=None)
    assert "tensor 'lm_head.weight' is missing" in refusal(spoilt)


@pytest.mark.unit
def test_wrong_tensor_shape_names_both(spoilt: Path) -> None:
    edit_weights(spoilt, layers__0__mlp__gate__weight=torch.zeros(8, 31))
    assert "tensor 'model.layers.0.mlp.gate.weight' is (8, 31): (8, 32) is needed" in refusal(spoilt)


@pytest.mark.unit
def test_integer_weights_are_refused(spoilt: Path) -> None:
    edit_weights(spoilt, layers__0__mlp__gate__weight=torch.zeros(8, 32, dtype=torch.int8))
    assert "is I8: a float type is needed" in refusal(spoilt)


@pytest.mark.unit
@pytest.mark.parametrize("cut", [0, 5, 1000, -1])
def test_corrupt_weights(spoilt: Path, cut: int) -> None:
    path = spoilt / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert f"{path}: not a readable safetensors file" in refusal(spoilt)


@pytest.mark.unit
def test_no_weights(spoilt: Path) -> None:
    (spoilt / "model.safetensors").unlink()
    assert refusal(spoilt) == f"{spoilt / 'model.safetensors'}: weights are missing"


@pytest.mark.unit
@pytest.mark.parametrize("text", ["{}", '{"weight_map": 3}', "{"])
def test_corrupt_weight_index(spoilt: Path, text: str) -> None:
    path = spoilt / "model.safetensors.index.json"
    path.write_text(text)
    assert refusal(spoilt).startswith(f"{path}: ")


@pytest.mark.unit
def test_index_naming_the_wrong_file(spoilt: Path) -> None:
    weights = load_file(spoilt / "model.safetensors")
    save_file({"other": torch.zeros(1)}, spoilt / "b.safetensors")
    index = dict.fromkeys(weights, "model.safetensors") | {"lm_head.weight": "b.safetensors"}
    (spoilt / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert "'lm_head.weight' is missing, though the index names this file" in refusal(spoilt)


@pytest.mark.unit
@pytest.mark.parametrize("text", [None, "{}", "not json"])
def test_missing_or_corrupt_tokenizer(spoilt: Path, text: str | None) -> None:
    path = spoilt / "tokenizer.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert refusal(spoilt).startswith(f"{path}: ")


@pytest.mark.unit
def test_hashes_follow_the_content(tiny: Path, spoilt: Path) -> None:
    one, two = Checkpoint.open(str(tiny)), Checkpoint.open(str(spoilt))
    assert (one.weights_hash, one.tokenizer_hash) == (two.weights_hash, two.tokenizer_hash)
    edit_weights(spoilt, layers__0__mlp__gate__weight=torch.zeros(8, 32))
    shutil.copy(spoilt / "config.json", spoilt / "tokenizer.json")
    three = Checkpoint.open(str(spoilt))
    assert three.weights_hash != one.weights_hash
    assert three.tokenizer_hash != one.tokenizer_hash
