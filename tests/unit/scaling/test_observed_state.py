"""The observed state of a scale operation: what is read from replicas, reports and the group's state."""

from collections import Counter

import pytest
from msgspec.structs import replace

from engine.wire.control import Membership
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import ReplicaState
from orchestrator.processes.exits import ProcessExit
from orchestrator.processes.restarts import RestartRule, Restarts
from orchestrator.ranks.replica_table import Replica, ReplicaHistory
from orchestrator.scaling.observed_state import GroupStage, Placement, PlacementState, is_member, observe
from orchestrator.scaling.plan import ScalePlan
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


GROW = ScalePlan(joining=(1, 2), leaving=(), size_before=1, size_after=3)
SHRINK = ScalePlan(joining=(), leaving=(1,), size_before=2, size_after=1)


def test_a_new_rank_is_observed_from_its_placement_group_and_later_from_its_replica() -> None:
    new = Replica(E1, ReplicaHistory(Restarts(RestartRule(max_in_row=1))), report(E1, 1))
    placements = {1: Placement(PlacementState.HELD), 2: Placement(PlacementState.REFUSED, "needs 1 CPU")}
    seen = observe(GROW, [stayer(0), new], None, placements, {E1}, is_lockstep=False)
    assert (seen.of(1).placement, seen.of(1).engine, seen.of(1).is_reached) == ("held", ReplicaState.ALIVE, True)
    assert (seen.of(2).placement, seen.of(2).engine, seen.of(2).reason) == ("refused", None, "needs 1 CPU")
    assert seen.group is GroupStage.SWITCHED
    assert seen.is_served


def test_a_rank_that_left_holds_its_place_until_it_is_published_no_more() -> None:
    published = [observe(SHRINK, [stayer(0)], seen, {}, set(), is_lockstep=False) for seen in (state(E0), None)]
    assert [seen.of(1).placement for seen in published] == [PlacementState.HELD, PlacementState.NONE]


def test_a_staying_rank_without_an_engine_is_healing_as_long_as_a_replacement_will_come() -> None:
    replica = stayer(0)
    replica.exit, replica.replacement_in_s = ProcessExit(-9, "killed by SIGKILL"), 1.0
    assert observe(SHRINK, [replica], None, {}, set(), is_lockstep=False).healing == (0,)
    replica.replacement_in_s = None
    seen = observe(SHRINK, [replica], None, {}, set(), is_lockstep=False)
    assert (seen.healing, seen.is_served) == ((), False)
