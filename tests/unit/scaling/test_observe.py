"""The facts of a scale operation: what is read from replicas, reports and the group's state."""

from collections import Counter

import pytest
from msgspec.structs import replace

from engine.wire.control import Membership
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import ReplicaState
from orchestrator.processes.restarts import RestartRule, Restarts
from orchestrator.ranks.replica_table import Replica, ReplicaHistory
from orchestrator.scaling.observe import is_member
from tests.unit.ranks.reports import report

E0, E1 = EngineId(0, 1), EngineId(1, 1)


def stayer(epoch: int) -> Replica:
    """Return the replica of rank 0, whose engine steps in an epoch."""
    history = ReplicaHistory(Restarts(RestartRule(max_in_row=1)), Counter())
    return Replica(E0, history, replace(report(E0, 1), epoch=epoch))


def state(*members: EngineId, epoch: int = 2, replica: ReplicaState = ReplicaState.LEAVING) -> GroupState:
    """Return a state that shows rank 1 in a replica like this."""
    replicas = [ReplicaInfo(E0, ReplicaState.ALIVE), ReplicaInfo(E1, replica)]
    return GroupState(1, 1, Membership(epoch, list(members)), None, False, [], 0, [], replicas)


@pytest.mark.parametrize(
    ("seen", "epoch_of_others", "expected"),
    [
        (state(E0, E1), 2, True),
        (state(E0), 1, True),
        (state(E0), 2, False),
        (state(E0, replica=ReplicaState.DEAD), 2, False),
        (state(E0, replica=ReplicaState.ALIVE), 2, True),
        (state(epoch=0), 2, True),
        (state(epoch=0), 0, False),
        (None, 0, False),
    ],
    ids=[
        "it is a member",
        "others still step with it",
        "all step without it",
        "it died",
        "the coordinator does not know yet that it leaves",
        "the coordinator has just started",
        "there is no group",
        "ranks are independent",
    ],
)
def test_a_group_counts_on_an_engine_until_it_can_no_more(
    seen: GroupState | None, epoch_of_others: int, expected: bool
) -> None:
    assert is_member(E1, seen, [stayer(epoch_of_others)]) is expected
