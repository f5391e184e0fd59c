"""WHAT WE SAY: accumulators and the Prometheus collector over them."""
