"""The pure parts of an engine's process: line numbers, report times, the group as it sees it."""

import math

import pytest

from engine.proc.group import GroupView
from engine.proc.mailbox import Mailbox
from engine.proc.reports import DelayQueue, ReportPacer
from engine.proc.sequenced_channel import SequenceCheck, SequencedChannel
from engine.wire.control import Membership
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import ClientInfo, GroupState
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import ReplicaState

ENGINE = EngineId(0, 2)


# --- the numbered line ----------------------------------------------------------------------------------------------


def test_messages_in_order_are_applied() -> None:
    channel = SequencedChannel()
    assert [channel.accept(n) for n in (1, 2, 3)] == [SequenceCheck.NEXT] * 3
    assert channel.applied == 3


def test_a_duplicate_is_not_applied_again() -> None:
    channel = SequencedChannel()
    assert [channel.accept(n) for n in (1, 2, 1, 2)][2:] == [SequenceCheck.DUPLICATE] * 2
    assert channel.applied == 2


def test_applied_stands_still_at_a_gap_until_the_missing_message_comes() -> None:
    channel = SequencedChannel()
    assert [channel.accept(n) for n in (1, 3, 4)] == [SequenceCheck.NEXT, SequenceCheck.GAP, SequenceCheck.GAP]
    assert channel.applied == 1
    assert [channel.accept(n) for n in (2, 3, 4)] == [SequenceCheck.NEXT] * 3


@pytest.mark.parametrize("number", [0, -5])
def test_a_number_that_was_never_drawn_is_a_duplicate(number: int) -> None:
    assert SequencedChannel().accept(number) is SequenceCheck.DUPLICATE


# --- pacing of reports ----------------------------------------------------------------------------------------------


def test_the_first_report_is_due_at_once() -> None:
    assert ReportPacer().wait_s(changed=False, now=5.0) == 0


def test_a_change_waits_for_20_ms_and_silence_lasts_200_ms() -> None:
    pacer = ReportPacer()
    pacer.sent(10.0)
    assert pacer.wait_s(changed=True, now=10.005) == pytest.approx(0.015)
    assert pacer.wait_s(changed=False, now=10.005) == pytest.approx(0.195)
    assert pacer.wait_s(changed=True, now=10.03) == 0


def test_a_delay_line_hands_on_in_order_when_the_time_has_come() -> None:
    channel: DelayQueue[str] = DelayQueue(1.0)
    assert channel.wait_s(0.0) == math.inf
    channel.put("a", 0.0)
    channel.put("b", 0.5)
    assert channel.take_due(0.9) == []
    assert channel.wait_s(0.9) == pytest.approx(0.1)
    assert channel.take_due(2.0) == ["a", "b"]


def test_no_delay_hands_on_at_once() -> None:
    channel: DelayQueue[str] = DelayQueue(0.0)
    channel.put("a", 3.0)
    assert channel.take_due(3.0) == ["a"]


# --- the group's state ----------------------------------------------------------------------------------------------


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


def test_a_dismissal_is_meant_for_one_life_of_a_seat() -> None:
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


def test_a_leaving_seat_is_known_by_its_engine() -> None:
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


# --- the mailbox ----------------------------------------------------------------------------------------------------


def test_posted_calls_run_in_order_and_only_when_the_owner_runs_them() -> None:
    mailbox = Mailbox()
    calls: list[int] = []
    mailbox.post(calls.append, 1)
    mailbox.post(calls.append, 2)
    assert calls == []
    mailbox.run_posted()
    assert calls == [1, 2]
    mailbox.close()


def test_waking_never_blocks_however_often() -> None:
    mailbox = Mailbox()
    for _ in range(100_000):
        mailbox.wake()
    mailbox.close()
