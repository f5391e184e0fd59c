"""The client's counts of moved sequences in the metrics."""

from client.sequences import MigrationReason
from metrics.stats import MIGRATION_REASONS, ServingStats
from orchestrator.api.server.status_reporter import MigrationMeter


def test_the_reasons_are_those_of_the_client() -> None:
    assert set(MIGRATION_REASONS) == set(MigrationReason)


def test_each_look_adds_what_came_since_the_last() -> None:
    stats = ServingStats()
    meter = MigrationMeter(stats)
    meter.update({"moves_death": 3, "poison_ends": 1, "in_flight": 9})
    meter.update({"moves_death": 5, "poison_ends": 1, "timeout_ends": 2, "moves_gap": 1})
    assert {reason: stats.migrations[reason] for reason in MIGRATION_REASONS if stats.migrations[reason]} == {
        "death": 5,
        "gap": 1,
    }
    assert dict(stats.migration_failures) == {"poison": 1, "timeout": 2, "memory": 0}


def test_a_client_that_began_anew_adds_to_what_its_predecessor_left() -> None:
    stats = ServingStats()
    MigrationMeter(stats).update({"moves_death": 3})
    MigrationMeter(stats).update({"moves_death": 1})
    assert stats.migrations["death"] == 4
