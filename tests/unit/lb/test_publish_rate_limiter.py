"""When a state is due, on hand-made times."""

from lb.coordinator.process import PublishRateLimiter


def _published(version: int, now: float) -> PublishRateLimiter:
    publish_rate_limiter = PublishRateLimiter(min_gap_s=0.05, repeat_gap_s=0.1, max_gap_s=1.0)
    publish_rate_limiter.on_published(version, now)
    return publish_rate_limiter


def test_the_first_state_is_due_at_once() -> None:
    assert PublishRateLimiter(min_gap_s=0.05, max_gap_s=1.0).due_at(0) == float("-inf")


def test_a_change_waits_for_the_smallest_gap_only() -> None:
    assert _published(1, 10.0).due_at(2) == 10.05


def test_an_unobserved_state_is_repeated_and_an_observed_one_is_kept_alive() -> None:
    publish_rate_limiter = _published(1, 10.0)
    assert publish_rate_limiter.due_at(1, observed=False) == 10.1
    assert publish_rate_limiter.due_at(1, observed=True) == 11.0


def test_a_new_subscriber_gets_the_state_like_a_change() -> None:
    publish_rate_limiter = _published(1, 10.0)
    publish_rate_limiter.on_new_subscriber()
    assert publish_rate_limiter.due_at(1) == 10.05
