"""One rank's decisions in waves and epochs: states and headers by hand."""

from typing import Any

import pytest

from engine.parallel.group_member import DPGroupMember, StepHeader
from engine.wire.control import ClusterSettings, Membership, PauseMode
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import LockstepState, ReplicaState

E0, E1, E2 = EngineId(0, 1), EngineId(1, 1), EngineId(2, 1)
BOTH = [E0, E1]
ALIVE, DEAD = ReplicaState.ALIVE, ReplicaState.DEAD


class Driver:
    """A member, and the states that its coordinator publishes: what is not changed is as in the one before."""

    def __init__(self, engine_id: EngineId = E0) -> None:
        self.member = DPGroupMember(engine_id)
        self.seq = 0
        self.state = GroupState(1, 0, Membership(0, []), None, False, [], 0, [], [])

    def publish(self, **changes: Any) -> GroupState:
        self.seq += 1
        fields = {name: getattr(self.state, name) for name in self.state.__struct_fields__}
        self.state = GroupState(**fields | {"seq": self.seq} | changes)
        self.member.on_state(self.state)
        return self.state

    def prepare(self) -> int:
        wanted = self.member.to_prepare
        assert wanted is not None
        self.member.on_preparing(wanted.epoch)
        self.member.on_prepared(wanted.epoch)
        return wanted.epoch

    def join(self, members: list[EngineId] = BOTH, epoch: int = 1, wave: int = 1) -> None:
        """Go from wherever it is to a group it runs in."""
        self.publish(proposal=Membership(epoch, members))
        self.prepare()
        self.publish(proposal=None, committed=Membership(epoch, members), wave_started=wave)
        assert self.member.may_install
        self.member.on_switched()

    def rest(self) -> None:
        verdict = self.member.on_exchange([self.member.header(0, has_work=False, paused=False)] * 2)
        assert not verdict.switches

    def lockstep_state(self) -> LockstepState:
        return self.member.lockstep_state

    def may_install(self) -> bool:
        return self.member.may_install

    def header(self, **changes: Any) -> StepHeader:
        """Return the header of a peer that has no work."""
        return self.member.header(0, has_work=False, paused=False)._replace(**changes)


@pytest.fixture
def running() -> Driver:
    driver = Driver()
    driver.join()
    return driver


@pytest.fixture
def idle(running: Driver) -> Driver:
    running.rest()
    assert running.member.lockstep_state is LockstepState.IDLE
    return running


# --- waves ----------------------------------------------------------------------------------------------------------


def test_only_a_raised_wave_wakes_an_idle_rank(idle: Driver) -> None:
    idle.publish(settings=ClusterSettings(seq=1, pause=PauseMode.WAIT))
    idle.publish(wave_started=1)
    assert idle.member.lockstep_state is LockstepState.IDLE
    idle.publish(wave_started=2)
    assert (idle.member.lockstep_state, idle.member.wave) == (LockstepState.RUNNING, 2)


def test_a_rank_without_work_runs_on_while_another_has_some(running: Driver) -> None:
    mine = running.header()
    verdict = running.member.on_exchange([mine, mine._replace(has_work=1, num_tokens=3)])
    assert verdict.runs
    assert running.member.lockstep_state is LockstepState.RUNNING


def test_nobody_enters_a_layer_when_nobody_has_tokens(running: Driver) -> None:
    assert not running.member.on_exchange([running.header(), running.header(has_work=1)]).runs


def test_nobody_enters_a_layer_while_a_member_sleeps_and_all_step_on_until_it_has_woken(running: Driver) -> None:
    asleep, awake = running.header(asleep=1, paused=1), running.header(has_work=1, num_tokens=3)
    assert not running.member.on_exchange([asleep, awake]).runs
    assert running.lockstep_state() is LockstepState.RUNNING
    assert running.member.on_exchange([running.header(), awake]).runs


def test_all_rest_when_nobody_has_work_or_all_are_paused(running: Driver) -> None:
    running.member.on_exchange([running.header(paused=1, has_work=1), running.header(has_work=1)])
    assert running.lockstep_state() is LockstepState.RUNNING, "one goes on, so all do"
    running.member.on_exchange([running.header(paused=1, has_work=1)] * 2)
    assert running.lockstep_state() is LockstepState.IDLE


def test_a_rank_that_rests_having_seen_a_newer_wave_goes_straight_on(running: Driver) -> None:
    running.publish(wave_started=2)
    running.member.on_exchange([running.header()] * 2)
    assert (running.member.lockstep_state, running.member.wave) == (LockstepState.RUNNING, 2)


def test_the_highest_wave_and_step_of_an_exchange_are_everybodys(running: Driver) -> None:
    running.member.on_exchange([running.header(), running.header(wave=7, step=41)])
    assert (running.member.wave, running.member.step) == (7, 42)


# --- states ---------------------------------------------------------------------------------------------------------


def test_old_and_repeated_states_change_nothing(idle: Driver) -> None:
    state = idle.state
    idle.publish(proposal=Membership(2, BOTH), direct=True)
    idle.member.on_state(state)
    assert idle.member.to_prepare == Membership(2, BOTH)
    assert idle.member.max_epoch_seen == 2


def test_a_higher_generation_is_newer_whatever_its_number(idle: Driver) -> None:
    idle.publish(generation=2, seq=0, wave_started=9)
    assert (idle.member.wave, idle.member.generation) == (9, 2)


def test_what_was_once_committed_is_not_taken_back(running: Driver) -> None:
    running.publish(generation=2, committed=Membership(0, []), wave_started=0)
    assert running.member.committed.epoch == 1


# --- the planned way ------------------------------------------------------------------------------------------------


