"""llama.cpp's importance matrices (GGUF): how often each expert was used over the calibration text, without order."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from foreload.traces.importers.base import Counts, Source
from foreload.traces.importers.gguf import MAGIC, Gguf
from foreload.traces.importers.json_files import unreadable

_LARGEST = 2.0**53
_COUNTS = re.compile(r"blk\.(\d+)\.ffn_(gate|gate_up|up|down)_(?:ch)?exps\.weight\.counts")


def imatrix(source: Source) -> Counts:
    """Counts of `blk.N.ffn_*_exps.weight`; FileError for the legacy format, which has none per expert."""
    try:
        with source.path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise source.error(
                    "", "not GGUF: a legacy .dat importance matrix has one count per tensor and none per expert: "
                    "write it as GGUF with llama-imatrix"
                )  # fmt: skip
            return Counts(_counts(source, Gguf(source, file)))
    except OSError as error:
        raise unreadable(source.path, error) from error


def _counts(source: Source, gguf: Gguf) -> NDArray[np.int64]:
    kind = gguf.metadata.get("general.type")
    if kind != "imatrix":
        raise source.error("general.type", f"{kind!r}: 'imatrix' is needed")
    shape = source.shape
    found: dict[int, NDArray[np.int64]] = {}
    for name in gguf.names():
        match = _COUNTS.fullmatch(name)
        if match is None:
            continue
        layer = int(match[1])
        counts = _whole(source, name, gguf.floats(name))
        if layer not in shape.moe_layers:
            raise source.error(name, f"layer {layer} is no MoE layer of the model: give them with --moe-layers")
        if len(counts) != shape.experts:
            raise source.error(name, f"counts of {len(counts)} experts: the model has {shape.experts}")
        if layer in found and (found[layer] != counts).any():
            source.note(f"layer {layer}: its tensors were counted differently: the largest counts are taken")
            counts = np.maximum(found[layer], counts)
        found[layer] = counts
    missing = [layer for layer in shape.moe_layers if layer not in found]
    if missing:
        raise source.error(
            "", f"layer {missing[0]} has no counts of experts (blk.{missing[0]}.ffn_*_exps.weight.counts)"
        )
    source.note("counted over the calibration text, that is in prefill")
    return np.stack([found[layer] for layer in shape.moe_layers])


def _whole(source: Source, name: str, values: NDArray[np.float32]) -> NDArray[np.int64]:
    bad = ~(values >= 0) | (values > _LARGEST)
    if bad.any():
        row = int(np.argmax(bad))
        raise source.error(name, f"expert {row}: a count of {values[row]}")
    return np.rint(values).astype(np.int64)
