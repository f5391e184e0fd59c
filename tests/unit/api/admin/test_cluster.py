"""What the cluster routes say of ranks and groups."""

from msgspec.structs import replace

from engine.wire.control import Membership, MemberStatus
from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReady, EngineReport
from engine.wire.states import EnginePhase, EngineState
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView
from lb.views.totals import Totals
from metrics.deployment import DeploymentReading
from metrics.stats import ServingStats
from orchestrator.api.admin.cluster import describe_group, describe_rank, describe_readiness

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
        num_in_flight=4,
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
        "lockstep": None,
    }


def test_a_rank_nobody_heard_of_yet_is_listed_too() -> None:
    rank = describe_rank(view("loading"), reading())
    assert (rank["state"], rank["pid"], rank["phase"]) == ("loading", 0, "")


def test_a_member_of_a_lockstep_group_tells_where_it_stands() -> None:
    membership = Membership(4, [EngineId(0, 2), EngineId(1, 1)], [[0, 2], [1]], "here:1")
    status = MemberStatus(3, "here:1", membership, expert_loads=[5, 6, 7], num_empty_steps=8)
    report = replace(REPORT, epoch=4, ready_epoch=4, wave=3, member=status)
    totals = {0: Totals(num_empty_steps=20)}
    seen = DeploymentReading(stats=ServingStats(), totals=totals, in_flight={}, servers=[])
    member = describe_rank(view("ready", report, READY), seen)["lockstep"]
    assert member == {"epoch": 4, "ready_epoch": 4, "wave": 3, "experts": [0, 2], "empty_steps": 20}
    behind = replace(report, epoch=3)
    assert describe_rank(view("ready", behind, READY), seen)["lockstep"]["experts"] == []


def test_a_lockstep_group_tells_what_is_in_force_and_what_is_prepared() -> None:
    members = [EngineId(0, 2), EngineId(2, 1)]
    proposal = Membership(9, members[:1], [[0, 1]], "here:1")
    group = GroupView(epoch=7, wave=3, placement=dict(zip(members, ([0], [1]), strict=True)), proposal=proposal)
    seen = DeploymentReading(stats=ServingStats(), totals={}, in_flight={}, servers=[], expert_tokens=[30, 10])
    assert describe_group(group, seen) == {
        "epoch": 7,
        "wave": 3,
        "members": [0, 2],
        "experts": {"0": [0], "2": [1]},
        "load_imbalance": 1.5,
        "proposal": {"epoch": 9, "members": [0], "direct": False},
    }
    assert describe_group(None, seen) is None


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
