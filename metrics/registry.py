"""The registry of a deployment as any of its API processes shows it, and its text."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView
from metrics.collector import ServingCollector
from metrics.deployment import DeploymentReading


def make_registry(
    read: Callable[[], DeploymentReading],
    views: Callable[[], Sequence[EngineView]],
    group: Callable[[], GroupView | None] = lambda: None,
) -> CollectorRegistry:
    """Return a registry of its own: no other registry, and no second one like it, ever unregisters its families.

    All are asked at every scrape. read: what all API processes have counted. views: what this one knows of each
    rank, in their order. group: what it knows of a lockstep group; None for independent ranks.
    """
    registry = CollectorRegistry()
    registry.register(ServingCollector(read, views, group))
    return registry


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Return the exposition text and its content type (text format 0.0.4, which every Prometheus reads)."""
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
