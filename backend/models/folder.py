"""Weights in a folder: safetensors in one file or in shards, with or without an index."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foreload.backend.models.packed import MX_BLOCK, MX_BYTES, MX_NAN, Fp8Tiles, Mxfp4
from foreload.backend.models.source import Found, Wanted
from foreload.errors import FileError
from foreload.files import read_mapping

FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"
SCALE = "_scale_inv"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


class WeightFolder:
    """The safetensors of one folder. `tile` is the (rows, columns) that share a scale where weights are fp8."""

    def __init__(self, folder: Path, tile: tuple[int, int] | None = None) -> None:
        self._folder = folder
        self._tile = tile

    @property
    def where(self) -> str:
        """The folder."""
        return str(self._folder)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Tensor name -> file: by the index, else by the headers of what files there are."""
        index = self._folder / "model.safetensors.index.json"
        if index.exists():
            return self._indexed(index)
        single = self._folder / "model.safetensors"
        shards = [] if single.exists() else sorted(self._folder.glob("*.safetensors"))
        found: dict[str, Path] = {}
        for path in shards or [single]:
            with _opened(path) as file:
                found |= dict.fromkeys(file.keys(), path)
        for path in shards:
            self._check_whole(path)
        return found

    def _indexed(self, index: Path) -> dict[str, Path]:
        weight_map = read_mapping(index, "weight index").get("weight_map")
        if not isinstance(weight_map, dict):
            raise FileError(f"{index}: field 'weight_map' is missing")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise FileError(f"{index}: tensor {name!r} is in {file!r}: the name of a file in this folder is needed")
        return {name: self._folder / file for name, file in weight_map.items()}

    @staticmethod
    def _check_whole(path: Path) -> None:
        """FileError naming a shard that the numbering of `path` says there is, and is not."""
        numbered = _SHARD.fullmatch(path.name)
        if numbered is None:
            return
        stem, _, total = numbered.groups()
        for number in range(1, int(total) + 1):
            other = path.with_name(f"{stem}-{number:05d}-of-{total}.safetensors")
            if not other.exists():
                raise FileError(f"{other}: weights are missing, shard {number} of {int(total)}")

    def has(self, name: str) -> bool:
        """Whether index or headers know a tensor of that name."""
        return name in self._files

    def files(self) -> list[Path]:
        """The weight files, sorted."""
        return sorted(set(self._files.values()))

    def hash(self) -> str:
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

    def read(self, wanted: Sequence[Wanted], device: torch.device | None = None) -> Iterator[tuple[Wanted, Found]]:
        """The wanted tensors on the CPU, file by file; FileError for one that is missing, odd or corrupt."""
        by_file: dict[Path, list[Wanted]] = {}
        for one in wanted:
            by_file.setdefault(self._file(_main(one)), []).append(one)
        for group in by_file.values():
            with ExitStack() as stack:
                opened: dict[Path, _Shard] = {}
                for one in group:
                    yield one, self._one(one, opened, stack)
            del opened

    def _file(self, name: str) -> Path:
        path = self._files.get(name)
        if path is None:
            raise FileError(f"{self._folder}: tensor {name!r} is missing from the weights")
        return path

    def _shard(self, name: str, opened: dict[Path, _Shard], stack: ExitStack) -> _Shard:
        path = self._file(name)
        if path not in opened:
            opened[path] = _Shard(path, stack.enter_context(_opened(path)))
        return opened[path]

    def _one(self, one: Wanted, opened: dict[Path, _Shard], stack: ExitStack) -> Found:
        name = _main(one)
        shard = self._shard(name, opened, stack)
        if one.stored == "mxfp4":
            return self._mxfp4(one, shard, self._shard(one.name + "_scales", opened, stack))
        dtypes = (FP8,) if one.stored == "fp8_tile" else (*FLOATS, FP8) if self._tile is not None else FLOATS
        read = shard.part(name, one.size, one.index, dtypes)
        tiles = None
        if read.dtype == torch.float8_e4m3fn:
            tiles = self._fp8(one, read, self._shard(name + SCALE, opened, stack))
        found = read if tiles is None else tiles if one.stored == "fp8_tile" else tiles.floats()
        values = (found,) if isinstance(found, Tensor) else (found.weights.float(), found.scales)
        if not all(bool(part.isfinite().all()) for part in values):
            raise FileError(f"{shard.path}: tensor {name!r} holds NaN or infinity")
        return found

    def _fp8(self, one: Wanted, weights: Tensor, other: _Shard) -> Fp8Tiles:
        assert self._tile is not None
        (rows, columns), (tall, wide) = one.size, self._tile
        scales = other.part(one.name + SCALE, (-(-rows // tall), -(-columns // wide)), None, FLOATS)
        return Fp8Tiles(weights, scales.float().repeat_interleave(tall, 0)[:rows], wide)

    @staticmethod
    def _mxfp4(one: Wanted, shard: _Shard, other: _Shard) -> Mxfp4:
        rows, columns = one.size
        if columns % MX_BLOCK:
            raise FileError(
                f"{shard.path}: tensor {one.name!r} has rows of {columns}: MXFP4 needs multiples of {MX_BLOCK}"
            )
        groups = columns // MX_BLOCK
        blocks = shard.part(one.name + "_blocks", (rows, groups, MX_BYTES), one.index, ("U8",))
        scales = other.part(one.name + "_scales", (rows, groups), one.index, ("U8",))
        if bool((scales == MX_NAN).any()):
            raise FileError(f"{other.path}: tensor {one.name + '_scales'!r} holds NaN")
        return Mxfp4(blocks, scales)


class _Shard:
    """One open file."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path = path
        self._file = file
        self._names = set(file.keys())

    def part(self, name: str, size: tuple[int, ...], index: tuple[int, int] | None, dtypes: tuple[str, ...]) -> Tensor:
        """A tensor of `size`, or entry `index[0]` of one that stacks `index[1]` of them; FileError otherwise."""
        if name not in self._names:
            raise FileError(f"{self.path}: tensor {name!r} is missing, though the index names this file")
        view = self._file.get_slice(name)
        needed = size if index is None else (index[1], *size)
        found = tuple(view.get_shape())
        if found != needed:
            raise FileError(f"{self.path}: tensor {name!r} is {found}: {needed} is needed")
        if view.get_dtype() not in dtypes:
            kind = "a float type" if "F32" in dtypes else " or ".join(dtypes)
            raise FileError(f"{self.path}: tensor {name!r} is {view.get_dtype()}: {kind} is needed")
        tensor: Tensor = view[:] if index is None else view[index[0]]
        return tensor


def _main(one: Wanted) -> str:
    return one.name + "_blocks" if one.stored == "mxfp4" else one.name


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise FileError(f"{path}: weights are missing") from error
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path}: not a readable safetensors file: {error}") from error
