"""The header of a GGUF file: metadata and the table of tensors, without any weight (llama.cpp's format, versions 2, 3).

Split files are followed by their numbering, `-00001-of-0000N.gguf`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from foreload.errors import FileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_DIMENSIONS = 4
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

BLOCKS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Number of a tensor type -> name, values in a block, bytes of a block."""


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table; `sizes` come fastest dimension first."""

    name: str
    sizes: tuple[int, ...]
    type: str
    bytes: int

    @property
    def weights(self) -> int:
        """Number of values."""
        count = 1
        for size in self.sizes:
            count *= size
        return count


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a model, over all its files."""

    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]
    files: tuple[Path, ...]


def read_gguf(path: Path) -> GgufHeader:
    """The header of a file and of all files it is split into; FileError for a missing, truncated or odd one."""
    files = _split(path)
    fields: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for number, file in enumerate(files):
        own, table = _Reader.read(file)
        fields = own if number == 0 else fields
        for tensor in table:
            if tensor.name in tensors:
                raise FileError(f"{file}: tensor {tensor.name!r} is there twice")
            tensors[tensor.name] = tensor
    return GgufHeader(fields, tensors, tuple(files))


def _split(path: Path) -> list[Path]:
    numbered = _SPLIT.fullmatch(path.name)
    if numbered is None:
        return [path]
    stem, _, total = numbered.groups()
    files = [path.with_name(f"{stem}-{n:05d}-of-{total}.gguf") for n in range(1, int(total) + 1)]
    for number, file in enumerate(files, 1):
        if not file.is_file():
            raise FileError(f"{file}: file {number} of {int(total)} is missing")
    return files


class _Reader:
    """Reads one file's header from its start; nothing is read that the file is too short for."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size

    @classmethod
    def read(cls, path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
        try:
            with path.open("rb") as file:
                return cls(path, file, path.stat().st_size)._header()
        except OSError as error:
            raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _header(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        if self._take(4) != MAGIC:
            raise FileError(f"{self._path}: not a GGUF file")
        version = self._scalar("I")
        if version not in VERSIONS:
            raise FileError(f"{self._path}: GGUF version {version}: versions 2 and 3 are known")
        tensors, fields = self._scalar("Q"), self._scalar("Q")
        found = {self._string(): self._value(self._scalar("I")) for _ in range(fields)}
        return found, [self._tensor() for _ in range(tensors)]

    def _take(self, count: int) -> bytes:
        if count > self._size - self._file.tell():
            raise FileError(f"{self._path}: the header ends early, after {self._size} bytes")
        return self._file.read(count)

    def _scalar(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self._take(struct.calcsize("<" + kind)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode(errors="replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise FileError(f"{self._path}: a metadata field has type {kind}: not a GGUF type")
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[inner])
            if count * size > self._size:
                raise FileError(f"{self._path}: the header ends early, after {self._size} bytes")
            return struct.unpack(f"<{count}{_SCALARS[inner]}", self._take(count * size))
        if inner != _STRING:
            raise FileError(f"{self._path}: a metadata array has type {inner}: scalars and strings are known")
        return tuple(self._string() for _ in range(count))

    def _tensor(self) -> GgufTensor:
        name = self._string()
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise FileError(
                f"{self._path}: tensor {name!r} has {dimensions} dimensions: 1 to {MOST_DIMENSIONS} are known"
            )
        sizes = tuple(self._scalar("Q") for _ in range(dimensions))
        kind, _offset = self._scalar("I"), self._scalar("Q")
        if kind not in BLOCKS:
            known = ", ".join(name for name, _, _ in BLOCKS.values())
            raise FileError(f"{self._path}: tensor {name!r} has type {kind}: known are {known}")
        label, values, block_bytes = BLOCKS[kind]
        if min(sizes) < 1 or sizes[0] % values:
            raise FileError(f"{self._path}: tensor {name!r} is {sizes}: {label} needs rows in multiples of {values}")
        tensor = GgufTensor(name, sizes, label, 0)
        return GgufTensor(name, sizes, label, tensor.weights // values * block_bytes)
