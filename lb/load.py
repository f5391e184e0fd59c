"""Load units: what one request weighs, by where it stands in its engine."""

from engine.wire.messages import Load

WAITING_WEIGHT = 4
"""A waiting sequence delays the next one by its whole prefill; a running one only shares the step."""

RUNNING_WEIGHT = 1


def arrival_weight(load: Load) -> int:
    """Return the weight of a sequence that has arrived, or is on its way, but was not scheduled yet.

    It will run at once where nobody waits and will wait where somebody does. A fixed 4 would make ranks with a fresh
    arrival look four times as busy as they are about to be, a fixed 1 would send bursts to ranks that already queue.
    """
    return WAITING_WEIGHT if load.num_waiting else RUNNING_WEIGHT


def reported_load(load: Load) -> int:
    """Return the load an engine reports of itself, in load units."""
    return (
        WAITING_WEIGHT * load.num_waiting + RUNNING_WEIGHT * load.num_running + arrival_weight(load) * load.num_queued
    )
