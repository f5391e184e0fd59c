"""Memberships of a lockstep group, the coordinator's side: reports and seats by hand."""

from typing import Any

import pytest
from msgspec.structs import replace

from engine.wire.ids import EngineId
from engine.wire.messages import EnginePhase, EngineReport, Load, Membership, MemberStatus, Seat, SeatState
from lb.coordinator.lockstep import LockstepGroup

IDLE, RUNNING, PARKED = EnginePhase.IDLE, EnginePhase.RUNNING, EnginePhase.PARKED
NUM_EXPERTS = 6


class Deployment:
    """Seats and reports of engines, and the group the coordinator makes of them."""

    def __init__(self, num_ranks: int, generation: int = 1, **knobs: Any) -> None:
        self.group = LockstepGroup(generation, **knobs)
        self.reports: dict[int, EngineReport] = {}
        self.seats: dict[int, Seat] = {}
        for rank in range(num_ranks):
            self.seat(rank)
            self.load(rank)

    def seat(self, rank: int, state: SeatState = SeatState.ALIVE, incarnation: int = 1) -> None:
        self.seats[rank] = Seat(EngineId(rank, incarnation), state)

    def load(self, rank: int) -> None:
        status = MemberStatus(NUM_EXPERTS, f"h:{rank}", Membership(0, []), 0, [1] * NUM_EXPERTS)
        engine_id = self.seats[rank].engine_id
        self.reports[rank] = EngineReport(engine_id, 1, 0, 0, 0, 0, IDLE, 0, False, {}, Load(), member=status)

    def say(self, *ranks: int, **changes: Any) -> None:
        """Change reports. failed, committed: of the member's status."""
        status = {"failed_epoch": changes.pop("failed", None), "membership": changes.pop("committed", None)}
        for rank in ranks:
            known = self.reports[rank].member
            assert known is not None
            member = replace(known, **{name: value for name, value in status.items() if value is not None})
            self.reports[rank] = replace(self.reports[rank], member=member, **changes)

    def update(self) -> bool:
        return self.group.update(self.reports, self.seats)

    def proposed(self) -> tuple[int, list[int], bool] | None:
        """Return epoch, ranks and whether it is direct."""
        proposal = self.group.proposal
        if proposal is None:
            return None
        return proposal.epoch, [member.rank for member in proposal.members], self.group.direct

    def committed(self) -> tuple[int, list[int]]:
        """Return epoch and ranks."""
        return self.group.committed.epoch, [member.rank for member in self.group.committed.members]

    def num_copies(self) -> int:
        return sum(map(len, self.group.committed.expert_placement))

    def prepare(self, *ranks: int) -> None:
        assert self.group.proposal is not None
        epoch = self.group.proposal.epoch
        self.say(*ranks, ready_epoch=epoch, max_epoch_seen=epoch)
        self.update()

    def switch(self, *ranks: int, phase: EnginePhase = RUNNING) -> None:
        committed = self.group.committed
        wave = self.group.waves.started
        self.say(*ranks, epoch=committed.epoch, committed=committed, phase=phase, wave=wave)
        self.update()

    def form(self, *, phase: EnginePhase = RUNNING) -> None:
        """Go from nothing to a group of all."""
        self.update()
        self.prepare(*self.reports)
        self.switch(*self.reports, phase=phase)


@pytest.fixture
def three() -> Deployment:
    deployment = Deployment(3)
    deployment.form()
    assert deployment.committed() == (1, [0, 1, 2])
    assert deployment.proposed() is None
    return deployment


# --- the planned way ------------------------------------------------------------------------------------------------


def test_the_first_group_waits_for_every_seat() -> None:
    deployment = Deployment(2)
    deployment.seat(2, SeatState.STARTING)
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
    three.seat(3)
    three.load(3)
    three.update()
    three.prepare(0, 1, 2, 3)
    three.seat(0, SeatState.LEAVING)
    three.switch(0, 1, 3)
    assert three.proposed() is None, "2 still steps in the group before"
    three.switch(2)
    assert three.proposed() == (3, [1, 2, 3], False)


