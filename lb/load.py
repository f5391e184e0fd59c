"""Load units: what one request weighs, by where it stands in its engine."""

from engine.wire.messages import Load

WAITING_WEIGHT = 4
"""A waiting sequence delays the next one by its whole prefill; a running one only shares the step."""

RUNNING_WEIGHT = 1


def arrival_weight(load: Load) -> int:
    """Return the weight of a sequence that has arrived, or is on its way, but was not scheduled yet.

    It will run at once where nobody waits and will wait where somebody does. Simulated, 4 ranks of 10 slots or of
    1,000, one client, 400 requests in 300 ms, the difference between the fullest and the emptiest rank (median of 30
    seeds, with and without a queue): always 4 gives 0 and 7.5, because a fresh arrival looks four times as busy as it
    is about to be; always 1 gives 13 and 0, because it sends on to ranks that already queue; this rule gives 0 and 0.
    """
    return WAITING_WEIGHT if load.num_waiting else RUNNING_WEIGHT


def reported_load(load: Load) -> int:
    """Return the load an engine reports of itself, in load units."""
    return (
        WAITING_WEIGHT * load.num_waiting + RUNNING_WEIGHT * load.num_running + arrival_weight(load) * load.num_queued
    )
