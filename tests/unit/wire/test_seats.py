"""Who has ended, by the seats of the deployment."""

import pytest

from engine.wire.ids import EngineId
from engine.wire.messages import Seat, SeatState
from engine.wire.seats import any_has_ended, seats_by_rank

E0, E1 = EngineId(0, 1), EngineId(1, 1)
ALIVE, DEAD = SeatState.ALIVE, SeatState.DEAD


@pytest.mark.parametrize(
    ("seats", "ended"),
    [
        ([], False),  # the coordinator has just started
        ([Seat(E1, ALIVE)], False),
        ([Seat(E1, SeatState.LEAVING)], False),
        ([Seat(E1, DEAD)], True),
        ([Seat(EngineId(1, 2), SeatState.STARTING)], True),
        ([Seat(E0, ALIVE)], True),  # it was removed
        ([Seat(EngineId(1, 0), DEAD)], False),  # its predecessor
    ],
)
def test_who_has_ended_is_said_by_the_seats(seats: list[Seat], ended: bool) -> None:
    assert any_has_ended([E1], seats_by_rank(seats)) is ended


def test_one_of_several_is_enough() -> None:
    seats = {0: Seat(E0, ALIVE), 1: Seat(E1, DEAD)}
    assert any_has_ended([E0, E1], seats)
    assert not any_has_ended([E0], seats)
    assert not any_has_ended([], seats)
