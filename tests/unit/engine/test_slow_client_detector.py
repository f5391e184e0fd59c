"""How long an engine goes on for a client that takes nothing."""

import math

from engine.proc.slow_client_detector import SlowClientDetector, Verdict


def make_detector() -> SlowClientDetector:
    return SlowClientDetector(stall_s=5.0, dead_s=30.0)


def test_a_client_that_takes_is_never_judged() -> None:
    slow_client_detector = make_detector()
    assert (slow_client_detector.judge(100.0), slow_client_detector.wait_s(100.0)) == (None, math.inf)


def test_a_client_that_refuses_is_stalled_once_and_then_dead_again_and_again() -> None:
    slow_client_detector = make_detector()
    slow_client_detector.on_refused(10.0)
    slow_client_detector.on_refused(12.0)
    verdicts = {now: slow_client_detector.judge(now) for now in (14.9, 15.0, 20.0, 39.9, 40.0, 50.0, 70.0)}
    assert {now: v for now, v in verdicts.items() if v is not None} == {
        15.0: Verdict.STALLED,
        40.0: Verdict.DEAD,
        70.0: Verdict.DEAD,
    }


def test_one_frame_taken_ends_a_stall_and_the_count_begins_anew() -> None:
    slow_client_detector = make_detector()
    slow_client_detector.on_refused(10.0)
    assert slow_client_detector.on_taken() is False
    slow_client_detector.on_refused(20.0)
    assert slow_client_detector.judge(25.0) is Verdict.STALLED
    assert slow_client_detector.on_taken() is True
    slow_client_detector.on_refused(26.0)
    assert slow_client_detector.judge(30.0) is None
    assert slow_client_detector.judge(31.0) is Verdict.STALLED


def test_the_wait_leads_to_the_next_verdict() -> None:
    slow_client_detector = make_detector()
    slow_client_detector.on_refused(10.0)
    assert slow_client_detector.wait_s(12.0) == 3.0
    slow_client_detector.judge(15.0)
    assert slow_client_detector.wait_s(15.0) == 25.0
    assert slow_client_detector.wait_s(99.0) == 0.0
