"""`Calibration`: default vectors and estimator of one model, and the folder they are kept in.

DIR/calibration.json is a `CalibrationMeta`; DIR/calibration.safetensors holds `dv`, `shared` and `estimator.*`, in
float16, or float32 where a value would not fit. The JSON is written last and names the tensors' SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from foreload.backend.predict.network import Estimator, Frozen
from foreload.errors import FileError, MismatchError
from foreload.files import atomic_path, parse_model, read_bytes, read_mapping, write_text

META, TENSORS = "calibration.json", "calibration.safetensors"
GATHER_TOKENS = 32
Member = Literal["gate", "quasi_hidden", "estimator"]


class CalibrationMeta(BaseModel):
    """What was calibrated, on what, and what it recalls."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = 1
    model: str
    weights_hash: str
    moe_layers: Annotated[int, Field(ge=1)]
    experts: Annotated[int, Field(ge=1)]
    hidden: Annotated[int, Field(ge=1)]
    texts: tuple[str, ...]  # name and SHA-256 of each file
    tokens: dict[str, int]  # of each split: train, selection, report
    seed: int
    unseen_experts: int
    estimator: dict[str, float]  # how it was trained
    hybrid: tuple[tuple[Member | None, ...], ...]  # [depth][MoE layer], None for a layer with none so far before it
    recall: dict[str, Any]  # on the report split: see `recall.recall_report`
    software: dict[str, str]
    tensors_sha256: str = ""


@dataclass(frozen=True)
class Calibration:
    """dv [L, E, H]: mean unweighted output per expert; shared [L, H]: mean output of the shared experts, else zero."""

    meta: CalibrationMeta
    dv: Tensor
    shared: Tensor
    estimator: Estimator

    def default(self, at: int, ids: Tensor, weights: Tensor) -> Tensor:
        """d_l [n, H] fp32: what the experts `ids` [n, k] executed with `weights` [n, k] add on average."""
        if len(ids) > GATHER_TOKENS:  # reading all vectors once is less than k for each token
            dense = weights.new_zeros(len(ids), self.dv.shape[1]).scatter_(1, ids, weights)
            return dense @ self.dv[at].to(dense.dtype) + self.shared[at]
        vectors = self.dv[at][ids].float()
        return torch.bmm(weights[:, None].float(), vectors)[:, 0] + self.shared[at]

    def estimate(self, source: int, q: Tensor) -> Tensor:
        """Scores [n, E] of the layer after `source` by the network."""
        return self._frozen.scores(source, q.to(self._frozen.dtype))

    @cached_property
    def _frozen(self) -> Frozen:
        """The estimator as it was when first asked."""
        return Frozen(self.estimator)

    def to(self, device: torch.device, dtype: torch.dtype) -> Calibration:
        """A copy on `device`: vectors and network in `dtype`."""
        shape = self.meta
        estimator = Estimator(shape.hidden, shape.experts, shape.moe_layers)
        estimator.load_state_dict(self.estimator.state_dict())
        estimator.requires_grad_(False)
        dv, shared = self.dv.to(device, dtype), self.shared.to(device, torch.float32)
        return Calibration(shape, dv, shared, estimator.to(device, dtype))

    def save(self, folder: Path) -> Calibration:
        """Write into `folder`; returns it as it will be read again."""
        tensors = {"dv": self.dv, "shared": self.shared}
        tensors |= {f"estimator.{name}": value for name, value in self.estimator.state_dict().items()}
        payload = save({name: _stored(value) for name, value in tensors.items()})
        meta = self.meta.model_copy(update={"tensors_sha256": hashlib.sha256(payload).hexdigest()})
        with atomic_path(Path(folder) / TENSORS) as partial:
            partial.write_bytes(payload)
        write_text(Path(folder) / META, meta.model_dump_json(indent=1) + "\n")
        return Calibration.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Calibration:
        """Read a folder; FileError if a file is missing, corrupt or does not go with the other."""
        meta = read_meta(folder)
        path = Path(folder) / TENSORS
        payload = read_bytes(path, "calibration")
        if hashlib.sha256(payload).hexdigest() != meta.tensors_sha256:
            raise FileError(f"{path}: is not the file that {META} describes: calibrate again")
        try:
            tensors = {name: value.float() for name, value in load(payload).items()}
        except SafetensorError as error:
            raise FileError(f"{path}: not a readable safetensors file: {error}") from error
        return cls(meta, *_parts(meta, tensors, path))


def read_meta(folder: Path) -> CalibrationMeta:
    """What a calibration folder says of itself; FileError if that is missing or wrong."""
    path = Path(folder) / META
    meta = parse_model(CalibrationMeta, read_mapping(path, "calibration"), str(path))
    if not meta.hybrid or any(len(row) != meta.moe_layers for row in meta.hybrid):
        raise FileError(f"{path}: field 'hybrid' must hold {meta.moe_layers} entries for each depth")
    return meta


def check_model(
    meta: CalibrationMeta, folder: Path, model: str, sizes: tuple[int, int, int], weights_hash: Callable[[], str]
) -> None:
    """MismatchError, naming both, unless the calibration is of this model; sizes: MoE layers, experts, hidden.

    Hashing large weights takes minutes, so sizes are compared first.
    """
    theirs = (meta.moe_layers, meta.experts, meta.hidden)
    if theirs != sizes:
        raise MismatchError(
            f"{folder}: calibration of {meta.model!r} with {_sizes(theirs)}: model {model!r} has {_sizes(sizes)}"
        )
    found = weights_hash()
    if meta.weights_hash != found:
        raise MismatchError(
            f"{folder}: calibration of {meta.model!r} with weights {meta.weights_hash}: "
            f"model {model!r} has weights {found}"
        )


def _sizes(sizes: tuple[int, int, int]) -> str:
    return "{} MoE layers, {} experts, hidden {}".format(*sizes)


def as_stored(calibration: Calibration) -> Calibration:
    """The calibration as a folder would give it back, where it is."""
    rounded = {name: _stored(value).float() for name, value in calibration.estimator.state_dict().items()}
    calibration.estimator.load_state_dict(rounded)
    dv, shared = (_stored(t).float().to(t.device) for t in (calibration.dv, calibration.shared))
    return replace(calibration, dv=dv, shared=shared)


def _stored(value: Tensor) -> Tensor:
    small = value.detach().cpu().half()
    return (small if bool(small.isfinite().all()) else value.detach().cpu().float()).contiguous()


def _parts(meta: CalibrationMeta, tensors: dict[str, Tensor], path: Path) -> tuple[Tensor, Tensor, Estimator]:
    estimator = Estimator(meta.hidden, meta.experts, meta.moe_layers)
    expected = {
        "dv": (meta.moe_layers, meta.experts, meta.hidden),
        "shared": (meta.moe_layers, meta.hidden),
        **{f"estimator.{name}": tuple(value.shape) for name, value in estimator.state_dict().items()},
    }
    for name, shape in expected.items():
        if name not in tensors:
            raise FileError(f"{path}: tensor {name!r} is missing")
        if tuple(tensors[name].shape) != shape:
            raise FileError(f"{path}: tensor {name!r} is {tuple(tensors[name].shape)}: {shape} is needed")
    estimator.load_state_dict({name.removeprefix("estimator."): tensors[name] for name in expected if "." in name})
    return tensors["dv"], tensors["shared"], estimator.requires_grad_(False)
