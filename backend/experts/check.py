"""After loading: every expert's storage is where the plan says, and everything else is on the device."""

from __future__ import annotations

import torch

from foreload.backend.experts.pool import SlotPool
from foreload.backend.experts.slab import HostSlab
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.decoder import Decoder
from foreload.errors import InternalError


def check_placement(
    checkpoint: Checkpoint, slab: HostSlab, pool: SlotPool, decoder: Decoder, device: torch.device
) -> None:
    """InternalError naming the first expert or tensor that is elsewhere, of another size, or over another's place."""
    shape = checkpoint.shape
    addresses = slab.addresses()
    if addresses.shape != (shape.n_moe_layers, shape.experts):
        raise InternalError(
            f"host memory holds {addresses.shape} experts: {(shape.n_moe_layers, shape.experts)} are planned"
        )
    end = 0
    for at in range(shape.n_moe_layers):
        size = slab.layout(at).bytes
        for expert in range(shape.experts):
            block = slab.block(at, expert)
            name = checkpoint.expert_name(at, expert)
            if block.device.type != "cpu" or block.data_ptr() != addresses[at, expert]:
                raise InternalError(f"{name}: its block is not at its place in host memory")
            if block.numel() * block.element_size() != size:
                found = block.numel() * block.element_size()
                raise InternalError(f"{name}: its block has {found} bytes: {size} are planned")
            if block.data_ptr() < end:
                raise InternalError(f"{name}: its block lies over the one before")
            end = block.data_ptr() + size
    for index in range(len(pool)):
        if pool.slot(index).device.type != device.type:
            raise InternalError(f"slot {index} is on {pool.slot(index).device}: {device} is planned")
    for name, tensor in decoder.named_tensors():
        if tensor.device.type != device.type:
            raise InternalError(f"{name} is on {tensor.device}: {device} is planned")
