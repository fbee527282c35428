"""Triton kernels and their torch equals. Importing this package needs no Triton; launching on a GPU does."""
