"""The fast path on CUDA: kernels over the slot table, graphs per layer, copies and launches issued natively."""
