"""Whether a model fits a machine, before any weight is loaded: a budget in bytes, slots, and a range of tokens/s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreload.budget import chunk_bytes, working_bytes
from foreload.errors import BudgetError, UsageError
from foreload.formats import layer_bytes, layer_formats, slot_bytes
from foreload.settings import Settings, staging_slots
from foreload.shape import ModelShape
from foreload.units import format_bytes


@dataclass(frozen=True)
class Inventory:
    """What a model holds. Bytes of `dense`, with `embedding` and `shared` in it, are those on the device."""

    name: str
    read_from: str
    shape: ModelShape
    stored: str  # format of the experts on disk
    formats: Mapping[str, int]  # bytes of one expert in each format that it can be converted to
    expert_bytes: int  # of one expert as stored, in the layer where they are largest
    slot_bytes: int  # of one expert as stored, in a slot
    experts_bytes: int  # of all experts as stored, in host memory
    embedding_bytes: int
    shared_bytes: int
    dense_bytes: int
    total_weights: int
    active_weights: int


@dataclass(frozen=True)
class Rates:
    """Bytes per second, slow and fast end, and where they come from.

    `layer_ns` is what one MoE layer takes beside reading experts; where it is measured it holds dense weights too.
    """

    link: tuple[float, float]
    cpu: tuple[float, float]
    device: tuple[float, float]
    source: str
    layer_ns: tuple[int, int]
    measured: bool = False


ASSUMED = Rates(
    (12e9, 50e9),
    (15e9, 75e9),
    (300e9, 3000e9),
    "assumed: PCIe 3.0 to 5.0 x16, desktop to server memory",
    (1_000_000, 100_000),
)
"""The fast end is what one H200 host was measured at; the slow end is a desktop of some years ago."""


@dataclass(frozen=True)
class Plan:
    """An inventory under budgets. Sizes in bytes; `slots_per_layer` None where no device memory was given."""

    inventory: Inventory
    settings: Settings
    context_tokens: int
    format: str
    slot_bytes: int
    experts_bytes: int
    kv_bytes: int
    working_bytes: int
    staging: int
    slots_per_layer: int | None
    vram_bytes: int | None
    ram_bytes: int | None
    tokens_per_s: tuple[float, float] | None
    rates: Rates

    @property
    def fixed_bytes(self) -> int:
        """Device bytes beside the slots."""
        return self.inventory.dense_bytes + self.kv_bytes + self.working_bytes + self.settings.headroom_bytes

    @property
    def slots(self) -> int:
        """Persistent slots in all."""
        return (self.slots_per_layer or 0) * self.inventory.shape.n_moe_layers

    def device_rows(self) -> dict[str, int]:
        """What takes device memory, in bytes."""
        inventory = self.inventory
        rest = inventory.dense_bytes - inventory.embedding_bytes - inventory.shared_bytes
        return {
            "embeddings": inventory.embedding_bytes,
            "attention, norms, gates, dense layers": rest,
            "shared experts": inventory.shared_bytes,
            "keys and values": self.kv_bytes,
            "working memory": self.working_bytes,
            "headroom": self.settings.headroom_bytes,
            "staging slots": self.staging * self.slot_bytes,
            "cached experts": self.slots * self.slot_bytes,
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        inventory = self.inventory
        return {
            "model": inventory.name,
            "read_from": inventory.read_from,
            "total_params": inventory.total_weights,
            "active_params": inventory.active_weights,
            "moe_layers": inventory.shape.n_moe_layers,
            "experts": inventory.shape.experts,
            "top_k": inventory.shape.top_k,
            "stored_format": inventory.stored,
            "expert_format": self.format,
            "expert_bytes": inventory.expert_bytes,
            "slot_bytes": self.slot_bytes,
            "experts_bytes": self.experts_bytes,
            "context_tokens": self.context_tokens,
            "vram_bytes": self.vram_bytes,
            "ram_bytes": self.ram_bytes,
            "device_bytes": self.device_rows(),
            "host_bytes": self.experts_bytes,
            "staging_slots": self.staging,
            "slots_per_layer": self.slots_per_layer,
            "cache_ratio": None if self.slots_per_layer is None else self.slots_per_layer / inventory.shape.experts,
            "tokens_per_s": self.tokens_per_s,
            "rates_source": self.rates.source,
        }


def make_plan(
    inventory: Inventory,
    settings: Settings,
    context_tokens: int,
    vram_bytes: int | None = None,
    ram_bytes: int | None = None,
    rates: Rates = ASSUMED,
) -> Plan:
    """The plan under what budgets are given.

    If the experts as stored exceed `ram_bytes`, they are planned in the largest format that fits. Raises BudgetError
    with the shortfall if none does, or if device memory cannot hold what is always there and the staging slots.
    """
    name, expert, experts = _format(inventory, settings, ram_bytes)
    shape = inventory.shape
    kv, working = shape.kv_bytes("bfloat16", context_tokens), working_bytes(shape, "bfloat16", context_tokens)
    working += chunk_bytes(shape, "bfloat16", settings.prefill_chunk_tokens, context_tokens, grouped=True)
    staging = staging_slots(settings, shape)
    fixed = inventory.dense_bytes + kv + working + settings.headroom_bytes
    slots = None if vram_bytes is None else _slots(fixed, staging, expert, vram_bytes, shape)
    speed = None if slots is None else _speed(inventory, expert, slots / shape.experts, rates)
    return Plan(
        inventory=inventory,
        settings=settings,
        context_tokens=context_tokens,
        format=name,
        slot_bytes=expert,
        experts_bytes=experts,
        kv_bytes=kv,
        working_bytes=working,
        staging=staging,
        slots_per_layer=slots,
        vram_bytes=vram_bytes,
        ram_bytes=ram_bytes,
        tokens_per_s=speed,
        rates=rates,
    )


def _format(inventory: Inventory, settings: Settings, ram_bytes: int | None) -> tuple[str, int, int]:
    """Format, bytes of a slot and of all experts: as the settings say, else as stored, else the largest that fits."""
    stored = inventory.stored, inventory.slot_bytes, inventory.experts_bytes
    if settings.expert_format is not None:
        stored = _chosen(inventory, settings)
    if ram_bytes is None or stored[2] <= ram_bytes:
        return stored
    count = inventory.shape.all_experts
    others = () if settings.expert_format is not None else inventory.formats.items()
    smaller = sorted(
        ((name, size, size * count) for name, size in others if size < inventory.slot_bytes), key=lambda one: -one[1]
    )
    for name, size, total in smaller:
        if total <= ram_bytes:
            return name, size, total
    name, _, least = min([stored, *smaller], key=lambda one: one[2])
    short = least - ram_bytes
    raise BudgetError(
        f"host memory of {format_bytes(ram_bytes)} cannot hold the experts, {format_bytes(least)} in {name}: "
        f"{format_bytes(short)} ({short} bytes) short",
        "ram",
        short,
    )


def _chosen(inventory: Inventory, settings: Settings) -> tuple[str, int, int]:
    if not inventory.formats:
        raise UsageError(f"expert_format: {inventory.name} is planned as it is stored, {inventory.stored}")
    formats = layer_formats(settings.expert_format, inventory.shape, "bfloat16")
    sizes = layer_bytes(formats, inventory.shape)
    return " + ".join(sorted(set(formats))), slot_bytes(formats, inventory.shape), inventory.shape.experts * sum(sizes)


def _slots(fixed: int, staging: int, expert: int, vram_bytes: int, shape: ModelShape) -> int:
    """Persistent slots per layer beside `fixed` bytes and the staging slots."""
    spare = vram_bytes - fixed - staging * expert
    if spare < 0:
        raise BudgetError(
            f"device memory of {format_bytes(vram_bytes)} cannot hold {format_bytes(fixed)} of dense weights, keys, "
            f"values and headroom and {staging} staging slots of {format_bytes(expert)}: "
            f"{format_bytes(-spare)} ({-spare} bytes) short",
            "vram",
            -spare,
        )
    return min(shape.experts, spare // expert // shape.n_moe_layers)


def _speed(inventory: Inventory, expert: int, share: float, rates: Rates) -> tuple[float, float]:
    """Tokens/s, slow and fast end.

    Slow: experts are hit as often as they are resident, the others are copied over the slow link. Fast: hits by the
    root of that share, since texts come back to experts, and the rest read by link and CPU together at the fast end.
    """
    shape = inventory.shape
    routed = shape.n_moe_layers * shape.top_k * expert

    def seconds(hits: float, miss_rate: float, device: float, layer_ns: int) -> float:
        dense = 0.0 if rates.measured else inventory.dense_bytes / device
        own = shape.n_moe_layers * layer_ns / 1e9
        return own + dense + routed * hits / device + routed * (1 - hits) / miss_rate

    slow = seconds(share, rates.link[0], rates.device[0], rates.layer_ns[0])
    fast = seconds(math.sqrt(share), rates.link[1] + rates.cpu[1], rates.device[1], rates.layer_ns[1])
    return 1 / slow, 1 / fast
