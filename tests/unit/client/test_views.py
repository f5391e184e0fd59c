"""What is shown of every engine."""

from client.views import make_views
from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import EnginePhase, ReplicaState
from lb.views.engine_view import EngineView
from lb.views.totals import RankTotals
from tests.unit.client.builders import make_connection

E0 = EngineId(0, 1)


def _views(**known: object) -> list[EngineView]:
    parts: dict[str, object] = {
        "connections": {},
        "reports": {},
        "replicas": {},
        "gone": {},
        "refused": {},
        "suspects": {},
    }
    parts |= {"totals": RankTotals()}
    return make_views(**(parts | known))  # type: ignore[arg-type]


def _report(engine_id: EngineId, phase: EnginePhase = EnginePhase.IDLE) -> EngineReport:
    return EngineReport(engine_id, 1, 0, 0, 0, 0, phase, 0, False, {}, Load())


def test_an_engine_is_loading_until_it_shakes_hands() -> None:
    (view,) = _views(reports={E0: _report(E0, EnginePhase.LOADING)})
    assert (view.state, view.ready, view.num_in_flight) == ("loading", None, 0)


def test_a_ready_engine_shows_what_this_client_has_on_it() -> None:
    connection = make_connection()
    connection.ledger.add(connection.next_seq)
    (view,) = _views(connections={E0: connection}, reports={E0: _report(E0)})
    assert (view.state, view.num_in_flight, view.num_picks) == ("ready", 1, 1)
    assert view.ready == connection.ready
    connection.leaving = True
    assert _views(connections={E0: connection})[0].state == "leaving"


def test_an_engine_without_a_sign_of_progress_is_suspect_and_says_why_unless_it_leaves() -> None:
    connection = make_connection()
    connection.suspect = True
    suspects = {E0: "no step for 3.0 s (behind step 8)"}
    (view,) = _views(connections={E0: connection}, suspects=suspects)
    assert (view.state, view.reason) == ("suspect", "no step for 3.0 s (behind step 8)")
    connection.leaving = True
    assert _views(connections={E0: connection}, suspects=suspects)[0].state == "leaving"
    assert _views(connections={}, gone={E0: "exit code 1"}, suspects=suspects)[0].reason == "exit code 1"


def test_a_dead_engine_keeps_its_reason_until_its_seat_is_refilled() -> None:
    replica = ReplicaInfo(E0, ReplicaState.DEAD, "exit code 1")
    (view,) = _views(replicas={0: replica}, gone={E0: "exit code 1"})
    assert (view.state, view.reason, view.replica) == ("dead", "exit code 1", replica)
    reborn = EngineId(0, 2)
    (view,) = _views(replicas={0: ReplicaInfo(reborn, ReplicaState.STARTING)}, gone={E0: "exit code 1"})
    assert (view.engine_id, view.state, view.reason) == (reborn, "loading", "")


def test_a_refused_engine_says_why() -> None:
    (view,) = _views(refused={E0: "refused: its build is 2, ours is 1"})
    assert (view.state, view.reason) == ("loading", "refused: its build is 2, ours is 1")


def test_a_rank_whose_seat_was_removed_is_gone_from_the_view() -> None:
    other = EngineId(1, 1)
    replicas = {1: ReplicaInfo(other, ReplicaState.ALIVE)}
    views = _views(replicas=replicas, reports={E0: _report(E0)}, gone={E0: "its seat was removed"})
    assert [view.engine_id for view in views] == [other]


def test_views_come_in_the_order_of_the_ranks() -> None:
    connections = {
        connection.engine_id: connection for connection in (make_connection(5), make_connection(0), make_connection(2))
    }
    assert [view.engine_id.rank for view in _views(connections=connections)] == [0, 2, 5]
