"""What a model holds and where it must lie, from its configuration and weight index, or a GGUF header, alone."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.gguf import GgufHeader, GgufTensor, read_gguf
from foreload.backend.models.packed import MX_BLOCK, MX_BYTES
from foreload.errors import FileError
from foreload.formats import block_layout
from foreload.plan import Inventory
from foreload.shape import Latent, ModelShape

_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_(ch)?exps\.(weight|bias|scale)")
_SHARED = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_inp)_shexp\.")


def take_inventory(model: str) -> Inventory:
    """The inventory of MODEL, which may also be a GGUF file; FileError or UsageError if it cannot be read.

    Where there are weights, every tensor that is needed must be in their index or headers.
    """
    if model.endswith(".gguf"):
        return _of_gguf(Path(model))
    checkpoint = Checkpoint.open(model)
    shape = checkpoint.shape
    stored = checkpoint.stored
    return Inventory(
        name=checkpoint.name,
        read_from=_read_from(checkpoint),
        shape=shape,
        stored=stored,
        formats={name: block_layout(name, shape).bytes for name in ("bf16", "bf12", "fp8", "int8", "mxfp4")},
        expert_bytes=_stored_bytes(checkpoint),
        slot_bytes=block_layout(stored, shape).bytes,
        experts_bytes=shape.all_experts * block_layout(stored, shape).bytes,
        embedding_bytes=2 * shape.embedding_weights,
        shared_bytes=2 * shape.n_moe_layers * shape.shared_weights,
        dense_bytes=shape.dense_bytes("bfloat16"),
        total_weights=shape.total_weights,
        active_weights=shape.active_weights,
    )


def _read_from(checkpoint: Checkpoint) -> str:
    if checkpoint.folder is None:
        return "published configuration"
    if not any(checkpoint.folder.glob("*.safetensors*")):
        return "configuration alone"
    checkpoint.check_names()
    files = len(checkpoint.files())
    return f"configuration and the index of {files} weight file{'s' if files > 1 else ''}"


def _stored_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of one expert on disk: plain floats and biases count as bfloat16."""
    shape = checkpoint.shape
    matrices = [(2 * shape.expert_width, shape.hidden), (shape.hidden, shape.expert_width)]
    biases = shape.expert_weights - sum(rows * columns for rows, columns in matrices)
    if checkpoint.stored == "mxfp4":
        return sum(rows * (columns // MX_BLOCK) * (MX_BYTES + 1) for rows, columns in matrices) + 2 * biases
    if checkpoint.tile is None:
        return 2 * shape.expert_weights
    rows_per, columns_per = checkpoint.tile
    thirds = [(shape.expert_width, shape.hidden)] * 2 + matrices[1:]
    scales = sum(-(-rows // rows_per) * -(-columns // columns_per) for rows, columns in thirds)
    return shape.expert_weights + 4 * scales


def _of_gguf(path: Path) -> Inventory:
    header = read_gguf(path)
    experts = [tensor for name, tensor in header.tensors.items() if _EXPERT.match(name)]
    if not experts:
        raise FileError(f"{path}: no expert tensors (blk.N.ffn_*_exps): this is no Mixture-of-Experts model")
    shape = _gguf_shape(path, header, experts)
    others = [tensor for name, tensor in header.tensors.items() if not _EXPERT.match(name)]
    by_layer: dict[int, int] = dict.fromkeys(shape.moe_layers, 0)
    for tensor in experts:
        by_layer[_layer(tensor)] += tensor.bytes // shape.experts
    expert_weights = sum(tensor.weights for tensor in experts)
    dense_weights = sum(tensor.weights for tensor in others)
    return Inventory(
        name=path.name,
        read_from=f"header of {len(header.files)} GGUF file{'s' if len(header.files) > 1 else ''}",
        shape=shape,
        stored=" + ".join(sorted({tensor.type for tensor in experts if tensor.name.endswith("weight")})),
        formats={},
        expert_bytes=max(by_layer.values()),
        slot_bytes=max(by_layer.values()),
        experts_bytes=sum(tensor.bytes for tensor in experts),
        embedding_bytes=sum(t.bytes for t in others if t.name in ("token_embd.weight", "output.weight")),
        shared_bytes=sum(tensor.bytes for tensor in others if _SHARED.match(tensor.name)),
        dense_bytes=sum(tensor.bytes for tensor in others),
        total_weights=dense_weights + expert_weights,
        active_weights=dense_weights + expert_weights * shape.top_k // shape.experts,
    )


def _layer(tensor: GgufTensor) -> int:
    found = _EXPERT.match(tensor.name)
    assert found is not None
    return int(found.group(1))


class _Fields:
    """Metadata of one architecture by the end of their names."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path, self._fields = path, header.fields
        self.architecture = str(header.fields.get("general.architecture"))

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._fields.get(f"{self.architecture}.{name}", default)
        if isinstance(value, tuple):  # one per layer
            value = max(value, default=None)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            field = f"{self.architecture}.{name}"
            raise FileError(f"{self._path}: field {field!r} is {value!r}: a whole number above {least - 1} is needed")
        return value


def _gguf_shape(path: Path, header: GgufHeader, experts: list[GgufTensor]) -> ModelShape:
    """A shape of which only sizes are known: names are `unknown`, and what routing and norms need is empty."""
    known = _Fields(path, header)
    layers, hidden, heads = (
        known.count("block_count"),
        known.count("embedding_length"),
        known.count("attention.head_count"),
    )
    count, moe_layers = known.count("expert_count"), tuple(sorted({_layer(tensor) for tensor in experts}))
    if moe_layers[-1] >= layers or any(tensor.sizes[-1] != count for tensor in experts):
        raise FileError(f"{path}: expert tensors do not fit {layers} layers of {count} experts")
    rank, rope = (
        known.count("attention.kv_lora_rank", 0, 0),
        known.count("rope.dimension_count", hidden // heads),
    )
    head_dim, top_k = known.count("attention.key_length", hidden // heads), known.count("expert_used_count")
    if top_k > count:
        raise FileError(f"{path}: {top_k} experts per token of {count}: the first must not be larger")
    window = known.count("attention.sliding_window", 0, 0)
    pattern = known.count("attention.sliding_window_pattern", 2)
    values: dict[str, Any] = {
        "layers": layers,
        "moe_layers": moe_layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": known.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "experts": count,
        "top_k": top_k,
        "expert_width": known.count("expert_feed_forward_length", known.count("feed_forward_length", 1)),
        "max_positions": known.count("context_length"),
        "latent": Latent(0, rank, head_dim, rope, head_dim) if rank else None,
        "windows": tuple(0 if window == 0 or n % pattern == pattern - 1 else window for n in range(layers)),
    }
    empty: dict[str, Any] = {"int": 0, "float": 0.0, "bool": False}
    missing = [f for f in fields(ModelShape) if f.default is MISSING and f.name not in values]
    return ModelShape(**{f.name: empty.get(str(f.type), "unknown") for f in missing}, **values)