def test_a_newcomer_is_handed_experts_by_those_that_are_awake(three: Deployment) -> None:
    three.say(0, is_sleeping=True)
    three.seat(3)
    three.load(3)
    three.update()
    proposal, committed = three.group.proposal, three.group.committed
    assert proposal is not None
    assert proposal.held == [[], *committed.expert_placement[1:], []]
    placed = zip(proposal.expert_placement, committed.expert_placement, strict=False)
    stayed = [set(new) <= set(old) for new, old in placed]
    assert all(stayed), "who sleeps keeps its experts, and reads them when it wakes"


@pytest.mark.parametrize("fault", ["failed", "dead"])
def test_a_joiner_that_cannot_come_ends_the_attempt_and_its_number(three: Deployment, fault: str) -> None:
    three.seat(3)
    three.load(3)
    three.update()
    assert three.proposed() == (2, [0, 1, 2, 3], False)
    if fault == "failed":
        three.say(3, failed=2)
    else:
        three.seat(3, SeatState.DEAD)
    three.update()
    three.update()
    assert three.committed() == (1, [0, 1, 2])
    assert three.proposed() == ((3, [0, 1, 2, 3], False) if fault == "failed" else None)


def test_a_leaver_stays_a_member_while_it_has_sequences(three: Deployment) -> None:
    three.say(0, load=Load(num_running=1))
    three.seat(0, SeatState.LEAVING)
    assert not three.update()
    three.say(0, load=Load())
    assert three.update()
    assert three.proposed() == (2, [1, 2], False)


def test_a_rebalance_is_a_membership_of_the_same_members(three: Deployment) -> None:
    three.group.rebalance()
    three.update()
    assert three.proposed() == (2, [0, 1, 2], False)


# --- the direct way -------------------------------------------------------------------------------------------------


def test_a_death_calls_the_live_members(three: Deployment) -> None:
    three.seat(1, SeatState.DEAD)
    assert three.update()
    assert three.proposed() == (2, [0, 2], True)
    three.say(0, 2, phase=PARKED)
    three.prepare(0, 2)
    assert (three.committed(), three.group.direct) == ((2, [0, 2]), False)
    assert not three.update(), "parked, and about to step in what is committed"


def test_survivors_serve_with_one_copy_of_each_expert_and_make_replicas_behind_that() -> None:
    deployment = Deployment(3, num_redundant_experts=2)
    deployment.form()
    assert deployment.num_copies() == NUM_EXPERTS + 2
    deployment.seat(1, SeatState.DEAD)
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
    three.seat(1, SeatState.DEAD)
    three.update()
    three.seat(2, SeatState.DEAD)
    three.update()
    assert three.proposed() == (3, [0], True)


def test_a_death_between_ready_and_switch_is_a_new_number(three: Deployment) -> None:
    three.seat(1, SeatState.DEAD)
    three.update()
    three.prepare(0, 2)
    three.seat(2, SeatState.DEAD)
    three.update()
    assert (three.committed(), three.proposed()) == ((2, [0, 2]), (3, [0], True))


def test_a_failed_preparation_of_the_direct_way_is_tried_again(three: Deployment) -> None:
    three.seat(1, SeatState.DEAD)
    three.update()
    three.say(2, failed=2)
    three.update()
    assert three.proposed() == (3, [0, 2], True)


def test_a_parked_member_alone_calls_everybody(three: Deployment) -> None:
    three.say(1, phase=PARKED)
    three.update()
    assert three.proposed() == (2, [0, 1, 2], True)


def test_healing_goes_before_scaling(three: Deployment) -> None:
    three.seat(3)
    three.load(3)
    three.update()
    three.seat(1, SeatState.DEAD)
    three.update()
    assert three.proposed() == (3, [0, 2], True)


