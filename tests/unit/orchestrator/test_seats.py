"""What the supervisor knows of every seat."""

from msgspec.structs import replace

from engine.wire.ids import EngineId
from engine.wire.messages import EnginePhase, Load, SeatState, Suspect
from orchestrator.launch.host import EngineExit
from orchestrator.restarts import RestartRule
from orchestrator.seats import SeatTable
from tests.unit.orchestrator.reports import report

E0, E1 = EngineId(0, 1), EngineId(1, 1)
GONE = EngineExit(-9, "killed by SIGKILL", ("last words",))
RULE = RestartRule(max_in_row=2)


def test_a_seat_goes_from_starting_to_alive_to_leaving_to_dead() -> None:
    table = SeatTable([E0], RULE)
    (seat,) = table
    states = [seat.state]
    table.on_report(report(E0, 1, EnginePhase.LOADING), 0.0)
    states.append(seat.state)
    table.on_report(report(E0, 2), 0.0)
    states.append(seat.state)
    table.dismiss()
    states.append(seat.state)
    table.on_exit(E0, GONE, 0.0)
    states.append(seat.state)
    assert states == [
        SeatState.STARTING,
        SeatState.STARTING,
        SeatState.ALIVE,
        SeatState.LEAVING,
        SeatState.DEAD,
    ]


def test_stale_reports_and_those_of_strangers_are_dropped() -> None:
    table = SeatTable([E0], RULE)
    assert table.on_report(report(E0, 2), 0.0) is not None
    assert table.on_report(report(E0, 2, EnginePhase.LOADING), 0.0) is None
    assert table.on_report(report(EngineId(0, 2), 9), 0.0) is None
    assert table.all_ready


def test_what_is_published_names_every_seat_the_dead_with_their_reason() -> None:
    table = SeatTable([E0, E1], RULE)
    table.on_report(report(E0, 1, node="n"), 0.0)
    table.on_exit(E1, GONE, 0.0)
    table.dismiss()
    published = table.to_report(5)
    assert published.report_seq == 5
    assert [(seat.engine_id, seat.state, seat.reason, seat.node) for seat in published.seats] == [
        (E0, SeatState.LEAVING, "", "n"),
        (E1, SeatState.DEAD, "killed by SIGKILL", ""),
    ]
    assert published.dismissed == [E0, E1]


def test_ranks_that_are_not_ready_are_described_with_phase_and_progress() -> None:
    table = SeatTable([E0, E1, EngineId(2, 1), EngineId(3, 1)], RULE)
    table.on_report(report(E0, 1), 0.0)
    table.on_report(report(E1, 1, EnginePhase.LOADING, detail="weights", progress=0.4, node="n", pid=7), 0.0)
    table.on_exit(EngineId(3, 1), GONE, 0.0)
    assert table.describe_unready() == (
        "rank 1: loading: weights, 40%, pid 7 on n; rank 2: starting; rank 3: dead: killed by SIGKILL"
    )
    assert not table.all_ready
    assert not table.all_lost


def test_an_engine_that_ends_during_the_start_has_no_successor() -> None:
    table = SeatTable([E0], RULE)
    assert table.on_exit(E0, GONE, 0.0).refill_in_s is None
    assert table.all_lost


def test_a_seat_is_filled_with_the_next_incarnation_and_keeps_what_happened_in_it() -> None:
    table = SeatTable([E0, E1], RULE)
    table.refills = True
    table.on_report(report(E0, 7), 0.0)
    assert table.on_exit(E0, GONE, 1.0).refill_in_s == 0.0
    assert not table.all_lost
    seat = table.refill(0)
    assert (seat.engine_id, seat.state) == (EngineId(0, 2), SeatState.STARTING)
    assert table.on_report(report(E0, 8), 1.0) is None
    assert table.on_report(report(EngineId(0, 2), 1), 1.0) is seat
    wire = table.to_report(1).seats[0]
    assert (wire.state, wire.reason) == (SeatState.ALIVE, "")
    assert (wire.restarts, wire.last_reason) == ({"signal": 1}, "killed by SIGKILL")


