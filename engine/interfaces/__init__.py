"""The contracts inside an engine: what the process drives, what the scheduler hands to a runner."""
