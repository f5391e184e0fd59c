"""The defaults and bounds that more than one room needs: options, scale operations, API and API processes."""

MAX_RANKS = 1024

START_TIMEOUT_S = 300.0
"""Until every rank must be ready, and later each one that is started again or is new."""

SHUTDOWN_TIMEOUT_S = 10.0
"""That running requests get to finish when the deployment stops."""

DRAIN_TIMEOUT_S = 120.0
"""That the requests of a leaving rank get to finish there before they migrate."""

MAX_PENDING_REQUESTS = 1024
"""Requests in flight in all API processes; more are refused."""
