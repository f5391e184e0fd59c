"""Which process takes the next connection."""

from metrics.shared_status import StatusRow
from orchestrator.api.server.acceptor import MAX_AT_ONCE, num_to_accept

NOW = 1000.0


def row(index: int, num_connections: int = 0, accepted_at: float = 0.0, heartbeat_at: float = NOW) -> StatusRow:
    made = StatusRow(index)
    made.pid, made.heartbeat_at = 7, heartbeat_at
    made.num_connections, made.accepted_at = num_connections, accepted_at
    return made


def turn_of(rows: list[StatusRow], num_rounds: int = 0) -> list[int]:
    """Return how many each may take, if all looked at the same moment."""
    return [num_to_accept(me, [other for other in rows if other is not me], NOW, num_rounds) for me in rows]


def test_a_process_alone_takes_all_that_come() -> None:
    assert turn_of([row(0, 500)]) == [MAX_AT_ONCE]


def test_whoever_has_the_fewest_takes_one() -> None:
    assert turn_of([row(0, 3), row(1, 1, accepted_at=9), row(2, 2)]) == [0, 1, 0]


def test_exactly_one_of_equals_takes_it_and_it_goes_round() -> None:
    rows = [row(index) for index in range(3)]
    taken = []
    for number in range(9):  # each connection is closed again at once
        turns = turn_of(rows)
        assert sum(turns) == 1
        taken.append(turns.index(1))
        rows[taken[-1]].accepted_at = number + 1
    assert taken == [0, 1, 2] * 3


def test_the_dead_and_the_stopped_have_no_turn() -> None:
    dead = row(1)
    dead.clear()
    assert num_to_accept(row(0, 9), [dead, row(2, heartbeat_at=NOW - 5)], NOW, 0) == MAX_AT_ONCE


def test_who_is_behind_catches_up_in_one_go() -> None:
    assert turn_of([row(0, 20), row(1, 7), row(2, 12)]) == [0, 5, 0]


def test_many_that_come_at_once_are_taken_a_few_at_a_time() -> None:
    assert sorted(turn_of([row(0), row(1), row(2)], num_rounds=1)) == [1, 1, 4]


def test_what_is_left_alone_is_taken_by_anybody_the_sooner_the_less_it_has() -> None:
    rows = [row(0, 50), row(1), row(2, 3)]
    taken_after = [next(n for n in range(100) if turn_of(rows, n)[index]) for index in range(3)]
    assert taken_after == [11, 0, 4]


def test_the_spread_is_even_at_the_end_of_a_burst() -> None:
    rows, left, moment = [row(0, 12), row(1), row(2, 5)], 40, 0
    while left:
        turns = turn_of(rows)
        taker, taken = turns.index(max(turns)), min(left, max(turns))
        moment += 1
        rows[taker].num_connections += taken
        rows[taker].accepted_at = moment
        left -= taken
    assert [each.num_connections for each in rows] == [19, 19, 19]
