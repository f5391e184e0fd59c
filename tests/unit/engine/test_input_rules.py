"""The rules of the input thread: which messages of a client count, and what the group's state asks of this engine."""

import pytest

from engine.proc.input_rules import GroupView, SequenceCheck, SequencedChannel
from engine.wire.control import Membership
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import ClientInfo, GroupState
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import ReplicaState

ENGINE = EngineId(0, 2)


# --- the numbered channel ---------------------------------------------------------------------------------------------


def test_messages_in_order_are_applied() -> None:
    channel = SequencedChannel()
    assert [channel.accept(n) for n in (1, 2, 3)] == [SequenceCheck.NEXT] * 3
    assert channel.applied == 3


def test_a_duplicate_is_not_applied_again() -> None:
    channel = SequencedChannel()
    assert [channel.accept(n) for n in (1, 2, 1, 2)][2:] == [SequenceCheck.DUPLICATE] * 2
    assert channel.applied == 2


def test_applied_stays_at_a_gap_until_the_missing_message_comes() -> None:
    channel = SequencedChannel()
    assert [channel.accept(n) for n in (1, 3, 4)] == [SequenceCheck.NEXT, SequenceCheck.GAP, SequenceCheck.GAP]
    assert channel.applied == 1
    assert [channel.accept(n) for n in (2, 3, 4)] == [SequenceCheck.NEXT] * 3


@pytest.mark.parametrize("number", [0, -5])
def test_a_number_that_was_never_drawn_is_a_duplicate(number: int) -> None:
    assert SequencedChannel().accept(number) is SequenceCheck.DUPLICATE


# --- the group's state ------------------------------------------------------------------------------------------------


def group_state(generation: int = 1, seq: int = 1, epoch: int = 1, **changes: object) -> GroupState:
    values: dict[str, object] = {
        "committed": Membership(epoch, [ENGINE]),
        "proposal": None,
        "direct": False,
        "dismissed": [],
        "wave_started": 0,
        "clients": [],
        "replicas": [],
    }
    return GroupState(generation, seq, **(values | changes))  # type: ignore[arg-type]


def test_only_newer_states_count() -> None:
    view = GroupView(ENGINE)
    order = [(1, 5), (1, 5), (1, 4), (2, 1), (1, 9), (2, 2)]
    assert [view.update(group_state(g, s)) for g, s in order] == [True, False, False, True, False, True]


def test_the_clients_of_the_newest_state_replace_the_earlier() -> None:
    view = GroupView(ENGINE)
    first, second = (ClientInfo(ClientId(i, 1), "ipc://r", "ipc://o") for i in (0, 1))
    view.update(group_state(seq=1, clients=[first, second]))
    view.update(group_state(seq=2, clients=[second]))
    assert view.clients == {second.client_id: second}


def test_a_dismissal_is_meant_for_one_incarnation_of_a_replica() -> None:
    view = GroupView(ENGINE)
    view.update(group_state(seq=1, dismissed=[EngineId(0, 1)]))
    assert not view.is_dismissed
    view.update(group_state(seq=2, dismissed=[ENGINE]))
    assert view.is_dismissed


def test_an_engine_that_was_declared_dead_or_replaced_while_out_of_reach_is_dismissed() -> None:
    rank, incarnation = ENGINE.rank, ENGINE.incarnation
    verdicts = []
    for seq, replica in enumerate(
        [
            ReplicaInfo(ENGINE, ReplicaState.ALIVE),
            ReplicaInfo(EngineId(rank, incarnation - 1), ReplicaState.DEAD),
            ReplicaInfo(EngineId(rank + 1, incarnation + 1), ReplicaState.ALIVE),
            ReplicaInfo(ENGINE, ReplicaState.DEAD),
            ReplicaInfo(EngineId(rank, incarnation + 1), ReplicaState.STARTING),
        ]
    ):
        view = GroupView(ENGINE)
        view.update(group_state(seq=seq, replicas=[replica]))
        verdicts.append(view.is_dismissed)
    assert verdicts == [False, False, False, True, True]


def test_a_leaving_replica_is_known_by_its_engine() -> None:
    view = GroupView(ENGINE)
    view.update(
        group_state(
            seq=1, replicas=[ReplicaInfo(EngineId(0, 1), ReplicaState.LEAVING), ReplicaInfo(ENGINE, ReplicaState.ALIVE)]
        )
    )
    assert not view.is_draining
    view.update(group_state(seq=2, replicas=[ReplicaInfo(ENGINE, ReplicaState.LEAVING)]))
    assert view.is_draining


def test_the_highest_epoch_seen_stays_when_a_proposal_is_withdrawn() -> None:
    view = GroupView(ENGINE)
    view.update(group_state(seq=1, proposal=Membership(4, [ENGINE])))
    view.update(group_state(seq=2))
    assert (view.epoch, view.max_epoch_seen) == (1, 4)
