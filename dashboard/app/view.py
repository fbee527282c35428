"""What a page looks at: a source, a machine, a memory budget, settings in it, and what is predicted for them."""

from __future__ import annotations

from dataclasses import dataclass

from foreload.dashboard.app import data
from foreload.dashboard.app.data import Dataset
from foreload.settings import Settings, check_slots, staging_slots
from foreload.simulator.bounds import Bounds
from foreload.simulator.result import SimResult
from foreload.simulator.whatif import Machine


@dataclass(frozen=True)
class View:
    """What is looked at: a source, a machine, a memory budget, and settings that fit in it."""

    name: str
    data: Dataset
    machine: Machine
    memory_bytes: int
    context: int
    budget: int  # expert slots, staging included
    settings: Settings
    capacity: tuple[int, ...]

    @property
    def base(self) -> Settings:
        """The default settings on the same budget."""
        return Settings()

    @property
    def base_capacity(self) -> tuple[int, ...]:
        """What the default keeps: the largest uniform count that fits."""
        return check_slots(self.base, self.data.shape, self.budget, self.data.expert_bytes(self.base))

    def predicted(self) -> SimResult:
        """The simulation of these settings."""
        return data.predict(self.name, self.machine, self.settings, self.capacity)

    def predicted_default(self) -> SimResult:
        """The simulation of the default."""
        return data.predict(self.name, self.machine, self.base, self.base_capacity)

    def floor(self) -> Bounds:
        """What nothing can beat in this memory."""
        slots = sum(self.capacity) + staging_slots(self.settings, self.data.shape)
        return data.floor(self.name, self.machine, self.settings, slots)

    @property
    def plan(self) -> Settings:
        """The settings with their slots spelled out, as they are exported and pushed."""
        return self.settings.changed(cache_ratio=None, slots_per_layer=self.capacity)
