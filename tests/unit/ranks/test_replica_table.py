"""What the supervisor knows of every replica."""

from msgspec.structs import replace

from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.replicas import Suspect
from engine.wire.states import EnginePhase, ReplicaState
from orchestrator.processes.exits import ProcessExit
from orchestrator.processes.restarts import RestartRule
from orchestrator.ranks.replica_table import ReplicaTable
from tests.unit.ranks.reports import report

E0, E1 = EngineId(0, 1), EngineId(1, 1)
GONE = ProcessExit(-9, "killed by SIGKILL", ("last words",))
RULE = RestartRule(max_in_row=2)


def test_a_replica_goes_from_starting_to_alive_to_leaving_to_dead() -> None:
    table = ReplicaTable([E0], RULE)
    (replica,) = table
    states = [replica.state]
    table.on_report(report(E0, 1, EnginePhase.LOADING), 0.0)
    states.append(replica.state)
    table.on_report(report(E0, 2), 0.0)
    states.append(replica.state)
    table.dismiss()
    states.append(replica.state)
    table.on_exit(E0, GONE, 0.0)
    states.append(replica.state)
    assert states == [
        ReplicaState.STARTING,
        ReplicaState.STARTING,
        ReplicaState.ALIVE,
        ReplicaState.LEAVING,
        ReplicaState.DEAD,
    ]


def test_stale_reports_and_those_of_unknown_engines_are_dropped() -> None:
    table = ReplicaTable([E0], RULE)
    assert table.on_report(report(E0, 2), 0.0) is not None
    assert table.on_report(report(E0, 2, EnginePhase.LOADING), 0.0) is None
    assert table.on_report(report(EngineId(0, 2), 9), 0.0) is None
    assert table.all_ready


def test_what_is_published_names_every_replica_the_dead_with_their_reason() -> None:
    table = ReplicaTable([E0, E1], RULE)
    table.on_report(report(E0, 1, node="n"), 0.0)
    table.on_exit(E1, GONE, 0.0)
    table.dismiss()
    published = table.to_report(5)
    assert published.report_seq == 5
    assert [(replica.engine_id, replica.state, replica.reason, replica.node) for replica in published.replicas] == [
        (E0, ReplicaState.LEAVING, "", "n"),
        (E1, ReplicaState.DEAD, "killed by SIGKILL", ""),
    ]
    assert published.dismissed == [E0, E1]


def test_ranks_that_are_not_ready_are_described_with_phase_and_progress() -> None:
    table = ReplicaTable([E0, E1, EngineId(2, 1), EngineId(3, 1)], RULE)
    table.on_report(report(E0, 1), 0.0)
    table.on_report(report(E1, 1, EnginePhase.LOADING, detail="weights", progress=0.4, node="n", pid=7), 0.0)
    table.on_exit(EngineId(3, 1), GONE, 0.0)
    assert table.describe_unready() == (
        "rank 1: loading: weights, 40%, pid 7 on n; rank 2: starting; rank 3: dead: killed by SIGKILL"
    )
    assert not table.all_ready
    assert not table.all_lost


def test_an_engine_that_ends_during_the_start_has_no_successor() -> None:
    table = ReplicaTable([E0], RULE)
    assert table.on_exit(E0, GONE, 0.0).replacement_in_s is None
    assert table.all_lost


def test_a_replica_gets_the_next_incarnation_and_keeps_its_history() -> None:
    table = ReplicaTable([E0, E1], RULE)
    table.replacements = True
    table.on_report(report(E0, 7), 0.0)
    assert table.on_exit(E0, GONE, 1.0).replacement_in_s == 0.0
    assert not table.all_lost
    replica = table.replace(0)
    assert (replica.engine_id, replica.state) == (EngineId(0, 2), ReplicaState.STARTING)
    assert table.on_report(report(E0, 8), 1.0) is None
    assert table.on_report(report(EngineId(0, 2), 1), 1.0) is replica
    wire = table.to_report(1).replicas[0]
    assert (wire.state, wire.reason) == (ReplicaState.ALIVE, "")
    assert (wire.restarts, wire.last_reason) == ({"signal": 1}, "killed by SIGKILL")


