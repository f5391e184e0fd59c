"""The metric families that are read off a view or a total one by one: name, help text and value. Declarations only."""

from collections.abc import Callable

from engine.wire.load import Load
from engine.wire.states import EnginePhase, EngineState
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView, experts_of
from lb.views.totals import Totals
from metrics.deployment import ApiServerView, DeploymentReading
from metrics.stats import Histogram, RankStats

_NO_LOAD = Load()


def _load(view: EngineView) -> Load:
    return _NO_LOAD if view.report is None else view.report.load


RANK_GAUGES: tuple[tuple[str, str, Callable[[EngineView], float]], ...] = (
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
"""Per rank, of this moment: from the view of this API process, whose report covers all clients."""

ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[Totals], float]], ...] = (
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
"""Per rank: counted by the rank's engines themselves, for all clients."""

RANK_COUNTERS: tuple[tuple[str, str, Callable[[RankStats], int]], ...] = (
    ("shoal_picks", "Sequences sent to the rank", lambda stats: stats.num_picks),
    ("shoal_prompt_tokens", "Prompt tokens of ended sequences that the rank has read", lambda stats: stats.num_prompt),
    ("shoal_generation_tokens", "Output tokens received from the rank", lambda stats: stats.num_generated),
)
"""Per rank: counted by the API processes."""

RANK_HISTOGRAMS: tuple[tuple[str, str, Callable[[RankStats], Histogram]], ...] = (
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
"""Per rank: observed by the API processes."""

API_SERVER_GAUGES: tuple[tuple[str, str, Callable[[ApiServerView], float]], ...] = (
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
"""Per API process, of this moment."""

GROUP_GAUGES: tuple[tuple[str, str, Callable[[GroupView, DeploymentReading], float]], ...] = (
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
"""Of the lockstep group; independent ranks have no series of these."""
