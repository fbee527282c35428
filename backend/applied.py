"""What a change of settings did to a running engine, and what it cost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foreload.backend.policy.state import KEPT
from foreload.settings import Settings

if TYPE_CHECKING:
    from foreload.backend.engine import Engine


@dataclass(frozen=True)
class Applied:
    """`waited_ns` is the time until the running token was done, `paused_ns` the time in which none was decoded."""

    before: Settings
    after: Settings
    slots_before: int  # persistent slots of all MoE layers
    slots_after: int
    pool_bytes_before: int  # device memory of all slots, staging included
    pool_bytes_after: int
    experts_kept: int  # resident before and after
    experts_dropped: int  # resident before
    experts_moved: int  # copied from slot to slot on the device
    waited_ns: int
    paused_ns: int

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Field -> its value before and after, as in JSON."""
        old, new = self.before.model_dump(mode="json"), self.after.model_dump(mode="json")
        return {key: (old[key], new[key]) for key in new if old[key] != new[key]}


class Watch:
    """Looks at an engine before and after a change: `begin` when the change may start, then `end`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked_ns = time.perf_counter_ns()

    def begin(self) -> None:
        """The engine holds still now."""
        self._begun_ns = time.perf_counter_ns()
        self._before = self._engine.settings
        self._slots, self._bytes = sum(self._engine.capacity), self._engine.pool.allocated_bytes
        self._kept = self._residents()

    def end(self, moved: int) -> Applied:
        """The change is in force; `moved` experts were copied between slots."""
        kept = self._residents()
        return Applied(
            before=self._before,
            after=self._engine.settings,
            slots_before=self._slots,
            slots_after=sum(self._engine.capacity),
            pool_bytes_before=self._bytes,
            pool_bytes_after=self._engine.pool.allocated_bytes,
            experts_kept=kept,
            experts_dropped=self._kept - kept,
            experts_moved=moved,
            waited_ns=self._begun_ns - self._asked_ns,
            paused_ns=time.perf_counter_ns() - self._begun_ns,
        )

    def _residents(self) -> int:
        return int((self._engine.brain.state.status == KEPT).sum())
