"""Trainer of the project's own models: Qwen3-MoE and dense Qwen3, described by a JSON configuration."""
