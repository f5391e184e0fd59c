"""What an engine is told, frozen: its configuration, and the spec that its process gets."""
