"""What is shown of every engine."""

from client.views import make_views
from engine.wire.ids import EngineId
from engine.wire.messages import EnginePhase, EngineReport, Load, Seat, SeatState
from lb.totals import RankTotals
from lb.views import EngineView
from tests.unit.client.builders import make_add, make_line

E0 = EngineId(0, 1)


def _views(**known: object) -> list[EngineView]:
    parts: dict[str, object] = {"lines": {}, "reports": {}, "seats": {}, "gone": {}, "refused": {}, "suspects": {}}
    parts |= {"num_clients": 1, "totals": RankTotals()}
    return make_views(**(parts | known))  # type: ignore[arg-type]


def _report(engine_id: EngineId, phase: EnginePhase = EnginePhase.IDLE) -> EngineReport:
    return EngineReport(engine_id, 1, 0, 0, 0, 0, phase, 0, False, {}, Load())


def test_an_engine_is_loading_until_it_shakes_hands() -> None:
    (view,) = _views(reports={E0: _report(E0, EnginePhase.LOADING)})
    assert (view.state, view.ready, view.num_in_flight) == ("loading", None, 0)


def test_a_ready_engine_shows_what_this_client_has_on_it() -> None:
    line = make_line()
    line.ledger.add(line.next_seq, make_add(1).cost)
    (view,) = _views(lines={E0: line}, reports={E0: _report(E0)}, num_clients=3)
    assert (view.state, view.num_in_flight, view.load_score, view.num_picks) == ("ready", 1, 3, 1)
    assert view.ready == line.ready
    line.leaving = True
    assert _views(lines={E0: line})[0].state == "leaving"


def test_an_engine_without_a_sign_of_progress_is_suspect_and_says_why_unless_it_leaves() -> None:
    line = make_line()
    line.suspect = True
    suspects = {E0: "no step for 3.0 s (behind step 8)"}
    (view,) = _views(lines={E0: line}, suspects=suspects)
    assert (view.state, view.reason) == ("suspect", "no step for 3.0 s (behind step 8)")
    line.leaving = True
    assert _views(lines={E0: line}, suspects=suspects)[0].state == "leaving"
    assert _views(lines={}, gone={E0: "exit code 1"}, suspects=suspects)[0].reason == "exit code 1"


def test_a_dead_engine_keeps_its_reason_until_its_seat_is_refilled() -> None:
    seat = Seat(E0, SeatState.DEAD, "exit code 1")
    (view,) = _views(seats={0: seat}, gone={E0: "exit code 1"})
    assert (view.state, view.reason, view.seat) == ("dead", "exit code 1", seat)
    reborn = EngineId(0, 2)
    (view,) = _views(seats={0: Seat(reborn, SeatState.STARTING)}, gone={E0: "exit code 1"})
    assert (view.engine_id, view.state, view.reason) == (reborn, "loading", "")


def test_a_refused_engine_says_why() -> None:
    (view,) = _views(refused={E0: "refused: its build is 2, ours is 1"})
    assert (view.state, view.reason) == ("loading", "refused: its build is 2, ours is 1")


def test_a_rank_whose_seat_was_removed_is_gone_from_the_view() -> None:
    other = EngineId(1, 1)
    seats = {1: Seat(other, SeatState.ALIVE)}
    views = _views(seats=seats, reports={E0: _report(E0)}, gone={E0: "its seat was removed"})
    assert [view.engine_id for view in views] == [other]


def test_views_come_in_the_order_of_the_ranks() -> None:
    lines = {line.engine_id: line for line in (make_line(5), make_line(0), make_line(2))}
    assert [view.engine_id.rank for view in _views(lines=lines)] == [0, 2, 5]
