"""The part of GGUF that importance matrices use: metadata and one-dimensional float tensors."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from foreload.traces.importers.base import Source

MAGIC = b"GGUF"
F32 = 0
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 24  # no name or list of an importance matrix comes near


class Gguf:
    """Metadata and tensor index of an open file; FileError if it is damaged."""

    def __init__(self, source: Source, file: BinaryIO) -> None:
        self._source, self._file = source, file
        self._size = os.fstat(file.fileno()).st_size
        version, tensors, pairs = self._unpack("I"), 0, 0
        if version not in (2, 3):
            raise source.error("", f"GGUF version {version}: 2 and 3 are known")
        tensors, pairs = self._unpack("Q"), self._unpack("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            name = self._string()
            self.metadata[name] = self._value(self._unpack("I"))
        self._index: dict[str, tuple[list[int], int, int]] = {}
        for _ in range(tensors):
            name = self._string()
            dims = [self._unpack("Q") for _ in range(self._unpack("I"))]
            self._index[name] = (dims, self._unpack("I"), self._unpack("Q"))
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise source.error("general.alignment", f"{align!r} is no alignment")
        self._data = -(-file.tell() // align) * align

    def names(self) -> Iterator[str]:
        """Tensor names in the file's order."""
        return iter(self._index)

    def floats(self, name: str) -> NDArray[np.float32]:
        """A tensor of float32, flat; FileError if it is of another type or cut."""
        dims, kind, offset = self._index[name]
        if offset >= self._size:
            raise self._source.error(name, "GGUF file ends early: truncated")
        if kind != F32:
            raise self._source.error(name, f"tensor type {kind}: float32 ({F32}) is needed")
        self._file.seek(self._data + offset)
        size = math.prod(dims)
        if size > _LONGEST:
            raise self._source.error(name, f"{size} values: no list of counts is that long")
        return np.frombuffer(self._bytes(4 * size), "<f4")

    def _bytes(self, count: int) -> bytes:
        raw = self._file.read(count)
        if len(raw) < count:
            raise self._source.error("", "GGUF file ends early: truncated")
        return raw

    def _unpack(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))[0]

    def _length(self) -> int:
        length = int(self._unpack("Q"))
        if length > _LONGEST:
            raise self._source.error("", f"GGUF file is damaged: a length of {length}")
        return length

    def _string(self) -> str:
        return self._bytes(self._length()).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        readers: dict[int, Callable[[], Any]] = {_STRING: self._string}
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])
        if kind == _ARRAY:
            item = self._unpack("I")
            return [self._value(item) for _ in range(self._length())]
        if kind in readers:
            return readers[kind]()
        raise self._source.error("", f"GGUF file is damaged: metadata of type {kind}")
