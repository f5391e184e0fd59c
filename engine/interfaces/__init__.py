"""The contracts inside an engine: what the process drives, and what the scheduler gives to a runner."""
