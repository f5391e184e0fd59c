"""Who has ended, by the replicas of the deployment."""

import pytest

from engine.wire.ids import EngineId
from engine.wire.replicas import ReplicaInfo, any_has_ended, replicas_by_rank
from engine.wire.states import ReplicaState

E0, E1 = EngineId(0, 1), EngineId(1, 1)
ALIVE, DEAD = ReplicaState.ALIVE, ReplicaState.DEAD


@pytest.mark.parametrize(
    ("replicas", "ended"),
    [
        ([], False),  # the coordinator has just started
        ([ReplicaInfo(E1, ALIVE)], False),
        ([ReplicaInfo(E1, ReplicaState.LEAVING)], False),
        ([ReplicaInfo(E1, DEAD)], True),
        ([ReplicaInfo(EngineId(1, 2), ReplicaState.STARTING)], True),
        ([ReplicaInfo(E0, ALIVE)], True),  # it was removed
        ([ReplicaInfo(EngineId(1, 0), DEAD)], False),  # its predecessor
    ],
)
def test_the_replicas_show_who_has_ended(replicas: list[ReplicaInfo], ended: bool) -> None:
    assert any_has_ended([E1], replicas_by_rank(replicas)) is ended


def test_one_of_several_is_enough() -> None:
    replicas = {0: ReplicaInfo(E0, ALIVE), 1: ReplicaInfo(E1, DEAD)}
    assert any_has_ended([E0, E1], replicas)
    assert not any_has_ended([E0], replicas)
    assert not any_has_ended([], replicas)
