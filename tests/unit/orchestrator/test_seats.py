"""What the supervisor knows of every seat."""

from engine.wire.ids import EngineId
from engine.wire.messages import EnginePhase, SeatState
from orchestrator.launch.host import EngineExit
from orchestrator.seats import SeatTable
from tests.unit.orchestrator.reports import report

E0, E1 = EngineId(0, 1), EngineId(1, 1)
GONE = EngineExit(-9, "killed by SIGKILL", ("last words",))


def test_a_seat_goes_from_starting_to_alive_to_leaving_to_dead() -> None:
    table = SeatTable([E0])
    (seat,) = table
    states = [seat.state]
    table.on_report(report(E0, 1, EnginePhase.LOADING))
    states.append(seat.state)
    table.on_report(report(E0, 2))
    states.append(seat.state)
    table.dismiss()
    states.append(seat.state)
    table.on_exit(E0, GONE)
    states.append(seat.state)
    assert states == [
        SeatState.STARTING,
        SeatState.STARTING,
        SeatState.ALIVE,
        SeatState.LEAVING,
        SeatState.DEAD,
    ]


def test_stale_reports_and_those_of_strangers_are_dropped() -> None:
    table = SeatTable([E0])
    assert table.on_report(report(E0, 2)) is not None
    assert table.on_report(report(E0, 2, EnginePhase.LOADING)) is None
    assert table.on_report(report(EngineId(0, 2), 9)) is None
    assert table.all_ready


def test_what_is_published_names_every_seat_the_dead_with_their_reason() -> None:
    table = SeatTable([E0, E1])
    table.on_report(report(E0, 1, node="n"))
    table.on_exit(E1, GONE)
    table.dismiss()
    published = table.to_report(5)
    assert published.report_seq == 5
    assert [(seat.engine_id, seat.state, seat.reason, seat.node) for seat in published.seats] == [
        (E0, SeatState.LEAVING, "", "n"),
        (E1, SeatState.DEAD, "killed by SIGKILL", ""),
    ]
    assert published.dismissed == [E0, E1]


def test_ranks_that_are_not_ready_are_described_with_phase_and_progress() -> None:
    table = SeatTable([E0, E1, EngineId(2, 1), EngineId(3, 1)])
    table.on_report(report(E0, 1))
    table.on_report(report(E1, 1, EnginePhase.LOADING, detail="weights", progress=0.4, node="n", pid=7))
    table.on_exit(EngineId(3, 1), GONE)
    assert table.describe_unready() == (
        "rank 1: loading: weights, 40%, pid 7 on n; rank 2: starting; rank 3: dead: killed by SIGKILL"
    )
    assert not table.all_ready
    assert not table.all_dead
