"""`ModelShape`: the published totals, what stays on the device, and a hash that old files still match."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from foreload.backend.models.checkpoint import Checkpoint
from foreload.shape import RING_SLACK, ModelShape

PUBLISHED = {
    # billions of weights in all and active, weights of an expert, bf16 bytes of keys and values per token
    "qwen3-30b-a3b": (30.532, 3.353, 4_718_592, 98_304),
    "gpt-oss-20b": (20.915, 4.187, 24_891_840, 49_152),
    "gpt-oss-120b": (116.829, 5.712, 24_891_840, 73_728),
    "glm-4.7-flash": (29.943, 3.897, 9_437_184, 54_144),
    "mixtral-8x7b": (46.703, 12.880, 176_160_768, 131_072),
    "olmoe-1b-7b": (6.919, 1.282, 6_291_456, 131_072),
    "deepseek-v2-lite": (15.706, 2.661, 8_650_752, 31_104),
}


def shape_of(name: str) -> ModelShape:
    return Checkpoint.open(f"shape:{name}").shape


@pytest.mark.unit
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    shape = shape_of(name)
    found = (round(shape.total_weights / 1e9, 3), round(shape.active_weights / 1e9, 3), shape.expert_weights)
    assert (*found, shape.kv_bytes_per_token("bfloat16")) == PUBLISHED[name]


@pytest.mark.unit
def test_moe_layers_of_published_shapes() -> None:
    layers = {name: (shape_of(name).layers, shape_of(name).moe_layers[0]) for name in PUBLISHED}
    assert layers["glm-4.7-flash"] == (47, 1)
    assert layers["deepseek-v2-lite"] == (27, 1)
    assert all(first == 0 for name, (_, first) in layers.items() if name not in ("glm-4.7-flash", "deepseek-v2-lite"))


@pytest.mark.unit
def test_sliding_windows_stop_growing() -> None:
    shape = shape_of("gpt-oss-20b")
    row = 2 * 8 * 64 * 2
    assert shape.kv_bytes("bfloat16", 100) == 24 * 100 * row
    assert shape.kv_bytes("bfloat16", 131_072) == 12 * (131_072 + 128 + RING_SLACK) * row


@pytest.mark.unit
def test_float32_gates_are_counted() -> None:
    shape = shape_of("glm-4.7-flash")
    extra = shape.dense_bytes("bfloat16") - 2 * shape.dense_weights
    assert extra == 46 * 64 * (2048 + 1) * 2
    assert shape.dense_bytes("float32") == 4 * shape.dense_weights


@pytest.mark.unit
def test_hashes_of_older_files_hold() -> None:
    """Recordings and profiles made before a field existed still belong to the same shape."""
    assert shape_of("qwen3-30b-a3b").hash == "19677b143d10"
    assert Checkpoint.open("mini").shape.hash == "725a86d68e1c"


@pytest.mark.unit
@pytest.mark.parametrize("changed", [{"top_k": 3}, {"sinks": True}, {"windows": (4,) * 24}, {"routed_scale": 2.0}])
def test_hash_follows_every_field(changed: dict[str, Any]) -> None:
    shape = shape_of("olmoe-1b-7b")
    assert replace(shape, **changed).hash != shape.hash


@pytest.mark.unit
@pytest.mark.parametrize("name", PUBLISHED)
def test_round_trip_by_json(name: str) -> None:
    shape = shape_of(name)
    assert ModelShape.from_fields(json.loads(json.dumps(asdict(shape)))) == shape


@pytest.mark.unit
def test_fields_of_older_files_may_be_missing() -> None:
    shape = Checkpoint.open("mini").shape
    old = {name: value for name, value in asdict(shape).items() if name not in ("latent", "windows", "groups")}
    assert ModelShape.from_fields(old) == shape


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"colour": 1}, "unknown or missing fields colour"),
        ({"latent": 3}, "latent must have the fields nope_dim, query_rank, rank, rope_dim, value_dim"),
        ({"yarn": {"factor": 2}}, "yarn must have the fields"),
    ],
)
def test_wrong_fields_are_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ModelShape.from_fields({**asdict(Checkpoint.open("mini").shape), **changed})
