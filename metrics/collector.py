"""Turns accumulators and engine views into metric families when a scrape asks, and never before."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.wire.build import build_id
from engine.wire.load import Load
from engine.wire.replicas import EndKind
from engine.wire.states import EnginePhase, EngineState
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView, experts_of
from lb.views.totals import Totals
from metrics.deployment import ApiServerView, DeploymentReading
from metrics.histogram import Histogram
from metrics.stats import RankStats, ServingStats

_ENGINE = ["engine"]
_API_SERVER = ["api_server"]

_NO_LOAD = Load()


def _load(view: EngineView) -> Load:
    return _NO_LOAD if view.report is None else view.report.load


_RANK_GAUGES: tuple[tuple[str, str, Callable[[EngineView], float]], ...] = (
    (
        "shoal_engine_up",
        "1 when the rank takes requests, 0 while it loads, leaves or gives no sign of progress",
        lambda view: view.state is EngineState.READY,
    ),
    (
        "shoal_requests_running",
        "Sequences in the rank's running batch, of all clients",
        lambda view: _load(view).num_running,
    ),
    (
        "shoal_requests_waiting",
        "Sequences the rank has received and not started, of all clients",
        lambda view: _load(view).num_queued + _load(view).num_waiting,
    ),
    (
        "shoal_waiting_tokens",
        "Tokens the rank must compute before each of its waiting sequences has its next one, of all clients",
        lambda view: _load(view).num_waiting_tokens,
    ),
    (
        "shoal_kv_cache_usage_ratio",
        "Used share of the rank's KV cache, 0 to 1",
        lambda view: _load(view).kv_usage,
    ),
    (
        "shoal_engine_parked",
        "1 while a rank of a lockstep group waits for the next group to be formed",
        lambda view: view.report is not None and view.report.phase is EnginePhase.PARKED,
    ),
    (
        "shoal_engine_experts",
        "Experts of each layer that a rank of a lockstep group holds",
        lambda view: len(experts_of(view.report)) if view.report else 0,
    ),
)

_ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[Totals], float]], ...] = (
    ("shoal_engine_steps", "Steps of the rank's engines", lambda totals: totals.num_steps),
    (
        "shoal_engine_prompt_tokens",
        "Prompt tokens of sequences whose whole prompt the rank has computed, of all clients",
        lambda totals: totals.num_prompt_tokens,
    ),
    (
        "shoal_engine_generation_tokens",
        "Output tokens the rank has drawn, for all clients",
        lambda totals: totals.num_generation_tokens,
    ),
    (
        "shoal_engine_preemptions",
        "Sequences that had to give up their KV blocks to others and begin again",
        lambda totals: totals.num_preemptions,
    ),
    (
        "shoal_prefix_cache_queried_tokens",
        "Tokens of sequences that began to run and were looked for in the prefix cache",
        lambda totals: totals.num_prefix_query_tokens,
    ),
    (
        "shoal_prefix_cache_hit_tokens",
        "Those of the queried tokens that the prefix cache held already",
        lambda totals: totals.num_prefix_hit_tokens,
    ),
    (
        "shoal_engine_empty_steps",
        "Steps that a rank of a lockstep group took part in without a token of its own",
        lambda totals: totals.num_empty_steps,
    ),
    (
        "shoal_engine_collective_seconds",
        "Time that a rank of a lockstep group spent inside the collectives of its steps, waiting for peers included",
        lambda totals: totals.collective_s,
    ),
)

_RANK_COUNTERS: tuple[tuple[str, str, Callable[[RankStats], int]], ...] = (
    ("shoal_picks", "Sequences sent to the rank", lambda stats: stats.num_picks),
    ("shoal_prompt_tokens", "Prompt tokens of ended sequences that the rank has read", lambda stats: stats.num_prompt),
    ("shoal_generation_tokens", "Output tokens received from the rank", lambda stats: stats.num_generated),
)

_RANK_HISTOGRAMS: tuple[tuple[str, str, Callable[[RankStats], Histogram]], ...] = (
    (
        "shoal_time_to_first_token_seconds",
        "From a request's arrival to the first token of a sequence",
        lambda stats: stats.first_token,
    ),
    (
        "shoal_inter_token_latency_seconds",
        "Between two output tokens of a sequence; tokens that come together share their gap",
        lambda stats: stats.inter_token,
    ),
    (
        "shoal_request_queue_time_seconds",
        "From the engine's receipt of a sequence to its first step",
        lambda stats: stats.queue_time,
    ),
    (
        "shoal_e2e_request_latency_seconds",
        "From a request's arrival to the end of a sequence",
        lambda stats: stats.e2e,
    ),
)

_API_SERVER_GAUGES: tuple[tuple[str, str, Callable[[ApiServerView], float]], ...] = (
    (
        "shoal_snapshot_age_seconds",
        "Time since the API process's last load snapshot of the coordinator; infinite before the first",
        lambda server: float("inf") if server.snapshot_age_s is None else server.snapshot_age_s,
    ),
    (
        "shoal_event_loop_lag_seconds",
        "Longest delay of the API process's event loop in the last 10 to 20 seconds",
        lambda server: server.lag_s,
    ),
    ("shoal_open_requests", "Generation requests inside the API process", lambda server: server.num_open),
    (
        "shoal_sequences_waiting_to_move",
        "Sequences of the API process that lost their rank and wait for another",
        lambda server: server.num_waiting_to_migrate,
    ),
    ("shoal_open_connections", "Connections of the API process", lambda server: server.num_connections),
)

_GROUP_GAUGES: tuple[tuple[str, str, Callable[[GroupView, DeploymentReading], float]], ...] = (
    ("shoal_group_epoch", "Number of the lockstep group's membership in force", lambda group, _: group.epoch),
    ("shoal_group_wave", "Number of the lockstep group's newest running period", lambda group, _: group.wave),
    ("shoal_group_members", "Ranks in the lockstep group", lambda group, _: len(group.placement)),
    (
        "shoal_group_reforming",
        "1 while another membership of the lockstep group is prepared",
        lambda group, _: group.proposal is not None,
    ),
    (
        "shoal_group_load_imbalance_ratio",
        "Tokens for the experts of the busiest rank over those of the average rank, 1 when even",
        lambda group, reading: group.load_imbalance(reading.expert_tokens),
    ),
)


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
        """Yield every family; a rank has its series from its first appearance until its death or removal."""
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
    for name, help_text, value_of in _RANK_GAUGES:
        gauge = GaugeMetricFamily(name, help_text, labels=_ENGINE)
        for rank, view in alive.items():
            gauge.add_metric([str(rank)], value_of(view))
        yield gauge


def _engine_totals(alive: Iterable[int], reading: DeploymentReading) -> Iterator[Metric]:
    of_rank = {rank: reading.totals_of(rank) for rank in alive}
    for name, help_text, count_of in _ENGINE_COUNTERS:
        counter = CounterMetricFamily(name, help_text, labels=_ENGINE)
        for rank, totals in of_rank.items():
            counter.add_metric([str(rank)], count_of(totals))
        yield counter


def _rank_totals(alive: Iterable[int], stats: ServingStats) -> Iterator[Metric]:
    of_rank = {rank: stats.ranks[rank] for rank in alive}
    for name, help_text, count_of in _RANK_COUNTERS:
        counter = CounterMetricFamily(name, help_text, labels=_ENGINE)
        for rank, of_this in of_rank.items():
            counter.add_metric([str(rank)], count_of(of_this))
        yield counter
    for name, help_text, histogram_of in _RANK_HISTOGRAMS:
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
    """Yield the families by API process; a replica without a process has no more than its count of starts."""
    starts = CounterMetricFamily(
        "shoal_api_server_starts", "Processes that were started as this API process", labels=_API_SERVER
    )
    for server in servers:
        starts.add_metric([str(server.index)], server.num_starts)
    yield starts
    for name, help_text, value_of in _API_SERVER_GAUGES:
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
    for name, help_text, value_of in _GROUP_GAUGES:
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
