"""The status reporter of an API process: shows what it does on the shared status, and reads there what all do."""

import asyncio
from collections.abc import Mapping

from client.dplb_async_mp_client import DPLBAsyncMPClient
from metrics.deployment import DeploymentReading, DeploymentStats
from metrics.loop_lag import LoopLag
from metrics.stats import MIGRATION_FAILURES, MIGRATION_REASONS, LabelCounts, ServingStats
from orchestrator.api.base.waits import any_is_loading

_START_POLL_S = 0.05


class StatusReporter:
    """Shows the client's numbers at every beat of the loop's lag meter, and at every reading."""

    def __init__(self, client: DPLBAsyncMPClient, stats: DeploymentStats) -> None:
        """Begin at once; must run on the event loop whose lag is measured."""
        self._client = client
        self._stats = stats
        self._migrations = MigrationMeter(stats.stats)
        self._lag = LoopLag(asyncio.get_running_loop(), self.show)

    def show(self) -> None:
        """Write what this process does now."""
        statistics = self._client.statistics()
        self._migrations.update(statistics)
        self._stats.on_heartbeat(
            self._lag.worst_s(),
            self._client.snapshot_age_s(),
            self._client.engine_views(),
            statistics["waiting_to_move"],
        )

    def read(self) -> DeploymentReading:
        """Return what all API processes count and show; this one's part is as new as the call."""
        self.show()
        return self._stats.read()

    async def show_start(self) -> None:
        """Show, faster than the beat, which engines are reached: the start of the deployment waits for it."""
        while any_is_loading(self._client.engine_views()):
            self.show()
            await asyncio.sleep(_START_POLL_S)
        self.show()

    def close(self) -> None:
        """Stop; idempotent."""
        self._lag.close()


class MigrationMeter:
    """Adds the client's counts of migrated sequences to the metrics, which the client may not know.

    The client's counts only grow while it lives, so what came since the last update is a difference.
    """

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
