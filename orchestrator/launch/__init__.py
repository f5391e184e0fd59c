"""Hosts for engine processes: Ray actors and local processes."""
