"""How many expert slots a device memory budget holds."""

from __future__ import annotations

from foreload.errors import BudgetError
from foreload.settings import Settings, staging_slots
from foreload.shape import BYTES_PER_WEIGHT, ModelShape
from foreload.units import format_bytes


def fixed_bytes(shape: ModelShape, dtype: str, context_tokens: int, settings: Settings) -> int:
    """Device bytes that are no expert slots: dense weights, KV cache at `context_tokens`, headroom."""
    dense = shape.dense_weights * BYTES_PER_WEIGHT[dtype]
    return dense + context_tokens * shape.kv_bytes_per_token(dtype) + settings.headroom_bytes


def slot_budget(shape: ModelShape, dtype: str, vram_bytes: int, context_tokens: int, settings: Settings) -> int:
    """Expert slots, persistent and staging, that `vram_bytes` holds beside the fixed bytes.

    Raises BudgetError with the shortfall if it cannot hold the settings' staging.
    """
    fixed = fixed_bytes(shape, dtype, context_tokens, settings)
    needed = fixed + staging_slots(settings, shape) * shape.expert_bytes(dtype)
    if vram_bytes < needed:
        short = needed - vram_bytes
        raise BudgetError(
            f"vram {format_bytes(vram_bytes)} is {format_bytes(short)} ({short} bytes) short: dense weights, "
            f"{context_tokens} tokens of KV cache and staging need {format_bytes(needed)}",
            "vram",
            short,
        )
    return (vram_bytes - fixed) // shape.expert_bytes(dtype)
