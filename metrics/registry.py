"""The registry of one API process, and its text."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from lb.views import EngineView
from metrics.collector import ServingCollector
from metrics.stats import ServingStats


def make_registry(
    stats: ServingStats,
    views: Callable[[], Sequence[EngineView]],
    snapshot_age_s: Callable[[], float | None],
    loop_lag_s: Callable[[], float],
) -> CollectorRegistry:
    """Return a registry of its own: no other registry, and no second one like it, ever unregisters its families.

    views: what the client knows of each rank, in their order, asked at every scrape. snapshot_age_s: seconds since the
    last load snapshot, None before the first. loop_lag_s: longest recent delay of the event loop in seconds.
    """
    registry = CollectorRegistry()
    registry.register(ServingCollector(stats, views, snapshot_age_s, loop_lag_s))
    return registry


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Return the exposition text and its content type (text format 0.0.4, which every Prometheus reads)."""
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