def test_a_replacement_joins_by_the_planned_way(three: Deployment) -> None:
    three.seat(1, SeatState.STARTING, incarnation=2)
    three.update()
    three.prepare(0, 2)
    three.switch(0, 2)
    three.load(1)
    three.update()
    assert three.proposed() == (3, [0, 1, 2], False)


def test_too_few_wait_for_others_and_go_on_with_them() -> None:
    deployment = Deployment(2, min_size=2)
    deployment.form()
    deployment.seat(1, SeatState.STARTING, incarnation=2)
    deployment.say(0, phase=PARKED)
    deployment.update()
    assert deployment.proposed() is None
    deployment.load(1)
    deployment.update()
    assert deployment.proposed() == (2, [0, 1], False)


def test_a_group_whose_last_member_died_begins_anew(three: Deployment) -> None:
    for rank in range(3):
        three.seat(rank, SeatState.STARTING, incarnation=2)
    three.update()
    assert three.proposed() is None
    for rank in range(3):
        three.load(rank)
    three.update()
    assert three.proposed() == (2, [0, 1, 2], False)


def test_an_engine_that_says_that_it_stops_is_gone(three: Deployment) -> None:
    three.say(1, phase=EnginePhase.STOPPING)
    three.update()
    assert three.proposed() == (2, [0, 2], True)


# --- a coordinator that starts --------------------------------------------------------------------------------------


def restarted(before: Deployment, generation: int = 2) -> Deployment:
    """Return a successor that has heard nobody and knows the seats."""
    deployment = Deployment(0, generation)
    deployment.seats = dict(before.seats)
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
    successor.seat(1, SeatState.DEAD)
    successor.reports[2] = three.reports[2]
    successor.update()
    assert successor.proposed() == (1_000_001, [0, 2], True)


def test_nothing_is_proposed_before_the_seats_are_known(three: Deployment) -> None:
    successor = restarted(three)
    successor.seats = {}
    successor.reports = dict(three.reports)
    successor.say(1, phase=PARKED)
    successor.update()
    assert (successor.committed(), successor.proposed()) == ((1, [0, 1, 2]), None)


def test_no_number_is_used_again_though_nobody_was_heard_who_saw_it(three: Deployment) -> None:
    """Found by the search: of the predecessor's last attempt nobody had told yet, and its number came again."""
    three.seat(0, SeatState.DEAD)
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
    successor.seat(3)
    successor.load(3)
    successor.update()
    assert successor.proposed() == (1_000_001, [0, 1, 2, 3], False)
    learned = Membership(7, [seat.engine_id for seat in successor.seats.values()], [[], [], [], []])
    successor.say(0, 1, 2, 3, ready_epoch=7)
    successor.say(3, committed=learned, epoch=7, phase=RUNNING)
    successor.update()
    assert (successor.committed(), successor.proposed()) == ((7, [0, 1, 2, 3]), None)


def test_a_member_that_never_gets_to_the_committed_group_breaks_it(three: Deployment) -> None:
    """It began a successor's attempt, and let go of what a predecessor put in force just before it ended."""
    three.say(0, 1, committed=Membership(7, three.group.committed.members, [[], [], []]), epoch=7, ready_epoch=7)
    three.update()
    assert three.proposed() == (8, [0, 1, 2], True)


# --- what is told ---------------------------------------------------------------------------------------------------


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
    """Found by the search: a wave that one rank missed was told it again only with the next slow repetition."""
    three.say(0, 1, 2, phase=IDLE)
    three.say(0, has_work=True)
    assert three.update()
    three.say(0, 1, wave=three.group.waves.started, phase=RUNNING)
    three.update()
    assert not three.group.is_observed
    three.say(2, wave=three.group.waves.started, phase=RUNNING)
    three.update()
    assert three.group.is_observed


def test_a_loading_engine_concerns_nobody(three: Deployment) -> None:
    three.seat(3, SeatState.STARTING)
    three.reports[3] = EngineReport(EngineId(3, 1), 1, 0, 0, 0, 0, EnginePhase.LOADING, 0, False, {}, Load())
    assert not three.update()
    assert three.group.is_observed
