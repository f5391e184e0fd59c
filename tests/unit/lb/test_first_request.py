"""A client's request to wake an idle lockstep group: what it starts, and what it must not."""

import pytest
from msgspec.structs import replace

from engine.wire.control import ClusterSettings, Membership, MemberStatus, PauseMode
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import ClientInfo, ClientReport, EngineReport, SupervisorReport
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import EnginePhase, ReplicaState
from lb.coordinator.config import LockstepConfig
from lb.coordinator.state import CoordinatorState

MEMBERS = [EngineId(0, 1), EngineId(1, 1)]
GROUP = Membership(5, MEMBERS, [[0], [1]], "here:1")
INFO = ClientInfo(ClientId(0, 1), "ipc://r", "ipc://o")
WAVE = 3


def member(engine_id: EngineId, seq: int, phase: EnginePhase = EnginePhase.IDLE, wave: int = WAVE) -> EngineReport:
    status = MemberStatus(2, "here:1", GROUP)
    return EngineReport(engine_id, seq, 5, 5, 5, wave, phase, 0, False, {}, Load(), member=status)


def requested(seq: int, wave: int) -> ClientReport:
    return ClientReport(seq, INFO, wave_wanted=wave)


def settled(settings: ClusterSettings = ClusterSettings()) -> CoordinatorState:  # noqa: B008 - frozen
    """Return a coordinator that has heard of a group of two, idle in the newest wave."""
    lockstep = LockstepConfig(min_size=1, num_redundant_experts=0)
    state = CoordinatorState(generation=1, client_silence_s=10.0, stall_timeout_s=60.0, lockstep=lockstep)
    replicas = [ReplicaInfo(engine_id, ReplicaState.ALIVE) for engine_id in MEMBERS]
    state.on_report(SupervisorReport(1, replicas, [], [], settings), 0.0)
    for engine_id in MEMBERS:
        state.on_report(member(engine_id, 1), 0.0)
    state.on_report(requested(1, 0), 0.0)
    assert state.group_state().wave_started == WAVE
    return state


def test_an_idle_group_is_woken_by_a_request_for_the_next_wave_once() -> None:
    state = settled()
    version = state.group_version
    state.on_report(requested(2, WAVE + 1), 0.0)
    assert state.group_state().wave_started == WAVE + 1
    assert state.group_version > version
    state.on_report(requested(3, WAVE + 1), 0.0)
    state.on_report(requested(4, WAVE + 2), 0.0)  # the members have not been seen in the wave that was just started
    assert state.group_state().wave_started == WAVE + 1


@pytest.mark.parametrize("wave", [-1, 0, WAVE, WAVE + 2, 2**62])
def test_a_request_for_any_other_wave_is_late_or_makes_no_sense(wave: int) -> None:
    state = settled()
    state.on_report(requested(2, wave), 0.0)
    assert state.group_state().wave_started == WAVE


@pytest.mark.parametrize("settings", [ClusterSettings(1, PauseMode.KEEP), ClusterSettings(1, sleep_level=1)])
def test_a_request_wakes_nobody_who_is_to_rest(settings: ClusterSettings) -> None:
    state = settled(settings)
    state.on_report(requested(2, WAVE + 1), 0.0)
    assert state.group_state().wave_started == WAVE


def test_a_request_changes_nothing_while_somebody_still_runs() -> None:
    state = settled()
    state.on_report(member(MEMBERS[1], 2, EnginePhase.RUNNING), 0.0)
    state.on_report(requested(2, WAVE + 1), 0.0)
    assert state.group_state().wave_started == WAVE


def test_independent_ranks_have_no_waves_to_ask_for() -> None:
    state = CoordinatorState(generation=1, client_silence_s=10.0, stall_timeout_s=60.0)
    state.on_report(replace(member(MEMBERS[0], 1), member=None), 0.0)
    state.on_report(requested(1, 1), 0.0)
    assert state.group_state().wave_started == 0
