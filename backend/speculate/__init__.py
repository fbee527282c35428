"""Speculative decoding: what proposes the next tokens, and which of them the target keeps (design: section 5)."""
