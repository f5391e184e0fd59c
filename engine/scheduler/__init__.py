"""The scheduler of an engine: pure decisions over sequences and KV blocks, step by step."""
