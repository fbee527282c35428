"""Measurements of the machine: probes and the profile they fill."""
