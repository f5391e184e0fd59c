"""Memberships of a lockstep group, the coordinator's side: reports and replicas by hand."""

import pytest

from engine.wire.load import Load
from engine.wire.states import EnginePhase, ReplicaState
from tests.unit.lb.lockstep_deployment import NUM_EXPERTS, PARKED, Deployment, three_ranks


@pytest.fixture
def three() -> Deployment:
    return three_ranks()


# --- the planned way ------------------------------------------------------------------------------------------------


def test_the_first_group_waits_for_every_replica() -> None:
    deployment = Deployment(2)
    deployment.replica(2, ReplicaState.STARTING)
    assert not deployment.update()
    deployment.load(2)
    assert deployment.update()
    assert deployment.proposed() == (1, [0, 1, 2], False)


def test_it_is_committed_when_all_are_ready_and_a_wave_starts_with_it() -> None:
    deployment = Deployment(2)
    deployment.update()
    deployment.prepare(0)
    assert deployment.committed() == (0, [])
    deployment.prepare(1)
    assert (deployment.committed(), deployment.proposed()) == ((1, [0, 1]), None)
    assert deployment.group.waves.started == 1


def test_one_change_at_a_time(three: Deployment) -> None:
    three.replica(3)
    three.load(3)
    three.update()
    three.prepare(0, 1, 2, 3)
    three.replica(0, ReplicaState.LEAVING)
    three.switch(0, 1, 3)
    assert three.proposed() is None, "2 still steps in the group before"
    three.switch(2)
    assert three.proposed() == (3, [1, 2, 3], False)


def test_a_new_member_is_handed_experts_by_those_that_are_awake(three: Deployment) -> None:
    three.report(0, is_sleeping=True)
    three.replica(3)
    three.load(3)
    three.update()
    proposal, committed = three.group.proposal, three.group.committed
    assert proposal is not None
    assert proposal.held == [[], *committed.expert_placement[1:], []]
    placed = zip(proposal.expert_placement, committed.expert_placement, strict=False)
    stayed = [set(new) <= set(old) for new, old in placed]
    assert all(stayed), "who sleeps keeps its experts, and reads them when it wakes"


@pytest.mark.parametrize("fault", ["failed", "dead", "leaving"])
def test_a_joiner_that_cannot_come_ends_the_attempt_and_its_number(three: Deployment, fault: str) -> None:
    three.replica(3)
    three.load(3)
    three.update()
    assert three.proposed() == (2, [0, 1, 2, 3], False)
    if fault == "failed":
        three.report(3, failed=2)
    else:
        three.replica(3, ReplicaState.DEAD if fault == "dead" else ReplicaState.LEAVING)
    three.update()
    three.update()
    assert three.committed() == (1, [0, 1, 2])
    assert three.proposed() == ((3, [0, 1, 2, 3], False) if fault == "failed" else None)


def test_a_leaving_rank_stays_a_member_while_it_has_sequences(three: Deployment) -> None:
    three.report(0, load=Load(num_running=1))
    three.replica(0, ReplicaState.LEAVING)
    assert not three.update()
    three.report(0, load=Load())
    assert three.update()
    assert three.proposed() == (2, [1, 2], False)


def test_a_rebalance_is_a_membership_of_the_same_members(three: Deployment) -> None:
    three.group.rebalance(1)
    three.update()
    assert three.proposed() == (2, [0, 1, 2], False)
    three.prepare(0, 1, 2)
    three.switch(0, 1, 2)
    assert (three.committed(), three.proposed()) == ((2, [0, 1, 2]), None)


def test_a_request_to_rebalance_outlives_an_attempt_that_fails_and_a_death(three: Deployment) -> None:
    """Found by the search: the request was forgotten as soon as it was proposed."""
    three.group.rebalance(1)
    three.update()
    three.report(1, failed=2)
    three.update()
    three.update()
    assert three.proposed() == (3, [0, 1, 2], False)
    three.replica(1, ReplicaState.DEAD)
    three.update()
    three.prepare(0, 2)
    assert three.group.committed.rebalance_seq == 0, "who heals moves no more experts than it must"
    three.switch(0, 2)
    assert three.proposed() == (5, [0, 2], False)
    assert three.group.proposal is not None
    assert three.group.proposal.rebalance_seq == 1


# --- the direct way -------------------------------------------------------------------------------------------------


def test_a_death_calls_the_live_members(three: Deployment) -> None:
    three.replica(1, ReplicaState.DEAD)
    assert three.update()
    assert three.proposed() == (2, [0, 2], True)
    three.report(0, 2, phase=PARKED)
    three.prepare(0, 2)
    assert (three.committed(), three.group.direct) == ((2, [0, 2]), False)
    assert not three.update(), "parked, and about to step in what is committed"


