"""When a state is due, on hand-made times."""

from lb.coordinator.cadence import Cadence


def _published(version: int, now: float) -> Cadence:
    cadence = Cadence(min_gap_s=0.05, repeat_gap_s=0.1, max_gap_s=1.0)
    cadence.on_published(version, now)
    return cadence


def test_the_first_state_is_due_at_once() -> None:
    assert Cadence(min_gap_s=0.05, max_gap_s=1.0).due_at(0) == float("-inf")


def test_a_change_waits_for_the_smallest_gap_only() -> None:
    assert _published(1, 10.0).due_at(2) == 10.05


def test_an_unobserved_state_is_repeated_and_an_observed_one_is_kept_alive() -> None:
    cadence = _published(1, 10.0)
    assert cadence.due_at(1, observed=False) == 10.1
    assert cadence.due_at(1, observed=True) == 11.0


def test_a_newcomer_gets_the_state_like_a_change() -> None:
    cadence = _published(1, 10.0)
    cadence.on_newcomer()
    assert cadence.due_at(1) == 10.05
