"""Recipes: how the project's texts, tokenizer and models are made (not part of the wheel)."""
