"""Models to load: what their configuration says, and their tensors by our names, one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from foreload.assets import ASSETS
from foreload.backend.byte_tokenizer import ByteTokenizer
from foreload.backend.models import deepseek, dense, gpt_oss, mixtral, qwen
from foreload.backend.models.config import ConfigFields, shown
from foreload.backend.models.family import ExpertLayout, ExpertPart, Family
from foreload.backend.models.folder import WeightFolder
from foreload.backend.models.packed import MX_BLOCK
from foreload.backend.models.published import SCHEME, published_config, published_names
from foreload.backend.models.random_weights import RandomWeights
from foreload.backend.models.source import Found, Wanted, WeightSource
from foreload.backend.models.tensors import global_tensors, layer_tensors
from foreload.backend.tokenizer import TextTokenizer
from foreload.errors import FileError, UsageError
from foreload.files import read_bytes, read_mapping
from foreload.formats import PackedFormat
from foreload.shape import ModelShape

FAMILIES: dict[str, Family] = {
    family.model_type: family for module in (qwen, mixtral, gpt_oss, deepseek) for family in module.FAMILIES
}
DENSE_FAMILIES: dict[str, Family] = {family.model_type: family for family in dense.FAMILIES}
BUNDLED, BUNDLED_DENSE = ("mini",), ("draft",)


def locate(model: str) -> Path:
    """The folder of MODEL: a local Hugging Face folder or a bundled name; UsageError says what is accepted."""
    if model in BUNDLED:
        return ASSETS / model
    folder = Path(model)
    if not folder.is_dir():
        raise UsageError(
            f"model {model!r} is no folder here: give a Hugging Face folder or {' or '.join(BUNDLED)} "
            f"or {SCHEME}NAME ({', '.join(published_names())})"
        )
    return folder


def read_shape(
    config: dict[str, object], source: str, families: Mapping[str, Family] = FAMILIES
) -> tuple[Family, ModelShape]:
    """Family and shape in a configuration; FileError if its family is unknown or a field cannot be run."""
    family = families.get(str(config.get("model_type")))
    if family is None:
        known = ", ".join(families)
        raise FileError(f"{source}: model_type {shown(config.get('model_type'))} is not known: known are {known}")
    fields = ConfigFields(config, source)
    quantised = fields.section("quantization_config")
    if quantised is not None and quantised.get("quant_method") not in family.formats:
        known = " or ".join(family.formats) or "none"
        raise quantised.refuse("quant_method", f"{family.model_type} can be read in float or {known}")
    shape = family.shape(fields)
    if quantised is not None and quantised.get("quant_method") == "mxfp4":
        if shape.hidden % MX_BLOCK or shape.expert_width % MX_BLOCK:
            sizes = f"{shape.hidden} and {shape.expert_width}"
            raise FileError(f"{source}: experts of {sizes}: MXFP4 needs multiples of {MX_BLOCK}")
        shape = replace(shape, stored_experts="mxfp4")
    tile = _tile(fields)
    if tile is not None:
        shape = replace(shape, stored_experts="fp8_tile", expert_tile=tile[1])
    if shape.top_k > shape.experts:
        raise FileError(f"{source}: {shape.top_k} experts per token of {shape.experts}: the first must not be larger")
    return family, shape


@dataclass(frozen=True)
class Checkpoint:
    """A model whose configuration has been read and understood; no weight is loaded yet.

    `folder` is None for random weights in a published shape, whose `source` makes them as they are asked for.
    """

    name: str
    family: Family
    shape: ModelShape
    source: WeightSource
    folder: Path | None = None
    tile: tuple[int, int] | None = None
    """Rows and columns that share a scale where weights are fp8 on disk."""

    @classmethod
    def open(cls, model: str) -> Checkpoint:
        """Read the configuration of MODEL; FileError if it is missing, corrupt or of an unknown family."""
        if model.startswith(SCHEME):
            return cls.random(model.removeprefix(SCHEME))
        folder = locate(model)
        path = folder / "config.json"
        config = read_mapping(path, "model configuration")
        family, shape = read_shape(config, str(path))
        tile = _tile(ConfigFields(config, str(path)))
        name = model if model in BUNDLED else folder.resolve().name
        return cls(name, family, shape, WeightFolder(folder, tile), folder, tile)

    @classmethod
    def open_dense(cls, model: str) -> Checkpoint:
        """Read the configuration of a dense model, a folder or a bundled name; errors as for `open`."""
        folder = ASSETS / model if model in BUNDLED_DENSE else Path(model)
        if not folder.is_dir():
            known = " or ".join(BUNDLED_DENSE)
            raise UsageError(f"draft model {model!r} is no folder here: give a Hugging Face folder or {known}")
        path = folder / "config.json"
        family, shape = read_shape(read_mapping(path, "model configuration"), str(path), DENSE_FAMILIES)
        name = model if model in BUNDLED_DENSE else folder.resolve().name
        return cls(name, family, shape, WeightFolder(folder), folder)

    @classmethod
    def random(cls, name: str, **changed: object) -> Checkpoint:
        """Random weights in a published shape; `changed` configuration fields (smaller sizes for a test).

        With fewer layers than published, what is said of each layer is that of the first ones.
        """
        published = published_config(name)
        layers = changed.get("num_hidden_layers", published["num_hidden_layers"])
        each = {key: said[:layers] for key, said in published.items() if key.endswith("layer_types")}
        config = {**published, **each, **changed}
        family, shape = read_shape(config, SCHEME + name)
        return cls(SCHEME + name, family, shape, RandomWeights(shape.hash))

    @property
    def stored(self) -> PackedFormat:
        """Format of the experts on disk, by what the configuration says of them; bf16 stands for any plain float."""
        return "bf16" if self.shape.stored_experts == "float" else self.shape.stored_experts

    def tokenizer(self) -> TextTokenizer:
        """The folder's tokenizer; for random weights, the bytes of the text."""
        return ByteTokenizer(self.shape.vocab) if self.folder is None else TextTokenizer(self.folder)

    def files(self) -> list[Path]:
        """The weight files, sorted; none for random weights."""
        return self.source.files()

    @cached_property
    def weights_hash(self) -> str:
        """Sixteen hex digits of the weight files' SHA-256, or of what random weights are made from."""
        return self.source.hash()

    @cached_property
    def tokenizer_hash(self) -> str:
        """Sixteen hex digits of the tokenizer's SHA-256."""
        if self.folder is None:
            return hashlib.sha256(f"bytes {self.shape.vocab}".encode()).hexdigest()[:16]
        return hashlib.sha256(read_bytes(self.folder / "tokenizer.json", "tokenizer")).hexdigest()[:16]

    @cached_property
    def layout(self) -> ExpertLayout:
        """How the routed experts are laid out; FileError names the tensors looked for if they are not there."""
        layer = self.shape.moe_layers[0]
        for layout in self.family.layouts:
            if self.source.has(layout.first(layer)):
                return layout
        looked = " or ".join(repr(layout.first(layer)) for layout in self.family.layouts)
        raise FileError(f"{self.source.where}: tensor {looked} is missing from the weights")

    def read_dense(self, device: torch.device | None = None) -> Iterator[tuple[int | None, str, Tensor]]:
        """All tensors but the routed experts, as (layer, our name, float tensor); layer None: not in a layer.

        `device` is where random weights are made; tensors of files come on the CPU.
        """
        wanted = [self._wanted(None, name, size) for name, size in global_tensors(self.shape).items()]
        for layer in range(self.shape.layers):
            wanted += [self._wanted(layer, name, size) for name, size in layer_tensors(self.shape, layer).items()]
        for one, tensor in self.source.read(wanted, device):
            layer, name = one.tag
            assert isinstance(tensor, Tensor)
            yield layer, name, tensor

    def _wanted(self, layer: int | None, name: str, size: tuple[int, ...]) -> Wanted:
        spellings = self.family.spellings(name, layer)
        spelt = next((one for one in spellings if self.source.has(one)), spellings[0])
        return Wanted(spelt, size, (layer, name))

    def read_experts(self, device: torch.device | None = None) -> Iterator[tuple[int, int, ExpertPart, Tensor]]:
        """All parts of all routed experts, as (MoE layer, expert, part, float tensor [out, in] or bias [out])."""
        for at, expert, part, found in self.read_stored(device):
            yield at, expert, part, found if isinstance(found, Tensor) else found.floats()

    def read_stored(self, device: torch.device | None = None) -> Iterator[tuple[int, int, ExpertPart, Found]]:
        """As `read_experts`, but matrices that are stored as MXFP4 or fp8 come packed, as they are."""
        layout, shape = self.layout, self.shape
        sizes = expert_sizes(shape)
        own = shape.stored_experts if shape.stored_experts == "fp8_tile" else layout.stored
        wanted = []
        for at, layer in enumerate(shape.moe_layers):
            for part, pattern in layout.parts.items():
                for expert in range(shape.experts):
                    name = pattern.format(layer=layer, expert=expert)
                    stored = own if "bias" not in part else "float"
                    turned = layout.transposed and "bias" not in part
                    size = sizes[part][::-1] if turned else sizes[part]
                    index = (expert, shape.experts) if layout.stacked else None
                    wanted.append(Wanted(name, size, (at, expert, part, turned), index, stored))
        for one, tensor in self.source.read(wanted, device):
            at, expert, part, turned = one.tag
            yield at, expert, part, tensor.T if turned and isinstance(tensor, Tensor) else tensor

    def check_names(self) -> None:
        """FileError naming the first tensor that is needed and that neither index nor headers know."""
        for layer in [None, *range(self.shape.layers)]:
            sizes = global_tensors(self.shape) if layer is None else layer_tensors(self.shape, layer)
            for name in sizes:
                self._check(self._wanted(layer, name, ()).name)
        for layer in self.shape.moe_layers:
            for expert in range(1 if self.layout.stacked else self.shape.experts):
                for part, pattern in self.layout.parts.items():
                    name = pattern.format(layer=layer, expert=expert)
                    packed = self.layout.stored == "mxfp4" and "bias" not in part
                    for spelt in (f"{name}_blocks", f"{name}_scales") if packed else (name,):
                        self._check(spelt)

    def _check(self, name: str) -> None:
        if not self.source.has(name):
            raise FileError(f"{self.source.where}: tensor {name!r} is missing from the weights")

    def expert_name(self, at: int, expert: int) -> str:
        """What errors call an expert: the name of its first tensor."""
        pattern = next(iter(self.layout.parts.values()))
        name = pattern.format(layer=self.shape.moe_layers[at], expert=expert)
        return f"{name}[{expert}]" if self.layout.stacked else name

    def expert_parts(self) -> int:
        """Number of tensors that `read_experts` yields."""
        return self.shape.all_experts * len(self.layout.parts)


def _tile(config: ConfigFields) -> tuple[int, int] | None:
    """Rows and columns that share a scale in fp8 weights; None for others."""
    quantised = config.section("quantization_config")
    if quantised is None or quantised.get("quant_method") != "fp8":
        return None
    tile = quantised.get("weight_block_size")
    if not isinstance(tile, list) or len(tile) != 2 or not all(type(size) is int and size > 0 for size in tile):
        raise quantised.refuse("weight_block_size", "two whole numbers above 0 are needed")
    return tile[0], tile[1]


def expert_sizes(shape: ModelShape) -> dict[ExpertPart, tuple[int, ...]]:
    """Size of each part of one expert, matrices as [out, in]."""
    width, hidden = shape.expert_width, shape.hidden
    return {
        "gate": (width, hidden),
        "up": (width, hidden),
        "gate_up": (2 * width, hidden),
        "down": (hidden, width),
        "gate_up_bias": (2 * width,),
        "down_bias": (hidden,),
    }
