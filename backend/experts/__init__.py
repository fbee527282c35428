"""Expert memory: the host slab, the device slots, the copies between them, and the experts' arithmetic."""
