"""Converted experts kept on disk, so that packing a large model is done once.

One file per model and choice of formats under `$XDG_CACHE_HOME/foreload/experts` (default `~/.cache`), written whole or
not at all; a file that is not what its first line says is converted anew. Deleting the folder loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import FileError
from foreload.files import atomic_path
from foreload.formats import BlockLayout

VERSION = 1
"""Raise it when packing or layout change what a format's bytes mean."""
SMALLEST_BYTES = 64 << 20
"""Below this, packing is quicker than looking."""
CHUNK_BYTES = 16 << 20


def folder() -> Path:
    """Where conversions are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foreload" / "experts"


class Conversion:
    """The slab's bytes of one checkpoint in certain formats, as a file."""

    def __init__(self, checkpoint: Checkpoint, layouts: Sequence[BlockLayout]) -> None:
        stored = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.files()]
        weights = stored or checkpoint.weights_hash
        formats = [(layout.format, layout.bytes) for layout in layouts]
        text = json.dumps([VERSION, checkpoint.shape.hash, weights, formats])
        self._key = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.path = folder() / f"{self._key}.bin"

    def load(self, slab: Tensor) -> bool:
        """Fill `slab` (uint8) from the file; False, with the slab undefined, if there is none that fits."""
        try:
            with self.path.open("rb") as file:
                header = json.loads(file.readline(4096))
                if header != {**self._header(slab), "crc32": header.get("crc32")}:
                    return False
                checksum = 0
                for part in slab.split(CHUNK_BYTES):
                    target = memoryview(part.numpy())
                    if file.readinto(target) != len(target):
                        return False
                    checksum = zlib.crc32(target, checksum)
                return bool(checksum == header["crc32"])
        except (OSError, ValueError, AttributeError):
            return False

    def save(self, slab: Tensor) -> bool:
        """Keep the slab's bytes; False if the disk has no room for them (half as much again is left free)."""
        checksum = 0
        for part in slab.split(CHUNK_BYTES):
            checksum = zlib.crc32(memoryview(part.numpy()), checksum)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self.path.parent).free < 1.5 * slab.numel():
                return False
            with atomic_path(self.path) as partial, partial.open("wb") as file:
                file.write(json.dumps({**self._header(slab), "crc32": checksum}).encode() + b"\n")
                for part in slab.split(CHUNK_BYTES):
                    file.write(memoryview(part.numpy()))
        except (FileError, OSError):
            return False
        return True

    def _header(self, slab: Tensor) -> dict[str, object]:
        return {"key": self._key, "bytes": slab.numel()}
