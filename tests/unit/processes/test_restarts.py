"""Whether and how soon something that ended is started again."""

from orchestrator.processes.restarts import RestartRule, Restarts


def pauses(restarts: Restarts, count: int) -> list[float | None]:
    """Return the pauses of ends that follow each other at once."""
    return [restarts.on_end(0.0) for _ in range(count)]


def test_pauses_begin_at_nothing_double_and_are_bounded_until_the_restarts_are_used_up() -> None:
    restarts = Restarts(RestartRule(max_in_row=8))
    assert pauses(restarts, 9) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]
    assert pauses(Restarts(RestartRule(max_in_row=2, first_pause_s=0.1)), 3) == [0.0, 0.1, None]


def test_without_restarts_there_is_none() -> None:
    assert pauses(Restarts(RestartRule(max_in_row=0)), 1) == [None]


def test_what_served_for_long_enough_begins_again_and_what_did_not_goes_on() -> None:
    restarts = Restarts(RestartRule(max_in_row=3))
    assert pauses(restarts, 2) == [0.0, 1.0]
    restarts.on_serving(10.0)
    restarts.on_serving(69.0)  # a repeated report is no new life
    assert restarts.on_end(69.9) == 2.0
    restarts.on_serving(80.0)
    assert restarts.on_end(140.0) == 0.0
    assert restarts.num_in_row == 1


def test_an_end_while_loading_is_counted_although_the_life_before_was_long() -> None:
    restarts = Restarts(RestartRule(max_in_row=3))
    restarts.on_serving(0.0)
    assert restarts.on_end(100.0) == 0.0
    assert restarts.on_end(1000.0) == 1.0
