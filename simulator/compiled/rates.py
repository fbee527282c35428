"""What the compiled machine goes by: rates of link, CPU pool and expert kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreload.compiled import inlined


class Rates(NamedTuple):
    """What link, CPU pool and expert kernels cost and how they slow each other.

    K = most experts of a layer-step, T = most tokens of all of them together, F = formats that layers are in.
    """

    format: NDArray[np.int64]  # [L] of each layer's experts, 0 to F - 1
    copy_ns: NDArray[np.int64]  # [L]
    copy_rate: int  # of SCALE, beside CPU experts
    copy_varies: NDArray[np.int64]  # [n] factors of `copy_ns`, of SCALE, that copies which begin there have in turn
    wake_ns: int
    latency_ns: int  # this and the next seven as in `graph_costs.DeviceTimes`
    copy_start_ns: int
    gpu_rate: int
    asleep_ns: int
    rest_ns: int
    host_wake_ns: int
    bring_ns: int
    driven: bool
    read_ahead: NDArray[np.int64]  # [n, 2] as `CostModel.read_ahead`
    cpu_ns: NDArray[np.int64]  # [F, K + 1, T + 1] by tokens; 0: of a single token's step
    cpu_varies: NDArray[np.int64]  # [n] factors of it, of SCALE, that batches have in turn
    cpu_rate: NDArray[np.int64]  # [K + 1] beside a copy
    both_rate: NDArray[np.int64]  # [K + 1, K + 1] resident experts beside CPU experts


@inlined
def less_ns(read_ahead: NDArray[np.int64], idle_ns: int) -> int:
    """What experts take less that workers have read ahead for so long; as `lookup.on_line`."""
    for i in range(1, len(read_ahead)):
        left, right = read_ahead[i - 1, 0], read_ahead[i, 0]
        if idle_ns < right:
            low, high, span = read_ahead[i - 1, 1], read_ahead[i, 1], right - left
            return int((low * (right - idle_ns) + high * (idle_ns - left) + span // 2) // span)
    return int(read_ahead[-1, 1])


@inlined
def in_turn(factors: NDArray[np.int64], turn: int, stride: int) -> int:
    """As in `variation`."""
    return int(factors[((turn * stride & 0xFFFFFFFF) * len(factors)) >> 32])
