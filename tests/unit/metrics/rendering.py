"""Views, registries and parsed expositions for the tests of metrics."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.states import EnginePhase, EngineState
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView
from lb.views.totals import NOTHING_COUNTED, Totals
from metrics.collector import make_registry, render
from metrics.deployment import ApiServerView, DeploymentReading
from metrics.stats import ServingStats


def view(
    rank: int,
    incarnation: int = 1,
    state: EngineState = EngineState.READY,
    load: Load | None = None,
    totals: Totals = NOTHING_COUNTED,
    num_in_flight: int = 0,
) -> EngineView:
    """Return one engine as a client sees it; without a load it has not reported yet."""
    engine_id = EngineId(rank, incarnation)
    return EngineView(
        engine_id=engine_id,
        state=state,
        report=None if load is None else report(engine_id, load),
        num_in_flight=num_in_flight,
        totals=totals,
    )


def report(engine_id: EngineId, load: Load) -> EngineReport:
    """Return an engine's report with that load."""
    return EngineReport(engine_id, 1, 0, 0, 0, 0, EnginePhase.IDLE, 0, False, {}, load)


def registry_of(
    stats: ServingStats,
    views: Sequence[EngineView],
    snapshot_age_s: float | None = 0.1,
    group: GroupView | None = None,
    expert_tokens: Sequence[int] = (),
) -> CollectorRegistry:
    """Return a registry that sees ``views``, also when the list changes later."""
    server = ApiServerView(
        index=0,
        incarnation=1,
        pid=7,
        num_starts=1,
        num_connections=2,
        num_open=1,
        num_ready=2,
        lag_s=0.002,
        snapshot_age_s=snapshot_age_s,
    )

    def read() -> DeploymentReading:
        totals = {view.engine_id.rank: view.totals for view in views}
        return DeploymentReading(
            stats=stats, totals=totals, in_flight={}, servers=[server], expert_tokens=expert_tokens
        )

    return make_registry(read, lambda: views, lambda: group)


GROUP = GroupView(epoch=4, wave=2, placement={EngineId(0, 1): [0, 2], EngineId(1, 3): [1]})
"""A lockstep group of two ranks that share out three experts."""


def full_registry(stats: ServingStats) -> CollectorRegistry:
    """Return a registry with something in every family."""
    return registry_of(stats, [view(0), view(1)], group=GROUP, expert_tokens=[30, 20, 10])


def samples_of(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return (sample name, labels as ``a=b,c=d``) -> value."""
    text, _ = render(registry)
    return {
        (sample.name, ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
