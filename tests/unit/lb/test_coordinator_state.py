"""What the coordinator makes of reports: pure, on hand-made times."""

from typing import Any

import pytest
from msgspec.structs import replace

from engine.wire.control import ClusterSettings, PauseMode
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import ClientInfo, ClientReport, EngineReport, SupervisorReport
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import EnginePhase, ReplicaState
from lb.coordinator.state import MAX_REPLICAS, CoordinatorState

E0, E1 = EngineId(0, 1), EngineId(1, 1)


def _engine(engine_id: EngineId, seq: int, phase: EnginePhase = EnginePhase.IDLE, **changes: Any) -> EngineReport:
    return replace(EngineReport(engine_id, seq, 0, 0, 0, 0, phase, 0, False, {}, Load()), **changes)


def _client(index: int, seq: int, incarnation: int = 1, *, leaving: bool = False) -> ClientReport:
    info = ClientInfo(ClientId(index, incarnation), f"ipc://r{index}.{incarnation}", f"ipc://o{index}.{incarnation}")
    return ClientReport(seq, info, leaving)


def _replicas(seq: int, *replicas: ReplicaInfo, **changes: Any) -> SupervisorReport:
    return replace(SupervisorReport(seq, list(replicas), [], []), **changes)


def _state(*reports: Any, now: float = 0.0) -> CoordinatorState:
    state = CoordinatorState(generation=3, client_silence_s=10.0, stall_timeout_s=60.0)
    for report in reports:
        state.on_report(report, now)
    return state


def _members(state: CoordinatorState) -> list[EngineId]:
    return state.group_state().committed.members


def _clients(state: CoordinatorState) -> list[ClientId]:
    return [info.client_id for info in state.group_state().clients]


def test_engines_are_members_while_they_serve() -> None:
    state = _state(_engine(E0, 1, EnginePhase.LOADING), _engine(E1, 1))
    assert _members(state) == [E1]
    state.on_report(_engine(E0, 2, EnginePhase.RUNNING), 0.0)
    assert _members(state) == [E0, E1]
    state.on_report(_engine(E1, 2, EnginePhase.STOPPING), 0.0)
    assert _members(state) == [E0]


def test_every_change_of_the_members_is_a_new_epoch_and_nothing_else_is() -> None:
    state = _state(_engine(E0, 1))
    epoch = state.group_state().committed.epoch
    state.on_report(_engine(E0, 2, EnginePhase.RUNNING, load=Load(num_running=3)), 0.0)
    assert state.group_state().committed.epoch == epoch
    state.on_report(_engine(E1, 1), 0.0)
    assert state.group_state().committed.epoch == epoch + 1


def test_a_restarted_coordinator_goes_on_above_every_epoch_that_was_seen() -> None:
    state = _state(_engine(E0, 900, max_epoch_seen=17))
    assert state.group_state().committed.epoch == 18


def test_the_newest_report_of_a_rank_wins_in_any_order() -> None:
    state = _state(_engine(E0, 5, load=Load(num_running=5)))
    state.on_report(_engine(E0, 4, load=Load(num_running=4)), 0.0)
    state.on_report(_engine(EngineId(0, 2), 1, load=Load(num_running=1)), 0.0)
    state.on_report(_engine(E0, 6, load=Load(num_running=6)), 0.0)
    (report,) = state.load_snapshot().reports
    assert (report.engine_id, report.load.num_running) == (EngineId(0, 2), 1)
    assert _members(state) == [EngineId(0, 2)]
    assert state.dropped["old engine report"] == 2


def test_reports_are_published_verbatim_by_rank() -> None:
    reports = [_engine(E1, 7, applied={ClientId(0, 1): 4}), _engine(E0, 2, EnginePhase.LOADING, detail="weights")]
    snapshot = _state(*reports).load_snapshot()
    assert snapshot.reports == [reports[1], reports[0]]


def test_a_silent_engine_stays_a_member_for_ever() -> None:
    state = _state(_engine(E0, 1))
    state.expire(1e9)
    assert _members(state) == [E0]


