"""Invariants that hold in every world, beside the assertions of the machines themselves."""

from typing import Any

from engine.wire.control import Membership
from engine.wire.ids import EngineId
from engine.wire.states import LockstepState
from tests.model.parts import Collective
from tests.model.world import World


def parked(world: World) -> set[EngineId]:
    """Return the ranks that are parked."""
    return {it.engine_id for it in world.ranks.values() if it.member.lockstep_state is LockstepState.PARKED}


def check_size(committed: Membership, min_size: int) -> None:
    """Check that no group is put in force that is too small; before there is one, it has no members."""
    assert not committed.epoch or len(committed.members) >= min_size, f"{committed.members} are too few"


def check_headers(place: Collective, headers: tuple[Any, ...]) -> None:
    """Check that all in one exchange are at the same epoch and step."""
    assert all(header.epoch == place.epoch for header in headers), f"epochs differ in one exchange: {headers}"
    if place.position > 0:
        assert len({header.step for header in headers}) == 1, f"steps differ in one exchange: {headers}"
