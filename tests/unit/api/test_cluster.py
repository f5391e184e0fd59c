from engine.wire.ids import EngineId
from engine.wire.messages import EnginePhase, EngineReady, EngineReport, Load
from lb.views import EngineState, EngineView
from metrics.deployment import DeploymentReading
from metrics.stats import ServingStats
from orchestrator.api.cluster import describe_rank, describe_readiness

READY = EngineReady(EngineId(0, 2), "b", "h", 100, 256, 1000, 64, "cpu", "float32", "here", 42)
REPORT = EngineReport(
    EngineId(0, 2), 1, 0, 0, 0, 0, EnginePhase.RUNNING, 0, True, {}, Load(1, 2, 3, 9, 0.5), progress=1.0
)


def view(
    state: str, report: EngineReport | None = None, ready: EngineReady | None = None, reason: str = ""
) -> EngineView:
    return EngineView(
        engine_id=EngineId(0, 2),
        state=EngineState(state),
        reason=reason,
        report=report,
        ready=ready,
        seat=None,
        num_in_flight=4,
        load_score=0.0,
        num_picks=5,
    )


def reading() -> DeploymentReading:
    """Return that all processes together picked rank 0 six times and have three sequences on it."""
    stats = ServingStats()
    for _ in range(6):
        stats.on_picked(0)
    return DeploymentReading(stats=stats, totals={}, in_flight={0: 3}, servers=[])


def test_a_serving_rank_tells_everything() -> None:
    assert describe_rank(view("ready", REPORT, READY), reading()) == {
        "engine_id": "0.2",
        "rank": 0,
        "incarnation": 2,
        "state": "ready",
        "reason": "",
        "node": "here",
        "device": "cpu",
        "restarts": 0,
        "last_end": "",
        "pid": 42,
        "waiting": 3,
        "running": 3,
        "kv_usage": 0.5,
        "in_flight": 3,
        "picks": 6,
        "phase": "running",
        "detail": "",
        "progress": 1.0,
    }


def test_a_rank_nobody_heard_of_yet_is_listed_too() -> None:
    rank = describe_rank(view("loading"), reading())
    assert (rank["state"], rank["pid"], rank["phase"]) == ("loading", 0, "")


def test_one_ready_rank_is_enough() -> None:
    ready, body = describe_readiness([view("ready"), view("dead")], draining=False)
    assert ready
    assert body["missing"] == []


def test_what_is_missing_is_said() -> None:
    loading = EngineReport(
        EngineId(0, 2),
        1,
        0,
        0,
        0,
        0,
        EnginePhase.LOADING,
        0,
        False,
        {},
        Load(),
        detail="reading weights",
        progress=0.25,
    )
    ready, body = describe_readiness(
        [view("loading", loading), view("dead", reason="killed by SIGKILL")], draining=False
    )
    assert not ready
    assert body["missing"] == [
        "no engine is ready",
        "rank 0 is loading, reading weights 25%",
        "rank 0 is dead (killed by SIGKILL)",
    ]


def test_a_draining_server_is_not_ready() -> None:
    ready, body = describe_readiness([view("ready")], draining=True)
    assert not ready
    assert body["missing"] == ["the server is shutting down"]
