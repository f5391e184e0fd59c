"""The client's counts of moved sequences in the metrics."""

from client.sequences import MoveReason
from metrics.stats import MOVE_REASONS, ServingStats
from orchestrator.api.move_meter import MoveMeter


def test_the_reasons_are_those_of_the_client() -> None:
    assert set(MOVE_REASONS) == set(MoveReason)


def test_each_look_adds_what_came_since_the_last() -> None:
    stats = ServingStats()
    meter = MoveMeter(stats)
    meter.update({"moves_death": 3, "poison_ends": 1, "in_flight": 9})
    meter.update({"moves_death": 5, "poison_ends": 1, "timeout_ends": 2, "moves_gap": 1})
    assert {reason: stats.moves[reason] for reason in MOVE_REASONS if stats.moves[reason]} == {"death": 5, "gap": 1}
    assert dict(stats.move_failures) == {"poison": 1, "timeout": 2, "memory": 0}


def test_a_client_that_began_anew_adds_to_what_its_predecessor_left() -> None:
    stats = ServingStats()
    MoveMeter(stats).update({"moves_death": 3})
    MoveMeter(stats).update({"moves_death": 1})
    assert stats.moves["death"] == 4
