"""Views, registries and parsed expositions for the tests of metrics."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from engine.wire.ids import EngineId
from engine.wire.messages import EnginePhase, EngineReport, Load
from lb.totals import NOTHING_COUNTED, Totals
from lb.views import EngineState, EngineView
from metrics.registry import make_registry, render
from metrics.stats import ServingStats


def view(
    rank: int,
    incarnation: int = 1,
    state: EngineState = EngineState.READY,
    load: Load | None = None,
    totals: Totals = NOTHING_COUNTED,
) -> EngineView:
    """Return one engine as a client sees it; without a load it has not reported yet."""
    engine_id = EngineId(rank, incarnation)
    return EngineView(
        engine_id=engine_id,
        state=state,
        reason="",
        report=None if load is None else report(engine_id, load),
        ready=None,
        seat=None,
        num_in_flight=0,
        load_score=0.0,
        num_picks=0,
        totals=totals,
    )


def report(engine_id: EngineId, load: Load) -> EngineReport:
    """Return an engine's report with that load."""
    return EngineReport(engine_id, 1, 0, 0, 0, 0, EnginePhase.IDLE, 0, False, {}, load)


def registry_of(
    stats: ServingStats, views: Sequence[EngineView], snapshot_age_s: float | None = 0.1
) -> CollectorRegistry:
    """Return a registry that sees ``views``, also when the list changes later."""
    return make_registry(stats, lambda: views, lambda: snapshot_age_s, lambda: 0.002)


def samples_of(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return (sample name, labels as ``a=b,c=d``) -> value."""
    text, _ = render(registry)
    return {
        (sample.name, ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