def test_a_replica_whose_restarts_are_used_up_is_lost_and_the_others_are_not() -> None:
    table = ReplicaTable([E0, E1], RULE)
    table.replacements = True
    pauses = []
    for incarnation in (1, 2, 3):
        pauses.append(table.on_exit(EngineId(0, incarnation), GONE, 1.0).replacement_in_s)
        if pauses[-1] is not None:
            table.replace(0)
    assert pauses == [0.0, 1.0, None]
    assert [replica.is_lost for replica in table] == [True, False]
    assert not table.all_lost
    assert table.to_report(1).replicas[0].restarts == {"signal": 2}


def test_the_kind_of_an_end_is_one_of_a_few_words() -> None:
    ends = [ProcessExit(1, "x"), ProcessExit(-11, "x"), ProcessExit(None, "x"), ProcessExit(-9, "x", was_hung=True)]
    assert [str(end.kind) for end in ends] == ["exit", "signal", "lost", "hung"]


def test_suspects_are_news_once_and_a_hung_engine_is_to_be_killed_once() -> None:
    table = ReplicaTable([E0, E1], RULE)
    first, second = table
    suspect = Suspect(E0, False, "silent for 1.2 s (behind step 3)")
    assert table.on_suspects([suspect]) == ([first], [])
    assert table.on_suspects([suspect]) == ([], [])
    assert table.on_suspects([]) == ([first], [])
    hung = Suspect(E1, True, "no step for 3.1 s (behind step 8)")
    assert table.on_suspects([hung]) == ([], [second])
    assert table.on_suspects([hung]) == ([], [])
    assert table.on_suspects([]) == ([], [])
    end = table.on_exit(E1, GONE, 0.0).exit
    assert end is not None
    assert (end.reason, end.kind) == ("hung: no step for 3.1 s (behind step 8), killed", "hung")


def test_what_is_said_of_an_engine_that_is_gone_concerns_nobody() -> None:
    table = ReplicaTable([E0], RULE)
    table.replacements = True
    table.on_exit(E0, GONE, 0.0)
    table.replace(0)
    assert table.on_suspects([Suspect(E0, True, "silent")]) == ([], [])


def test_a_replica_that_comes_or_goes_with_its_engine_is_not_replaced_by_itself() -> None:
    table = ReplicaTable([E0], RULE)
    table.replacements = True
    new = table.open(1)
    assert (new.engine_id, new.is_temporary) == (E1, True)
    assert table.on_exit(E1, GONE, 0.0).replacement_in_s is None
    table.close(1)
    assert table.at(1) is None
    again = table.open(1)
    assert again.engine_id == EngineId(1, 2)
    assert again.history is new.history
    table.on_report(report(again.engine_id, 1), 0.0)
    assert table.keep(1, 1.0) is None
    assert table.on_exit(again.engine_id, GONE, 2.0).replacement_in_s is not None


def test_a_replica_that_stays_after_all_is_replaced_if_its_engine_has_ended_meanwhile() -> None:
    table = ReplicaTable([E0, E1], RULE)
    table.replacements = True
    replica = table.at(0)
    assert replica is not None
    replica.is_draining = replica.is_leaving = True
    assert table.to_report(1).replicas[0].is_draining
    assert replica.state is ReplicaState.LEAVING
    assert table.on_exit(E0, GONE, 0.0).replacement_in_s is None
    assert table.keep(0, 1.0) == 0.0
    assert not replica.is_temporary


def test_a_dismissal_is_no_death() -> None:
    table = ReplicaTable([E0], RULE)
    table.dismiss()
    table.on_exit(E0, ProcessExit(0, "exit status 0"), 0.0)
    wire = table.to_report(1).replicas[0]
    assert (wire.restarts, wire.last_reason) == ({}, "")


def test_an_engine_is_empty_once_it_turns_away_and_has_nothing_left() -> None:
    table = ReplicaTable([E0], RULE)
    (replica,) = table
    seen = []
    for number, (draining, running) in enumerate([(False, 0), (True, 1), (True, 0)]):
        said = replace(report(E0, number + 1), is_draining=draining, load=Load(num_running=running))
        table.on_report(said, 0.0)
        seen.append(replica.is_empty)
    assert seen == [False, False, True]