def test_a_death_is_what_the_supervisor_confirmed() -> None:
    state = _state(
        _engine(E0, 1),
        _engine(E1, 1),
        _replicas(1, ReplicaInfo(E0, ReplicaState.ALIVE), ReplicaInfo(E1, ReplicaState.ALIVE)),
    )
    dead = ReplicaInfo(E1, ReplicaState.DEAD, "exit code -9")
    state.on_report(_replicas(2, ReplicaInfo(E0, ReplicaState.ALIVE), dead), 0.0)
    state.on_report(_engine(E1, 2), 0.0)  # was on its way
    assert _members(state) == [E0]
    assert [report.engine_id for report in state.load_snapshot().reports] == [E0]
    assert dead in state.group_state().replicas


def test_a_replacement_is_a_member_under_its_own_name() -> None:
    state = _state(_engine(E0, 9), _replicas(1, ReplicaInfo(E0, ReplicaState.DEAD, "gone")))
    replacement = EngineId(0, 2)
    state.on_report(_engine(replacement, 1), 0.0)  # its report may come before the supervisor's
    assert _members(state) == [replacement]
    state.on_report(_replicas(2, ReplicaInfo(replacement, ReplicaState.ALIVE)), 0.0)
    assert _members(state) == [replacement]


def test_dismissed_engines_are_no_members() -> None:
    state = _state(_engine(E0, 1), _engine(E1, 1))
    replicas = [ReplicaInfo(E0, ReplicaState.ALIVE), ReplicaInfo(E1, ReplicaState.LEAVING)]
    state.on_report(_replicas(1, *replicas, dismissed=[E1]), 0.0)
    assert _members(state) == [E0]
    assert state.group_state().dismissed == [E1]


def test_engines_without_a_replica_are_nobody_once_the_replicas_are_known() -> None:
    unknown = EngineId(9, 1)
    state = _state(_engine(unknown, 1), _replicas(1, ReplicaInfo(E0, ReplicaState.ALIVE)))
    state.on_report(_engine(unknown, 2), 0.0)
    assert (state.load_snapshot().reports, _members(state)) == ([], [])
    assert state.dropped["engine report from nobody"] == 1


def test_an_old_supervisor_report_changes_nothing() -> None:
    state = _state(_replicas(5, ReplicaInfo(E0, ReplicaState.ALIVE)), _replicas(4, ReplicaInfo(E0, ReplicaState.DEAD)))
    assert state.group_state().replicas == [ReplicaInfo(E0, ReplicaState.ALIVE)]


def test_clients_are_listed_by_index_from_their_first_report() -> None:
    state = _state(_client(1, 1), _client(0, 1))
    assert _clients(state) == [ClientId(0, 1), ClientId(1, 1)]


def test_a_client_that_leaves_is_not_brought_back_by_a_late_report() -> None:
    state = _state(_client(0, 5), _client(0, 7, leaving=True), _client(0, 6))
    assert _clients(state) == []


def test_a_restarted_client_replaces_its_predecessor() -> None:
    state = _state(_client(0, 90), _client(0, 1, incarnation=2), _client(0, 91))
    assert _clients(state) == [ClientId(0, 2)]


def test_a_silent_client_is_taken_out_and_comes_back_with_its_next_report() -> None:
    state = _state(_client(0, 1), now=100.0)
    state.on_report(_client(0, 2), 105.0)
    assert state.next_expiry(105.0) == 115.0
    state.expire(115.0)
    assert _clients(state) == [ClientId(0, 1)]
    state.expire(115.1)
    assert _clients(state) == []
    state.on_report(_client(0, 3), 130.0)
    assert _clients(state) == [ClientId(0, 1)]


def test_a_client_whose_process_ended_is_taken_out_at_once() -> None:
    state = _state(_client(0, 1, incarnation=2), _replicas(1, gone_clients=[ClientId(0, 1)]))
    assert _clients(state) == [ClientId(0, 2)]
    state.on_report(_replicas(2, gone_clients=[ClientId(0, 2)]), 0.0)
    assert _clients(state) == []


def test_versions_rise_only_when_something_new_would_be_said() -> None:
    state = _state(_engine(E0, 1), _client(0, 1), _replicas(1, ReplicaInfo(E0, ReplicaState.ALIVE)))
    versions = (state.group_version, state.load_version)
    for report in (_engine(E0, 2), _client(0, 2), _replicas(2, ReplicaInfo(E0, ReplicaState.ALIVE))):
        state.on_report(report, 1.0)
    assert (state.group_version, state.load_version) == versions
    state.on_report(_engine(E0, 3, applied={ClientId(0, 1): 1}), 1.0)
    assert (state.group_version, state.load_version) == (versions[0], versions[1] + 1)


