"""Predictors against their formulas, calibration files, and what is refused before any weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_weights, save_calibration, save_tiny
from torch import Tensor
from torch.nn import functional

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.predict import PREDICTORS
from foreload.backend.predict.calibration import META, TENSORS, Calibration, as_stored
from foreload.backend.predict.lookahead import Shadow
from foreload.budget import predictor_bytes
from foreload.errors import FileError, MismatchError, SettingsError
from foreload.settings import GATE_SIDE, Settings

MakeEngine = Callable[..., Engine]
N = 5


@pytest.fixture
def engine(make_engine: MakeEngine, calibration: Path) -> Engine:
    return make_engine(calibration=calibration)


@pytest.fixture
def state(engine: Engine) -> tuple[Tensor, Tensor, Tensor]:
    """A residual stream of layer 0 and the routing executed there."""
    torch.manual_seed(1)
    decoder = engine.forward.decoder
    r = torch.randn(N, engine.shape.hidden)
    return r, *decoder.route(0, decoder.moe_input(0, r))


def norm_and_gate(engine: Engine, layer: int, stream: Tensor) -> tuple[Tensor, Tensor]:
    """(q, scores), written out."""
    w = engine.forward.decoder.layers[layer]
    q = stream / (stream.pow(2).mean(-1, keepdim=True) + engine.shape.norm_eps).sqrt() * w.moe_norm
    return q, q @ w.gate.T


def default(found: Calibration, layer: int, ids: Tensor, weights: Tensor) -> Tensor:
    """d_l, token by token."""
    rows = [
        sum((w * found.dv[layer, e] for e, w in zip(row, share, strict=True)), found.shared[layer])
        for row, share in zip(ids.tolist(), weights, strict=True)
    ]
    return torch.stack(rows)


def network(found: Calibration, source: int, q: Tensor) -> Tensor:
    """The estimator, written out."""
    w = found.estimator.state_dict()
    z = q @ w["down.weight"].T + w["down.bias"] + w["layer.weight"][source]
    inner = functional.silu(z @ w["inner.weight"].T + w["inner.bias"])
    z = z + inner @ w["outer.weight"].T + w["outer.bias"]
    z = functional.layer_norm(z, (z.shape[-1],), w["norm.weight"], w["norm.bias"])
    return z @ w["head.weight"].T + w["head.bias"]


@pytest.mark.unit
@pytest.mark.parametrize("rolled", [False, True])
@pytest.mark.parametrize("name", PREDICTORS)
def test_predictions_equal_their_formula(
    engine: Engine, calibration: Path, state: tuple[Tensor, Tensor, Tensor], name: str, rolled: bool
) -> None:
    found = Calibration.load(calibration)
    r, ids, weights = state
    ahead = engine.predictor(name, rolled).ahead(0, r, ids, weights, 2)
    assert len(ahead) == 2
    for depth in (1, 2):
        member = (found.meta.hybrid[depth - 1][depth] or "") if name == "hybrid" else name
        stream = r if member == "gate" else r + default(found, 0, ids, weights)
        for target in range(1, depth + 1):
            q, scores = norm_and_gate(engine, target, stream)
            if member == "estimator":
                scores = network(found, target - 1, q)
            if rolled and target < depth:
                stream = stream + default(found, target, *engine.forward.decoder.choose(target, scores))
            elif target < depth:
                continue
            if target == depth:
                torch.testing.assert_close(ahead[depth - 1][0], scores, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(ahead[depth - 1][1], q, atol=1e-4, rtol=1e-4)


@pytest.mark.unit
@pytest.mark.parametrize("name", PREDICTORS)
def test_the_next_layer_does_not_depend_on_how_far_one_looks(
    engine: Engine, state: tuple[Tensor, Tensor, Tensor], name: str
) -> None:
    one = engine.predictor(name).ahead(0, *state, 1)[0][0]
    for rolled in (False, True):
        assert torch.equal(engine.predictor(name, rolled).ahead(0, *state, 4)[0][0], one)
    assert len(engine.predictor(name).ahead(2, *state, 4)) == 0


@pytest.mark.unit
def test_predictors_differ(engine: Engine, state: tuple[Tensor, Tensor, Tensor]) -> None:
    found = [engine.predictor(name).ahead(0, *state, 1)[0][0] for name in ("gate", "quasi_hidden", "estimator")]
    assert not torch.allclose(found[0], found[1], atol=1e-2)
    assert not torch.allclose(found[1], found[2], atol=1e-2)


@pytest.mark.unit
def test_shadow_counts_true_experts() -> None:
    import numpy as np

    shadow = Shadow(3)
    shadow.compare(1, np.array([[0, 1], [2, 3]]), torch.tensor([[1, 4], [3, 2]]))
    shadow.compare(1, np.array([[0, 1]]), torch.tensor([[5, 6]]))
    assert shadow.recall() == {1: 0.5}


# Calibration files


@pytest.mark.unit
def test_calibrations_round_trip(calibration: Path, tmp_path: Path) -> None:
    found = Calibration.load(calibration)
    again = found.save(tmp_path / "again")
    assert torch.equal(again.dv, found.dv)
    assert again.meta.model_copy(update={"tensors_sha256": ""}) == found.meta.model_copy(update={"tensors_sha256": ""})
    stored = as_stored(found)
    assert torch.equal(stored.dv, found.dv)
    assert {t.dtype for t in load_file(calibration / TENSORS).values()} == {torch.float16}


@pytest.mark.unit
def test_large_vectors_are_kept_in_full(calibration: Path, tmp_path: Path) -> None:
    found = Calibration.load(calibration)
    found.dv[0, 0, 0] = 1e6 + 1
    assert Calibration.load(found.save(tmp_path / "large") and tmp_path / "large").dv[0, 0, 0] == 1e6 + 1


@pytest.mark.unit
def test_predictor_bytes_are_the_tensors(engine: Engine, calibration: Path) -> None:
    found = Calibration.load(calibration)
    weights = sum(p.numel() for p in found.estimator.parameters()) + found.dv.numel() + found.shared.numel()
    assert predictor_bytes(engine.shape, "float32", Settings(predictor="hybrid", prefetch_depth=1)) == 4 * weights
    assert predictor_bytes(engine.shape, "float32", Settings(predictor="gate", prefetch_depth=1)) == 0


def spoil_meta(folder: Path, **fields: Any) -> None:
    path = folder / META
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def swap_tensors(folder: Path) -> None:
    tensors = load_file(folder / TENSORS)
    save_file({**tensors, "dv": tensors["dv"] + 1}, folder / TENSORS)


SPOILS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no json": (lambda folder: (folder / META).unlink(), "calibration.json: calibration cannot be read"),
    "no tensors": (lambda folder: (folder / TENSORS).unlink(), "calibration.safetensors: calibration cannot be read"),
    "other tensors": (swap_tensors, "is not the file that calibration.json describes"),
    "schema": (lambda folder: spoil_meta(folder, schema_version=2), "field 'schema_version' is 2"),
    "unknown field": (lambda folder: spoil_meta(folder, colour=1), "unknown field 'colour'"),
    "member": (lambda folder: spoil_meta(folder, hybrid=[[None, "oracle", "gate"]]), "field 'hybrid.0.1' is 'oracle'"),
    "short hybrid": (lambda folder: spoil_meta(folder, hybrid=[[None]]), "field 'hybrid' must hold 3 entries"),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", SPOILS)
def test_damaged_calibrations(tiny: Path, tmp_path: Path, name: str) -> None:
    folder = save_calibration(tmp_path / "c", tiny)
    spoil, said = SPOILS[name]
    spoil(folder)
    with pytest.raises(FileError, match=said) as caught:
        Calibration.load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.integration
def test_calibration_of_another_model_is_refused_before_weights_are_loaded(
    tiny: Path, spoilt: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("read_dense", "read_experts"):
        monkeypatch.setattr(Checkpoint, name, lambda *_, **__: pytest.fail("weights were read"))
    options = EngineOptions(context_tokens=16, calibration=calibration)
    wide = save_tiny(tmp_path / "wide", hidden_size=48)
    with pytest.raises(
        MismatchError, match="calibration of 'tiny' with 3 MoE layers, 8 experts, hidden 32: model 'wide'"
    ):
        Engine.load(str(wide), options)
    edit_weights(spoilt, layers__0__mlp__gate__weight=torch.zeros(8, 32))
    with pytest.raises(MismatchError, match=r"with weights [0-9a-f]{16}: model 'spoilt' has weights [0-9a-f]{16}"):
        Engine.load(str(spoilt), options)
    with pytest.raises(SettingsError, match=r"predictor 'hybrid' needs a calibration .*foreload calibrate"):
        Engine.load(str(tiny), EngineOptions(context_tokens=16), Settings(predictor="hybrid", prefetch_depth=1))
    past = Settings(predictor="gate", prefetch_depth=1, speculate_layers=(3,))
    with pytest.raises(SettingsError, match="speculate_layers holds 3: the model has MoE layers 0 to 2"):
        Engine.load(str(tiny), EngineOptions(context_tokens=16), past)


@pytest.mark.integration
def test_a_refused_predictor_leaves_the_old_one_in_force(make_engine: MakeEngine) -> None:
    engine = make_engine(Settings(cache_ratio=0.5, predictor="gate", prefetch_depth=1))
    for wrong in (
        {"predictor": "quasi_hidden", "prefetch_depth": 1},
        {"predictor": "gate", "prefetch_depth": 2, "prefetch_rolled": True},
        {"predictor": "gate", "prefetch_depth": 1, "speculate_layers": [9]},
    ):
        with pytest.raises(SettingsError):
            engine.apply(Settings.parse({"cache_ratio": 0.5, **wrong}))
        assert engine.settings == Settings(cache_ratio=0.5, predictor="gate", prefetch_depth=1)
        assert engine.forward.look_ahead.predictor is not None
        assert engine.forward.look_ahead.predictor.key == "gate"


@pytest.mark.integration
def test_a_model_folder_may_hold_its_calibration(make_engine: MakeEngine, spoilt: Path) -> None:
    assert not make_engine(model=spoilt).calibrated
    save_calibration(spoilt / "calibration", spoilt)
    engine = make_engine(Settings(cache_ratio=0.5, predictor="hybrid", prefetch_depth=2), model=spoilt)
    assert engine.calibrated


# Settings


@pytest.mark.unit
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"predictor": "gate", "prefetch_depth": 5}, "field 'prefetch_depth' is 5"),
        ({"predictor": "oracle", "prefetch_depth": 1}, "field 'predictor' is 'oracle'"),
        ({"predictor": "gate", "prefetch_depth": 1, "prefetch_rolled": True}, "prefetch_depth of 2 or more"),
        ({"speculate_layers": "all"}, "speculate_layers needs a predictor with weights"),
        ({"predictor": "gate", "prefetch_depth": 1, "speculate_layers": [0, 1]}, "before the first MoE layer"),
        ({"predictor": "gate", "prefetch_depth": 1, "speculate_layers": [2, 1]}, "in ascending order are needed"),
        ({"predictor": "gate", "prefetch_depth": 1, "speculate_layers": [2, 2]}, "distinct MoE layers"),
        ({"predictor": "gate", "prefetch_depth": 1, "speculate_layers": "most"}, "field 'speculate_layers"),
    ],
)
def test_wrong_settings(value: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Settings.parse(value)


@pytest.mark.unit
def test_settings_round_trip(tmp_path: Path) -> None:
    for layers in ("all", (1, 2), ()):
        for name in ("s.json", "s.toml"):
            settings = Settings(predictor="hybrid", prefetch_depth=4, prefetch_rolled=True, speculate_layers=layers)
            settings.save(tmp_path / name)
            assert Settings.load(tmp_path / name) == settings
    assert set(GATE_SIDE) == set(PREDICTORS)