def test_a_member_of_the_proposal_prepares_it_once(running: Driver) -> None:
    running.publish(proposal=Membership(2, [E1]))
    assert running.member.to_prepare is None
    running.publish(proposal=Membership(3, BOTH))
    running.member.on_preparing(3)
    assert running.member.to_prepare is None, "also when it fails: a number names one attempt"


def test_the_switch_waits_for_the_last_to_have_seen_the_commit(running: Driver) -> None:
    running.publish(proposal=Membership(2, BOTH))
    running.prepare()
    running.publish(proposal=None, committed=Membership(2, BOTH), wave_started=2)
    mine = running.header()
    assert mine.committed_epoch == 2
    assert not running.member.on_exchange([mine, mine._replace(committed_epoch=1)]).switches
    assert running.member.on_exchange([mine, mine]).switches
    running.member.on_switched()
    assert (running.member.epoch, running.member.wave, running.member.peers) == (2, 2, BOTH)


def test_who_steps_in_a_group_does_not_install_out_of_turn(running: Driver) -> None:
    running.publish(proposal=Membership(2, BOTH))
    running.prepare()
    running.publish(proposal=None, committed=Membership(2, BOTH))
    assert not running.member.may_install


def test_a_leaver_steps_to_the_end_and_is_outside_then(running: Driver) -> None:
    running.publish(committed=Membership(2, [E1]), wave_started=2)
    mine = running.header()
    assert mine.committed_epoch == 2, "it has nothing to prepare"
    assert running.member.on_exchange([mine, mine]).switches
    running.member.on_switched()
    assert (running.member.lockstep_state, running.member.epoch, running.member.peers) == (LockstepState.OUTSIDE, 0, ())
    assert not running.member.may_install


def test_a_joiner_installs_on_sight_and_starts_running() -> None:
    joiner = Driver(E1)
    joiner.join(BOTH, epoch=5, wave=3)
    assert (joiner.member.lockstep_state, joiner.member.epoch, joiner.member.wave) == (LockstepState.RUNNING, 5, 3)


def test_a_rank_says_that_it_has_seen_a_commit_only_when_it_is_ready(running: Driver) -> None:
    running.publish(committed=Membership(2, BOTH))
    assert running.header().committed_epoch == 1


# --- the direct way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rests", [True, False])
def test_a_direct_proposal_parks_whoever_is_in_a_group(running: Driver, rests: bool) -> None:
    if rests:
        running.rest()
    running.publish(proposal=Membership(2, [E0]), direct=True)
    assert running.member.lockstep_state is LockstepState.PARKED
    assert not running.member.must_leave, "it has left"


def test_a_direct_proposal_calls_nobody_out_of_a_newer_group(running: Driver) -> None:
    running.publish(proposal=Membership(1, BOTH), direct=True)
    assert running.member.lockstep_state is LockstepState.RUNNING


def test_a_parked_rank_installs_on_sight(running: Driver) -> None:
    running.member.on_broken()
    running.publish(proposal=Membership(2, BOTH), direct=True)
    running.prepare()
    assert not running.may_install()
    running.publish(proposal=None, direct=False, committed=Membership(2, BOTH), wave_started=2)
    assert running.may_install()
    running.member.on_switched()
    assert (running.member.lockstep_state, running.member.epoch) == (LockstepState.RUNNING, 2)


def test_a_broken_exchange_parks(running: Driver) -> None:
    running.member.on_broken()
    assert running.member.lockstep_state is LockstepState.PARKED


def test_a_new_attempt_makes_the_rank_unready_for_the_one_before(running: Driver) -> None:
    """Found by the search: ready for 2, committed while it prepared 3, it stepped into a group it had closed."""
    running.publish(proposal=Membership(2, BOTH), direct=True)
    running.prepare()
    running.publish(committed=Membership(2, BOTH), proposal=Membership(3, [E0]))
    running.member.on_preparing(3)
    assert not running.member.may_install
    assert running.member.ready_epoch == 1


def test_a_new_attempt_leaves_the_rank_ready_for_the_group_it_steps_in(running: Driver) -> None:
    running.publish(proposal=Membership(2, BOTH))
    running.member.on_preparing(2)
    assert running.member.ready_epoch == 1


def test_a_rank_leaves_a_group_with_a_dead_member(running: Driver) -> None:
    """Found by the search: a leaver out of reach never breaks the old group, and the coordinator has forgotten it."""
    running.publish(
        committed=Membership(2, [E0]), replicas=[ReplicaInfo(E0, ALIVE), ReplicaInfo(E1, ReplicaState.LEAVING)]
    )
    assert not running.member.must_leave
    running.publish(replicas=[ReplicaInfo(E0, ALIVE), ReplicaInfo(E1, DEAD)])
    assert running.member.lockstep_state is LockstepState.PARKED


def test_who_is_left_in_a_group_that_is_over_leaves_it(running: Driver) -> None:
    """Found by the search: a leaver that was to stay after all waited for those that had gone on without it."""
    running.publish(committed=Membership(2, [E1]))
    assert running.lockstep_state() is LockstepState.RUNNING, "its peers may need it to switch"
    running.publish(proposal=Membership(3, BOTH))
    assert running.lockstep_state() is LockstepState.PARKED


def test_a_rank_says_which_group_it_let_go_of(running: Driver) -> None:
    assert running.member.broken_epoch == 0
    running.member.on_broken()
    running.publish(proposal=Membership(2, BOTH), direct=True)
    running.prepare()
    running.publish(proposal=None, direct=False, committed=Membership(2, BOTH))
    running.member.on_switched()
    assert running.member.broken_epoch == 1