def test_a_seat_whose_restarts_are_used_up_is_lost_and_the_others_are_not() -> None:
    table = SeatTable([E0, E1], RULE)
    table.refills = True
    pauses = []
    for incarnation in (1, 2, 3):
        pauses.append(table.on_exit(EngineId(0, incarnation), GONE, 1.0).refill_in_s)
        if pauses[-1] is not None:
            table.refill(0)
    assert pauses == [0.0, 1.0, None]
    assert [seat.is_lost for seat in table] == [True, False]
    assert not table.all_lost
    assert table.to_report(1).seats[0].restarts == {"signal": 2}


def test_the_kind_of_an_end_is_one_of_a_few_words() -> None:
    ends = [EngineExit(1, "x"), EngineExit(-11, "x"), EngineExit(None, "x"), EngineExit(-9, "x", was_hung=True)]
    assert [str(end.kind) for end in ends] == ["exit", "signal", "lost", "hung"]


def test_suspects_are_news_once_and_a_hung_engine_is_to_be_killed_once() -> None:
    table = SeatTable([E0, E1], RULE)
    first, second = table
    suspect = Suspect(E0, False, "silent for 1.2 s (behind step 3)", 1.2)
    assert table.on_suspects([suspect]) == ([first], [])
    assert table.on_suspects([suspect]) == ([], [])
    assert table.on_suspects([]) == ([first], [])
    hung = Suspect(E1, True, "no step for 3.1 s (behind step 8)", 3.1)
    assert table.on_suspects([hung]) == ([], [second])
    assert table.on_suspects([hung]) == ([], [])
    assert table.on_suspects([]) == ([], [])
    end = table.on_exit(E1, GONE, 0.0).exit
    assert end is not None
    assert (end.reason, end.kind) == ("hung: no step for 3.1 s (behind step 8), killed", "hung")


def test_what_is_said_of_an_engine_that_is_gone_concerns_nobody() -> None:
    table = SeatTable([E0], RULE)
    table.refills = True
    table.on_exit(E0, GONE, 0.0)
    table.refill(0)
    assert table.on_suspects([Suspect(E0, True, "silent", 9.0)]) == ([], [])


def test_a_seat_that_comes_or_goes_with_its_engine_is_not_filled_again_by_itself() -> None:
    table = SeatTable([E0], RULE)
    table.refills = True
    new = table.open(1)
    assert (new.engine_id, new.is_temporary) == (E1, True)
    assert table.on_exit(E1, GONE, 0.0).refill_in_s is None
    table.close(1)
    assert table.at(1) is None
    again = table.open(1)
    assert again.engine_id == EngineId(1, 2)
    assert again.history is new.history
    table.on_report(report(again.engine_id, 1), 0.0)
    assert table.keep(1, 1.0) is None
    assert table.on_exit(again.engine_id, GONE, 2.0).refill_in_s is not None


def test_a_seat_that_stays_after_all_is_filled_again_if_its_engine_has_ended_meanwhile() -> None:
    table = SeatTable([E0, E1], RULE)
    table.refills = True
    seat = table.at(0)
    assert seat is not None
    seat.is_draining = seat.is_leaving = True
    assert table.to_report(1).seats[0].is_draining
    assert seat.state is SeatState.LEAVING
    assert table.on_exit(E0, GONE, 0.0).refill_in_s is None
    assert table.keep(0, 1.0) == 0.0
    assert not seat.is_temporary


def test_a_dismissal_is_no_death() -> None:
    table = SeatTable([E0], RULE)
    table.dismiss()
    table.on_exit(E0, EngineExit(0, "exit status 0"), 0.0)
    wire = table.to_report(1).seats[0]
    assert (wire.restarts, wire.last_reason) == ({}, "")


def test_an_engine_is_empty_once_it_turns_away_and_has_nothing_left() -> None:
    table = SeatTable([E0], RULE)
    (seat,) = table
    seen = []
    for number, (draining, running) in enumerate([(False, 0), (True, 1), (True, 0)]):
        said = replace(report(E0, number + 1), is_draining=draining, load=Load(num_running=running))
        table.on_report(said, 0.0)
        seen.append(seat.is_empty)
    assert seen == [False, False, True]
