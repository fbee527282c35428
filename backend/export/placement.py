"""Whole layers on devices: the form of a plan that engines without a cache of single experts understand.

A tensor of theirs holds all experts of a layer, so the slots of the settings become whole layers of the same bytes.
With several devices the decoder is cut into runs of layers, and a layer's experts stay where its attention is: experts
on another card than their layer cost a copy each way, and a card that gets attention alone stays half empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from foreload.backend.export.base import CPU, Placement, Target
from foreload.backend.export.tensors import dense_weights
from foreload.errors import BudgetError, UsageError
from foreload.settings import slot_counts
from foreload.units import format_bytes

Ends = tuple[int, int]
"""Weights outside the decoder's layers: on the first device, on the last."""
CHANGES = frozenset({"eviction", "half_life", "admission", "admit_per_step"})
"""Fields that say how residents change."""


def slots(target: Target, ends: Ends) -> tuple[int, ...]:
    """Persistent slots per MoE layer: those of the settings, or the largest uniform count that `gpus` hold."""
    settings, shape = target.settings, target.shape
    if settings.slots_per_layer is not None or settings.cache_ratio is not None:
        counts = slot_counts(settings, shape)
        need = fixed_bytes(target, ends) + sum(counts) * target.size(shape.expert_weights)
        if target.gpus and need > sum(target.gpus):
            raise _short(target, f"{sum(counts)} expert slots", need - sum(target.gpus))
        return counts
    if not target.gpus:
        raise UsageError("the settings leave the number of slots open: give the device memory with --gpu")
    free = sum(target.gpus) - fixed_bytes(target, ends)
    return slot_counts(settings, shape, max(0, free // target.size(shape.expert_weights)))


def without_effect(target: Target, ends: Ends) -> frozenset[str]:
    """Fields of the settings that decide nothing: where every layer has a slot for all of its experts, or none."""
    whole = {0, target.shape.experts}.issuperset(slots(target, ends))
    return CHANGES if whole and target.settings.pool == "layer" else frozenset()


def fixed_bytes(target: Target, ends: Ends) -> int:
    """Device bytes without experts: dense weights, keys and values of the context, and headroom on every device."""
    shape = target.shape
    dense = sum(map(target.size, dense_weights(shape))) + sum(map(target.size, ends))
    kv = shape.kv_bytes("bfloat16", target.context)
    return dense + kv + target.settings.headroom_bytes * target.devices


def whole_layers(target: Target, ends: Ends) -> Placement:
    """As many whole layers resident as the settings' slots amount to; BudgetError if the devices cannot hold them."""
    counts = slots(target, ends)
    return resident(target, ends, counts, sum(counts) // target.shape.experts)


def with_cache(target: Target, ends: Ends) -> Placement:
    """Layers whose every expert has a slot are resident; the other slots are a cache over the CPU's layers."""
    counts = slots(target, ends)
    full = sum(count == target.shape.experts for count in counts)
    rest = sum(count for count in counts if count < target.shape.experts)
    return resident(target, ends, counts, full, rest)


def resident(target: Target, ends: Ends, counts: tuple[int, ...], layers: int, cache: int = 0) -> Placement:
    """`layers` MoE layers on the devices, those with the most slots first, the later of equals."""
    cuts, room = _cut(target, ends, layers, cache)
    dense = tuple(device for device, (first, last) in enumerate(cuts) for _ in range(first, last))
    order = sorted(range(len(counts)), key=lambda at: (counts[at], at), reverse=True)
    placed = [CPU] * len(counts)
    for at in order:
        device = dense[target.shape.moe_layers[at]]
        if layers and room[device]:
            placed[at] = device
            room[device] -= 1
            layers -= 1
    return Placement(dense, tuple(placed), cache)


def _kv_bytes(target: Target, layer: int) -> int:
    """Keys and values of one decoder layer, 16 bits each."""
    return 2 * target.shape.kv_positions(layer, target.context) * target.shape.kv_row


def _short(target: Target, what: str, missing: int) -> BudgetError:
    sizes = " + ".join(map(format_bytes, target.gpus))
    return BudgetError(
        f"devices of {sizes} cannot hold {what} beside dense weights and {target.context} positions: "
        f"{format_bytes(missing)} ({missing} bytes) short",
        "vram",
        missing,
    )


def _cut(target: Target, ends: Ends, wanted: int, cache: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Runs of decoder layers per device, and how many of its MoE layers' experts each device can hold."""
    shape = target.shape
    if not target.gpus:
        return [(0, shape.layers)], [shape.n_moe_layers]
    layer_bytes = target.size(shape.experts * shape.expert_weights)
    best = _best_cut(target, ends, layer_bytes, cache)
    fits = 0 if best is None else best.held
    if best is None or fits < wanted:
        need = fixed_bytes(target, ends) + wanted * layer_bytes + cache * target.size(shape.expert_weights)
        missing = max(1, need - sum(target.gpus), (wanted - fits) * layer_bytes if best else 0)
        raise _short(target, f"{wanted} whole layers of experts (room is for {fits})", missing)
    return list(best.runs), list(best.rooms)


@dataclass(frozen=True)
class _Cut:
    """The first devices' runs of layers: experts' layers held, distance from their shares, runs, room on each."""

    held: int
    off: float
    runs: tuple[tuple[int, int], ...]
    rooms: tuple[int, ...]

    def followed(self, run: tuple[int, int], share: float, room: int) -> _Cut:
        """With one more device."""
        off = self.off + (run[1] - run[0] - share) ** 2
        return _Cut(self.held + room, off, (*self.runs, run), (*self.rooms, room))


def _best_cut(target: Target, ends: Ends, layer_bytes: int, cache: int) -> _Cut | None:
    """The cut that holds the most experts, of those the one nearest to the devices' shares; None if none fits.

    Dynamic program over (device, layers placed so far): every device takes one run, in order, none left out.
    """
    total, gpus = target.shape.layers, target.gpus
    room = _rooms(target, ends, layer_bytes, cache)
    best = {0: _Cut(0, 0.0, (), ())}
    for device, size in enumerate(gpus):
        now: dict[int, _Cut] = {}
        for first, before in best.items():
            for last in range(first + 1, total + 1) if device < len(gpus) - 1 else (total,):
                fits = room(device, first, last) if last > first else -1
                if fits >= 0:
                    cut = before.followed((first, last), total * size / sum(gpus), fits)
                    if last not in now or (cut.held, -cut.off) > (now[last].held, -now[last].off):
                        now[last] = cut
        best = now
    return best.get(total)


def _rooms(target: Target, ends: Ends, layer_bytes: int, cache: int) -> Callable[[int, int, int], int]:
    """Of how many layers in [first, last) a device has room for the experts; -1 if not even for their other weights."""
    shape, last_device = target.shape, target.devices - 1
    before = list(accumulate(map(target.size, dense_weights(shape)), initial=0))
    kv = list(accumulate((_kv_bytes(target, layer) for layer in range(shape.layers)), initial=0))
    moe = list(accumulate((layer in shape.moe_layers for layer in range(shape.layers)), initial=0))
    cached = cache * target.size(shape.expert_weights)

    def room(device: int, first: int, last: int) -> int:
        used = before[last] - before[first] + kv[last] - kv[first] + target.settings.headroom_bytes
        used += target.size(ends[0]) if device == 0 else 0
        used += target.size(ends[1]) + cached if device == last_device else 0
        free = target.gpus[device] - used
        return min(moe[last] - moe[first], free // layer_bytes) if free >= 0 else -1

    return room
