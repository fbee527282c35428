"""The one brain: residency, eviction, admission, misses and prefetch as arrays and compiled pure functions.

The live engine and the simulator drive the same `Brain`; neither decides anything itself. No torch, no clock.
"""

from foreload.backend.policy.brain import Action, Brain, Counter, compile_policies
from foreload.backend.policy.split import SplitCosts

__all__ = ["Action", "Brain", "Counter", "SplitCosts", "compile_policies"]
