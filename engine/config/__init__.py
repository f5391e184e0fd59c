"""The configuration of an engine, and the spec that its process reads. Frozen."""
