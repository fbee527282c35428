"""The model with the topology of Qwen3-30B-A3B: trained, calibrated, recorded and measured by one script."""