def test_survivors_serve_with_one_copy_of_each_expert_and_make_replicas_behind_that() -> None:
    deployment = Deployment(3, num_redundant_experts=2)
    deployment.form()
    assert deployment.num_copies() == NUM_EXPERTS + 2
    deployment.replica(1, ReplicaState.DEAD)
    deployment.update()
    deployment.prepare(0, 2)
    assert (deployment.committed(), deployment.num_copies()) == ((2, [0, 2]), NUM_EXPERTS)
    deployment.switch(0)
    assert deployment.proposed() is None, "2 does not serve yet"
    deployment.switch(2)
    assert deployment.proposed() == (3, [0, 2], False)
    deployment.prepare(0, 2)
    deployment.switch(0, 2)
    assert (deployment.committed(), deployment.num_copies()) == ((3, [0, 2]), NUM_EXPERTS + 2)
    assert deployment.proposed() is None


def test_a_member_alone_can_hold_no_replicas_and_wants_none() -> None:
    deployment = Deployment(1, num_redundant_experts=2)
    deployment.form()
    assert (deployment.num_copies(), deployment.proposed()) == (NUM_EXPERTS, None)


def test_a_further_death_voids_the_number(three: Deployment) -> None:
    three.replica(1, ReplicaState.DEAD)
    three.update()
    three.replica(2, ReplicaState.DEAD)
    three.update()
    assert three.proposed() == (3, [0], True)


def test_a_death_between_ready_and_switch_is_a_new_number(three: Deployment) -> None:
    three.replica(1, ReplicaState.DEAD)
    three.update()
    three.prepare(0, 2)
    three.replica(2, ReplicaState.DEAD)
    three.update()
    assert (three.committed(), three.proposed()) == ((2, [0, 2]), (3, [0], True))


def test_a_failed_preparation_of_the_direct_way_is_tried_again(three: Deployment) -> None:
    three.replica(1, ReplicaState.DEAD)
    three.update()
    three.report(2, failed=2)
    three.update()
    assert three.proposed() == (3, [0, 2], True)


def test_a_parked_member_alone_calls_everybody(three: Deployment) -> None:
    three.report(1, phase=PARKED)
    three.update()
    assert three.proposed() == (2, [0, 1, 2], True)


def test_healing_goes_before_scaling(three: Deployment) -> None:
    three.replica(3)
    three.load(3)
    three.update()
    three.replica(1, ReplicaState.DEAD)
    three.update()
    assert three.proposed() == (3, [0, 2], True)


def test_a_replacement_joins_by_the_planned_way(three: Deployment) -> None:
    three.replica(1, ReplicaState.STARTING, incarnation=2)
    three.update()
    three.prepare(0, 2)
    three.switch(0, 2)
    three.load(1)
    three.update()
    assert three.proposed() == (3, [0, 1, 2], False)


def test_too_few_wait_for_others_and_go_on_with_them() -> None:
    deployment = Deployment(2, min_size=2)
    deployment.form()
    deployment.replica(1, ReplicaState.STARTING, incarnation=2)
    deployment.report(0, phase=PARKED)
    deployment.update()
    assert deployment.proposed() is None
    deployment.load(1)
    deployment.update()
    assert deployment.proposed() == (2, [0, 1], False)


def test_a_group_whose_last_member_died_begins_anew(three: Deployment) -> None:
    for rank in range(3):
        three.replica(rank, ReplicaState.STARTING, incarnation=2)
    three.update()
    assert three.proposed() is None
    for rank in range(3):
        three.load(rank)
    three.update()
    assert three.proposed() == (2, [0, 1, 2], False)


def test_an_engine_that_reports_that_it_stops_is_gone(three: Deployment) -> None:
    three.report(1, phase=EnginePhase.STOPPING)
    three.update()
    assert three.proposed() == (2, [0, 2], True)


def test_a_group_that_lost_somebody_unnoticed_while_it_was_left_is_healed(three: Deployment) -> None:
    """Found by the search: a leaving rank let go, its peers did not notice and waited for it, and never switched."""
    three.replica(0, ReplicaState.LEAVING)
    three.update()
    three.prepare(1, 2)
    assert three.committed() == (2, [1, 2])
    assert three.proposed() is None, "they are about to switch"
    three.report(0, broken=1, phase=PARKED)
    three.update()
    assert three.proposed() == (3, [1, 2], True)


def test_who_parked_and_is_ready_is_about_to_step_whoever_let_go(three: Deployment) -> None:
    three.replica(0, ReplicaState.LEAVING)
    three.update()
    three.prepare(1, 2)
    three.report(0, 1, 2, broken=1, phase=PARKED)
    assert not three.update()
