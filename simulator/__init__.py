"""What a setting would do: cost model, SimPy engine model, bounds, integer program, tuner, validation."""
