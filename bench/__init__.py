"""Benchmarks a user can run; each prints a table beside a reference measured in the same run."""
