"""How many expert slots a memory budget holds: what remains after dense weights, keys and values, and headroom."""

from __future__ import annotations

from foreload.errors import BudgetError
from foreload.formats import layer_formats, slot_bytes
from foreload.settings import Settings, staging_slots
from foreload.shape import BYTES_PER_WEIGHT, ModelShape
from foreload.units import format_bytes

ESTIMATOR_SHRINK, ESTIMATOR_EXPAND = 2, 4
"""The estimator's network works at hidden / shrink, its inner layer at expand times that."""


def predictor_bytes(shape: ModelShape, dtype: str, settings: Settings) -> int:
    """Device bytes of default vectors, shared means and network, if the predictor of `settings` uses a calibration."""
    if not settings.uses_calibration:
        return 0
    layers, width = shape.n_moe_layers, max(1, shape.hidden // ESTIMATOR_SHRINK)
    inner = ESTIMATOR_EXPAND * width
    network = (shape.hidden + 1 + layers + inner + 1 + inner + 2) * width + inner + (width + 1) * shape.experts
    vectors = layers * shape.experts * shape.hidden
    return (vectors + network) * BYTES_PER_WEIGHT[dtype] + 4 * layers * shape.hidden


def fixed_bytes(shape: ModelShape, dtype: str, context_tokens: int) -> int:
    """Device bytes that no setting changes: dense weights, keys and values of `context_tokens` positions, tables."""
    return (
        shape.dense_bytes(dtype) + shape.kv_bytes(dtype, context_tokens) + working_bytes(shape, dtype, context_tokens)
    )


def working_bytes(shape: ModelShape, dtype: str, context_tokens: int) -> int:
    """Bytes of the rotary embedding's cosines and sines for `context_tokens` positions, and of norms per head."""
    rotated = shape.latent.rope_dim if shape.latent is not None else shape.head_dim
    copies = shape.heads + shape.kv_heads - 2 if shape.qk_norm == "head" else 0
    return (2 * context_tokens * rotated + shape.layers * copies * shape.head_dim) * BYTES_PER_WEIGHT[dtype]


AT_ONCE = 1024
"""Tokens of a prompt whose outputs torch operators sum at a time, so that fp32 copies of them take little memory."""
SCORE_NUMBERS = 1 << 24
"""Attention scores held at a time where an operator without scores does not serve."""
SCORE_BYTES = 16
"""Of each: in the activations' type, in fp32, masked, and as weights."""


def chunk_bytes(shape: ModelShape, dtype: str, chunk_tokens: int, context_tokens: int, grouped: bool) -> int:
    """Device bytes, on a GPU, that a prompt chunk takes for a while beside its keys and values.

    In a layer's attention or, if that is more, with its experts: `grouped` ones keep outputs and inner activations,
    others sorted inputs, outputs twice, and fp32 sums.
    """
    tokens = min(chunk_tokens, context_tokens)
    size, items, latent = BYTES_PER_WEIGHT[dtype], tokens * shape.top_k, shape.latent
    mixed = shape.heads * (latent.row + latent.rank) if latent else (shape.heads + shape.kv_heads) * shape.head_dim
    attention = 2 * size * tokens * (shape.hidden + 3 * mixed)
    if latent or any(shape.windows) or dtype == "float32":
        attention += SCORE_BYTES * min(SCORE_NUMBERS, shape.heads * tokens * context_tokens)
    experts = 4 * size * tokens * shape.hidden + 40 * items  # the items sorted by expert, in whole numbers
    if grouped:
        experts += size * items * (shape.hidden + shape.expert_width)
    else:
        experts += 3 * size * items * shape.hidden + 8 * min(tokens, AT_ONCE) * shape.top_k * shape.hidden
    return max(attention, experts)


def slot_budget(
    shape: ModelShape,
    dtype: str,
    vram_bytes: int,
    context_tokens: int,
    settings: Settings | None = None,
    draft_bytes: int = 0,
) -> int:
    """Slots, persistent and staging, that fit beside the fixed bytes, a draft model and `settings.headroom_bytes`.

    Raises BudgetError with the shortfall if they cannot even hold the staging of `settings` (default: the defaults).
    """
    chosen = settings or Settings()
    size = slot_bytes(layer_formats(chosen.expert_format, shape, dtype), shape)
    staging = staging_slots(chosen, shape)
    fixed = fixed_bytes(shape, dtype, context_tokens) + chosen.headroom_bytes + predictor_bytes(shape, dtype, chosen)
    fixed += draft_bytes
    slots = (vram_bytes - fixed) // size
    if slots < staging:
        shortfall = fixed + staging * size - vram_bytes
        raise BudgetError(
            f"device memory of {format_bytes(vram_bytes)} cannot hold {format_bytes(fixed)} of dense weights, keys, "
            f"values and headroom and {staging} staging slots of {format_bytes(size)}: "
            f"{format_bytes(shortfall)} ({shortfall} bytes) short",
            "vram",
            shortfall,
        )
    return slots
