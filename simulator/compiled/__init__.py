"""The engine model compiled: the same decisions, costs and order of events as the SimPy model, to the nanosecond."""

from foreload.simulator.compiled.run import simulate, simulate_requests

__all__ = ["simulate", "simulate_requests"]
