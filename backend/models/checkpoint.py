"""Checkpoints on disk: configuration, tensor index, and the tensors themselves, read one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from foreload.assets import ASSETS
from foreload.backend.models import qwen3_moe
from foreload.backend.models.family import ConfigFields, Family
from foreload.errors import FileError, UsageError
from foreload.files import read_bytes, read_mapping
from foreload.shape import ModelShape

FAMILIES: dict[str, Family] = {family.model_type: family for family in (qwen3_moe.FAMILY,)}
BUNDLED = ("mini",)


def locate(model: str) -> Path:
    """The folder of MODEL: a local Hugging Face folder or a bundled name; UsageError says what is accepted."""
    if model in BUNDLED:
        return ASSETS / model
    folder = Path(model)
    if not folder.is_dir():
        raise UsageError(f"model {model!r} is no folder here: give a Hugging Face folder or {' or '.join(BUNDLED)}")
    return folder


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose configuration has been read and understood; no weight is loaded yet."""

    name: str
    folder: Path
    family: Family
    shape: ModelShape

    @classmethod
    def open(cls, model: str) -> Checkpoint:
        """Read the configuration; FileError if it is missing, corrupt or of an unknown family."""
        folder = locate(model)
        path = folder / "config.json"
        config = read_mapping(path, "model configuration")
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            known = ", ".join(FAMILIES)
            raise FileError(f"{path}: model_type {config.get('model_type')!r} is not known: known are {known}")
        if config.get("quantization_config") is not None:
            raise FileError(f"{path}: field 'quantization_config' is set: only float weights can be read")
        shape = family.shape(ConfigFields(config, str(path)))
        if shape.top_k > shape.experts:
            raise FileError(f"{path}: {shape.top_k} experts per token of {shape.experts}: the first must not be larger")
        return cls(model if model in BUNDLED else folder.resolve().name, folder, family, shape)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Tensor name -> file."""
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            weight_map = read_mapping(index, "weight index").get("weight_map")
            if not isinstance(weight_map, dict):
                raise FileError(f"{index}: field 'weight_map' is missing")
            return {name: self.folder / str(file) for name, file in weight_map.items()}
        single = self.folder / "model.safetensors"
        with _opened(single) as file:
            return dict.fromkeys(file.keys(), single)

    def files(self) -> list[Path]:
        """The weight files, sorted."""
        return sorted(set(self._files.values()))

    @cached_property
    def weights_hash(self) -> str:
        """Sixteen hex digits of the weight files' SHA-256."""
        digest = hashlib.sha256()
        for path in self.files():
            try:
                with path.open("rb") as file:
                    while chunk := file.read(1 << 22):
                        digest.update(chunk)
            except OSError as error:
                raise FileError(f"{path}: weights cannot be read: {error.strerror or error}") from error
        return digest.hexdigest()[:16]

    @cached_property
    def tokenizer_hash(self) -> str:
        """Sixteen hex digits of the tokenizer's SHA-256."""
        return hashlib.sha256(read_bytes(self.folder / "tokenizer.json", "tokenizer")).hexdigest()[:16]

    def read(self, wanted: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the `wanted` tensors (name -> shape) as stored, file by file; FileError for a missing or odd one."""
        by_file: dict[Path, list[str]] = {}
        for name in wanted:
            path = self._files.get(name)
            if path is None:
                raise FileError(f"{self.folder}: tensor {name!r} is missing from the weights")
            by_file.setdefault(path, []).append(name)
        for path, names in by_file.items():
            with _opened(path) as file:
                present = set(file.keys())
                for name in names:
                    if name not in present:
                        raise FileError(f"{path}: tensor {name!r} is missing, though the index names this file")
                    tensor = file.get_tensor(name)
                    if tuple(tensor.shape) != wanted[name]:
                        raise FileError(f"{path}: tensor {name!r} is {tuple(tensor.shape)}: {wanted[name]} is needed")
                    if not tensor.is_floating_point():
                        raise FileError(f"{path}: tensor {name!r} is {tensor.dtype}: a float type is needed")
                    yield name, tensor


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise FileError(f"{path}: weights are missing") from error
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path}: not a readable safetensors file: {error}") from error
