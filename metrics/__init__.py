"""Metrics: accumulators of the serving path, and the Prometheus collector over them."""
