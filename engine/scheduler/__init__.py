"""Who runs in the next step: pure decisions over sequences and KV blocks."""
