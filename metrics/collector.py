"""The Prometheus collector: accumulators and views become metric families when a scrape asks, and never before."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from engine.wire.build import build_id
from engine.wire.replicas import EndKind
from engine.wire.states import EngineState
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView
from metrics.deployment import ApiServerView, DeploymentReading
from metrics.families import (
    API_SERVER_GAUGES,
    ENGINE_COUNTERS,
    GROUP_GAUGES,
    RANK_COUNTERS,
    RANK_GAUGES,
    RANK_HISTOGRAMS,
)
from metrics.stats import Histogram, ServingStats

_ENGINE = ["engine"]
_API_SERVER = ["api_server"]


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


class ServingCollector(Collector):
    """Families of a deployment, whichever API process is asked. See ``make_registry`` for the arguments."""

    def __init__(
        self,
        read: Callable[[], DeploymentReading],
        views: Callable[[], Sequence[EngineView]],
        group: Callable[[], GroupView | None],
    ) -> None:
        self._read = read
        self._views = views
        self._group = group

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not scrape a client that is not connected yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every family; a rank has its series from its first appearance until its death or removal.

        Both sources are asked once, so that all families are of one moment.
        """
        reading = self._read()
        views = self._views()
        alive = {view.engine_id.rank: view for view in views if view.state is not EngineState.DEAD}
        yield from _rank_gauges(alive)
        yield _restarts(alive)
        yield from _engine_totals(alive, reading)
        yield from _rank_totals(alive, reading.stats)
        yield from _whole_totals(reading.stats)
        yield _engines(views)
        yield from _lockstep(self._group(), reading)
        yield from _api_servers(reading.servers)
        yield _build()


def _restarts(alive: dict[int, EngineView]) -> Metric:
    counter = CounterMetricFamily(
        "shoal_engine_restarts",
        "How often the rank's engine was started again, by how the one before ended",
        labels=[*_ENGINE, "reason"],
    )
    for rank, view in alive.items():
        for kind in EndKind:
            counter.add_metric([str(rank), kind], view.replica.restarts.get(kind, 0) if view.replica is not None else 0)
    return counter


def _rank_gauges(alive: dict[int, EngineView]) -> Iterator[Metric]:
    for name, help_text, value_of in RANK_GAUGES:
        gauge = GaugeMetricFamily(name, help_text, labels=_ENGINE)
        for rank, view in alive.items():
            gauge.add_metric([str(rank)], value_of(view))
        yield gauge


def _engine_totals(alive: Iterable[int], reading: DeploymentReading) -> Iterator[Metric]:
    of_rank = {rank: reading.totals_of(rank) for rank in alive}
    for name, help_text, count_of in ENGINE_COUNTERS:
        counter = CounterMetricFamily(name, help_text, labels=_ENGINE)
        for rank, totals in of_rank.items():
            counter.add_metric([str(rank)], count_of(totals))
        yield counter


def _rank_totals(alive: Iterable[int], stats: ServingStats) -> Iterator[Metric]:
    of_rank = {rank: stats.ranks[rank] for rank in alive}
    for name, help_text, count_of in RANK_COUNTERS:
        counter = CounterMetricFamily(name, help_text, labels=_ENGINE)
        for rank, of_this in of_rank.items():
            counter.add_metric([str(rank)], count_of(of_this))
        yield counter
    for name, help_text, histogram_of in RANK_HISTOGRAMS:
        family = HistogramMetricFamily(name, help_text, labels=_ENGINE)
        for rank, of_this in of_rank.items():
            _add_histogram(family, [str(rank)], histogram_of(of_this))
        yield family


def _whole_totals(stats: ServingStats) -> Iterator[Metric]:
    yield _by_label("shoal_requests", "Ended sequences, by reason", "reason", stats.finished)
    yield _by_label("shoal_requests_rejected", "Requests refused at the door, by HTTP status", "status", stats.rejected)
    yield _by_label(
        "shoal_moves", "Sequences that lost their rank and went to another, by reason", "reason", stats.migrations
    )
    yield _by_label(
        "shoal_move_failures",
        "Sequences that ended because they could not be moved",
        "reason",
        stats.migration_failures,
    )
    prompts = HistogramMetricFamily("shoal_request_prompt_tokens", "Tokens of accepted prompts", labels=[])
    _add_histogram(prompts, [], stats.prompt_lengths)
    yield prompts


def _api_servers(servers: Sequence[ApiServerView]) -> Iterator[Metric]:
    """Yield the families by API process; an index without a process has no more than its count of starts."""
    starts = CounterMetricFamily(
        "shoal_api_server_starts",
        "Processes that were started as this API process, the first one included",
        labels=_API_SERVER,
    )
    for server in servers:
        starts.add_metric([str(server.index)], server.num_starts)
    yield starts
    for name, help_text, value_of in API_SERVER_GAUGES:
        gauge = GaugeMetricFamily(name, help_text, labels=_API_SERVER)
        for server in servers:
            if server.pid:
                gauge.add_metric([str(server.index)], value_of(server))
        yield gauge


def _build() -> Metric:
    build = GaugeMetricFamily("shoal_build_info", "Always 1; the labels name the build", labels=["version", "build_id"])
    build.add_metric([version("shoal"), build_id()], 1)
    return build


def _engines(views: Iterable[EngineView]) -> Metric:
    count = Counter(view.state for view in views)
    gauge = GaugeMetricFamily("shoal_engines", "Ranks by state", labels=["state"])
    for state in EngineState:
        gauge.add_metric([state], count[state])
    return gauge


def _lockstep(group: GroupView | None, reading: DeploymentReading) -> Iterator[Metric]:
    """Yield what there is of a lockstep group alone; without one, families without series."""
    for name, help_text, value_of in GROUP_GAUGES:
        gauge = GaugeMetricFamily(name, help_text, labels=[])
        if group is not None:
            gauge.add_metric([], value_of(group, reading))
        yield gauge
    counter = CounterMetricFamily(
        "shoal_expert_tokens", "How often each expert was chosen, by all ranks", labels=["expert"]
    )
    for expert, count in enumerate(reading.expert_tokens):
        counter.add_metric([str(expert)], count)
    yield counter


def _by_label(name: str, help_text: str, label: str, counts: Mapping[str, int]) -> Metric:
    counter = CounterMetricFamily(name, help_text, labels=[label])
    for value, count in sorted(counts.items()):
        counter.add_metric([value], count)
    return counter


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    buckets = [("+Inf" if math.isinf(bound) else repr(float(bound)), count) for bound, count in histogram.cumulative()]
    family.add_metric(labels, buckets, histogram.total)
