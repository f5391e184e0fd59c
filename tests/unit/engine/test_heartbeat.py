"""When an engine that has nothing to say sends a frame all the same."""

from engine.proc.heartbeat import FIRST_GAP_S, NEXT_GAP_S, Heartbeat


def test_an_empty_frame_is_due_soon_after_the_last_that_said_something() -> None:
    heartbeat = Heartbeat(100.0)
    heartbeat.on_sent(101.0, is_empty=False)
    heartbeat.on_sent(101.4, is_empty=False)
    assert heartbeat.wait_s(101.4) == FIRST_GAP_S
    assert heartbeat.wait_s(101.4 + FIRST_GAP_S) == 0


def test_it_is_repeated_at_leisure_because_it_may_be_lost_too() -> None:
    heartbeat = Heartbeat(100.0)
    heartbeat.on_sent(101.0, is_empty=True)
    assert heartbeat.wait_s(101.0) == NEXT_GAP_S
