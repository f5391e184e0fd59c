"""The inbox of a lockstep rank: one slot for the newest state, and the way out of a collective."""

from engine.proc.group_inbox import GroupInbox
from engine.wire.control import Membership
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import ReplicaState

OWN, PEER = EngineId(0, 1), EngineId(1, 1)


def group_state(seq: int, *, proposal: Membership | None = None, peer: ReplicaState = ReplicaState.ALIVE) -> GroupState:
    replicas = [ReplicaInfo(OWN, ReplicaState.ALIVE), ReplicaInfo(PEER, peer)]
    return GroupState(1, seq, Membership(3, [OWN, PEER]), proposal, True, [], 1, [], replicas)


def test_the_loop_takes_the_newest_state_once() -> None:
    inbox = GroupInbox()
    assert inbox.take_state() is None
    for seq in (1, 2):
        inbox.see(group_state(seq))
    taken = inbox.take_state()
    assert taken is not None
    assert taken.seq == 2
    assert inbox.take_state() is None


def test_preparations_are_taken_in_the_order_they_ended_also_such_as_failed() -> None:
    inbox = GroupInbox()
    inbox.post_prepared(4, None)
    inbox.post_prepared(5, None)
    assert inbox.take_prepared() == [(4, None), (5, None)]
    assert inbox.take_prepared() == []


def test_a_collective_is_left_before_the_loop_has_taken_the_state_that_ends_its_group() -> None:
    inbox = GroupInbox()
    inbox.see(group_state(1))
    assert not inbox.must_leave(3)
    inbox.see(group_state(2, proposal=Membership(4, [OWN])))
    assert inbox.must_leave(3)
    assert not inbox.must_leave(4), "the group that is prepared is the new one"
    inbox.see(group_state(3))
    assert inbox.must_leave(3), "a group that is over stays over"


def test_a_collective_is_left_when_a_member_of_its_own_group_has_ended() -> None:
    inbox = GroupInbox()
    inbox.note_position(3, [OWN, PEER])
    inbox.see(group_state(1, peer=ReplicaState.DEAD))
    assert inbox.must_leave(3)
    assert not inbox.must_leave(4), "nothing is known of the members of another group"