def test_a_state_is_observed_once_every_member_has_shown_its_epoch() -> None:
    state = _state(_engine(E0, 1), _engine(E1, 1))
    epoch = state.group_state().committed.epoch
    assert not state.is_observed()
    state.on_report(_engine(E0, 2, max_epoch_seen=epoch), 0.0)
    assert not state.is_observed()
    state.on_report(_engine(E1, 2, max_epoch_seen=epoch), 0.0)
    assert state.is_observed()


def test_messages_are_numbered_across_both_kinds() -> None:
    state = _state()
    numbers = [(m.generation, m.seq) for m in (state.group_state(), state.load_snapshot(), state.group_state())]
    assert numbers == [(3, 1), (3, 2), (3, 3)]


def test_the_wave_fields_of_independent_ranks_are_at_rest() -> None:
    group = _state(_engine(E0, 1)).group_state()
    assert (group.proposal, group.direct, group.wave_started, group.settings.pause) == (None, False, 0, PauseMode.RUN)


def test_unknown_senders_cannot_fill_the_memory() -> None:
    state = _state(*(_engine(EngineId(rank, 1), 1, EnginePhase.LOADING) for rank in range(MAX_REPLICAS + 10)))
    state.on_report(
        _replicas(1, *(ReplicaInfo(EngineId(rank, 1), ReplicaState.ALIVE) for rank in range(MAX_REPLICAS + 1))), 0.0
    )
    assert len(state.load_snapshot().reports) == MAX_REPLICAS
    assert state.group_state().replicas == []
    for index in range(1100):
        state.on_report(_client(index, 1), 0.0)
    assert len(state.group_state().clients) == 1024


def test_a_suspect_and_its_recovery_are_new_states() -> None:
    state = _state(_engine(E0, 1), _engine(E1, 1), now=100.0)
    state.expire(100.0)
    version = state.group_version
    state.on_report(_engine(E0, 2), 101.2)
    assert state.next_expiry(101.2) == pytest.approx(102.2)
    state.expire(101.2)
    assert state.group_version == version + 1
    (suspect,) = state.group_state().suspects
    assert (suspect.engine_id, suspect.is_hung) == (E1, False)
    state.on_report(_engine(E1, 2), 101.3)
    state.expire(101.3)
    assert state.group_version == version + 2
    assert state.group_state().suspects == []


def test_what_the_operator_wants_is_passed_on_and_a_pause_is_no_stall() -> None:
    settings = ClusterSettings(seq=3, pause=PauseMode.KEEP)
    state = _state(
        _engine(E0, 1, EnginePhase.RUNNING, has_work=True), _replicas(1, ReplicaInfo(E0, ReplicaState.ALIVE)), now=0.0
    )
    version = state.group_version
    state.on_report(_replicas(2, ReplicaInfo(E0, ReplicaState.ALIVE), settings=settings), 0.0)
    assert state.group_version == version + 1
    assert state.group_state().settings == settings
    for seq in range(2, 1000):
        state.on_report(_engine(E0, seq, EnginePhase.IDLE, settings_seq=3), seq / 5)
        state.expire(seq / 5)
    assert state.group_state().suspects == []


def test_settings_are_repeated_until_every_member_shows_them() -> None:
    state = _state(
        _engine(E0, 1),
        _engine(E1, 1),
        _replicas(1, ReplicaInfo(E0, ReplicaState.ALIVE), ReplicaInfo(E1, ReplicaState.ALIVE)),
    )
    epoch = state.group_state().committed.epoch
    replicas = (ReplicaInfo(E0, ReplicaState.ALIVE), ReplicaInfo(E1, ReplicaState.ALIVE))
    state.on_report(_replicas(2, *replicas, settings=ClusterSettings(seq=1, pause=PauseMode.KEEP)), 0.0)
    for engine_id in (E0, E1):
        assert not state.is_observed()
        state.on_report(_engine(engine_id, 2, max_epoch_seen=epoch, settings_seq=1), 0.0)
    assert state.is_observed()
