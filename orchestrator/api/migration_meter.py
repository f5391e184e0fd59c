"""What the client counts of moved sequences, carried into the metrics: the client may not know those."""

from collections.abc import Mapping

from metrics.stats import MIGRATION_FAILURES, MIGRATION_REASONS, LabelCounts, ServingStats


class MigrationMeter:
    """Adds to the accumulators what came since the last look. The client's counts only grow while it lives."""

    def __init__(self, stats: ServingStats) -> None:
        self._targets = {f"moves_{reason}": (stats.migrations, reason) for reason in MIGRATION_REASONS}
        self._targets |= {f"{reason}_ends": (stats.migration_failures, reason) for reason in MIGRATION_FAILURES}
        self._seen = dict.fromkeys(self._targets, 0)

    def update(self, statistics: Mapping[str, int]) -> None:
        """Take the client's ``statistics()``."""
        for key, (counts, label) in self._targets.items():
            self._add(key, statistics.get(key, 0), counts, label)

    def _add(self, key: str, total: int, counts: LabelCounts, label: str) -> None:
        if total > self._seen[key]:
            counts.count(label, total - self._seen[key])
            self._seen[key] = total
