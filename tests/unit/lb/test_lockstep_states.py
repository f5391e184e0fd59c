"""How a lockstep group's coordinator goes on from a predecessor, and how long it repeats its states."""

import pytest

from engine.wire.control import Membership
from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.states import EnginePhase, ReplicaState
from tests.unit.lb.lockstep_deployment import IDLE, PARKED, RUNNING, Deployment, three_ranks


@pytest.fixture
def three() -> Deployment:
    return three_ranks()


# --- a coordinator that starts --------------------------------------------------------------------------------------


def restarted(before: Deployment, generation: int = 2) -> Deployment:
    """Return a successor that has heard nobody and knows the replicas."""
    deployment = Deployment(0, generation)
    deployment.replicas = dict(before.replicas)
    return deployment


def test_it_goes_on_from_what_the_members_have_seen(three: Deployment) -> None:
    successor = restarted(three)
    successor.reports = dict(three.reports)
    assert successor.update()
    assert (successor.committed(), successor.proposed()) == ((1, [0, 1, 2]), None)
    assert successor.group.waves.started == three.group.waves.started


def test_who_was_not_heard_is_not_dead(three: Deployment) -> None:
    """Found by the search: the first report made a successor propose a group of those heard so far."""
    successor = restarted(three)
    successor.reports = {0: three.reports[0]}
    successor.update()
    assert successor.proposed() is None
    successor.replica(1, ReplicaState.DEAD)
    successor.reports[2] = three.reports[2]
    successor.update()
    assert successor.proposed() == (1_000_001, [0, 2], True)


def test_nothing_is_proposed_before_the_replicas_are_known(three: Deployment) -> None:
    successor = restarted(three)
    successor.replicas = {}
    successor.reports = dict(three.reports)
    successor.report(1, phase=PARKED)
    successor.update()
    assert (successor.committed(), successor.proposed()) == ((1, [0, 1, 2]), None)


def test_no_number_is_used_again_though_nobody_was_heard_who_saw_it(three: Deployment) -> None:
    """Found by the search: of the predecessor's last attempt nobody had reported yet, and its number came again."""
    three.replica(0, ReplicaState.DEAD)
    three.update()
    successor = restarted(three)
    successor.reports = dict(three.reports)
    successor.update()
    assert three.group.proposal is not None
    assert successor.group.proposal is not None
    assert successor.group.proposal.epoch != three.group.proposal.epoch


def test_what_a_predecessor_committed_voids_what_was_proposed_without_knowing_it(three: Deployment) -> None:
    successor = restarted(three)
    successor.reports = dict(three.reports)
    successor.replica(3)
    successor.load(3)
    successor.update()
    assert successor.proposed() == (1_000_001, [0, 1, 2, 3], False)
    learned = Membership(7, [replica.engine_id for replica in successor.replicas.values()], [[], [], [], []])
    successor.report(0, 1, 2, 3, ready_epoch=7)
    successor.report(3, committed=learned, epoch=7, phase=RUNNING)
    successor.update()
    assert (successor.committed(), successor.proposed()) == ((7, [0, 1, 2, 3]), None)


def test_a_member_that_never_gets_to_the_committed_group_breaks_it(three: Deployment) -> None:
    """It began a successor's attempt, and let go of what a predecessor put in force just before it ended."""
    successor = restarted(three)
    successor.reports = dict(three.reports)
    successor.report(0, 1, committed=Membership(7, three.group.committed.members, [[], [], []]), epoch=7, ready_epoch=7)
    successor.update()
    assert successor.proposed() == (1_000_001, [0, 1, 2], True)


def test_a_successor_fulfils_no_request_again_and_forgets_none(three: Deployment) -> None:
    three.group.rebalance(1)
    three.update()
    three.prepare(0, 1, 2)
    three.switch(0, 1, 2)
    successor = restarted(three)
    successor.reports = dict(three.reports)
    successor.group.rebalance(1)
    successor.update()
    assert successor.proposed() is None
    successor.group.rebalance(2)
    successor.update()
    assert successor.proposed() == (1_000_001, [0, 1, 2], False)


# --- repetition ----------------------------------------------------------------------------------------------------


def test_states_are_repeated_until_everybody_steps_in_what_is_committed() -> None:
    deployment = Deployment(2)
    deployment.update()
    assert not deployment.group.is_observed
    deployment.prepare(0, 1)
    deployment.switch(0)
    assert not deployment.group.is_observed
    deployment.switch(1)
    assert deployment.group.is_observed


def test_states_are_repeated_until_everybody_has_seen_the_newest_wave(three: Deployment) -> None:
    """Found by the search: a wave that one rank missed got it again only with the next slow repetition."""
    three.report(0, 1, 2, phase=IDLE)
    three.report(0, has_work=True)
    assert three.update()
    three.report(0, 1, wave=three.group.waves.started, phase=RUNNING)
    three.update()
    assert not three.group.is_observed
    three.report(2, wave=three.group.waves.started, phase=RUNNING)
    three.update()
    assert three.group.is_observed


def test_states_are_repeated_until_nobody_waits_for_the_dead() -> None:
    """Found by the search: too few lived to be called, and the one that missed the death waited for the dead."""
    deployment = Deployment(2, min_size=2)
    deployment.form()
    deployment.replica(1, ReplicaState.DEAD)
    deployment.update()
    assert (deployment.proposed(), deployment.group.is_observed) == (None, False)
    deployment.report(0, phase=PARKED)
    deployment.update()
    assert deployment.group.is_observed


def test_a_loading_engine_concerns_nobody(three: Deployment) -> None:
    three.replica(3, ReplicaState.STARTING)
    three.reports[3] = EngineReport(EngineId(3, 1), 1, 0, 0, 0, 0, EnginePhase.LOADING, 0, False, {}, Load())
    assert not three.update()
    assert three.group.is_observed
