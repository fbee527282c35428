"""Prediction of the experts of later layers (design: section 4)."""
