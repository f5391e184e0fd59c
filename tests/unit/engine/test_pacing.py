"""The timers of an engine process: each is due when it should be, by a clock that the test turns."""

import math

import pytest

from engine.proc.pacing import (
    HEARTBEAT_FIRST_GAP_S,
    HEARTBEAT_NEXT_GAP_S,
    DelayQueue,
    HandshakeRetry,
    Heartbeat,
    ReportPacer,
    SlowClientDetector,
    Verdict,
)

# --- handshakes -------------------------------------------------------------------------------------------------------


def test_a_handshake_is_repeated_at_pauses_that_double_up_to_half_a_minute() -> None:
    handshake_retry, repeated = HandshakeRetry(100.0), []
    for second in range(100, 221):
        assert not handshake_retry.is_due(second - 0.001)
        if handshake_retry.is_due(second):
            repeated.append(second - 100)
            assert not handshake_retry.is_due(second)
    assert repeated == [1, 3, 7, 15, 31, 61, 91]


# --- heartbeats -------------------------------------------------------------------------------------------------------


def test_an_empty_frame_is_due_soon_after_the_last_with_content() -> None:
    heartbeat = Heartbeat(100.0)
    heartbeat.on_sent(101.0, is_empty=False)
    heartbeat.on_sent(101.4, is_empty=False)
    assert heartbeat.wait_s(101.4) == HEARTBEAT_FIRST_GAP_S
    assert heartbeat.wait_s(101.4 + HEARTBEAT_FIRST_GAP_S) == 0


def test_an_empty_frame_is_repeated_more_rarely_because_it_may_be_lost_too() -> None:
    heartbeat = Heartbeat(100.0)
    heartbeat.on_sent(101.0, is_empty=True)
    assert heartbeat.wait_s(101.0) == HEARTBEAT_NEXT_GAP_S


# --- slow clients -----------------------------------------------------------------------------------------------------


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


# --- reports ----------------------------------------------------------------------------------------------------------


def test_the_first_report_is_due_at_once() -> None:
    assert ReportPacer().wait_s(changed=False, now=5.0) == 0


def test_a_change_waits_for_20_ms_and_silence_lasts_200_ms() -> None:
    pacer = ReportPacer()
    pacer.on_sent(10.0)
    assert pacer.wait_s(changed=True, now=10.005) == pytest.approx(0.015)
    assert pacer.wait_s(changed=False, now=10.005) == pytest.approx(0.195)
    assert pacer.wait_s(changed=True, now=10.03) == 0


def test_a_delay_queue_hands_on_in_order_when_the_time_has_come() -> None:
    queue: DelayQueue[str] = DelayQueue(1.0)
    assert queue.wait_s(0.0) == math.inf
    queue.put("a", 0.0)
    queue.put("b", 0.5)
    assert queue.take_due(0.9) == []
    assert queue.wait_s(0.9) == pytest.approx(0.1)
    assert queue.take_due(2.0) == ["a", "b"]


def test_no_delay_hands_on_at_once() -> None:
    queue: DelayQueue[str] = DelayQueue(0.0)
    queue.put("a", 3.0)
    assert queue.take_due(3.0) == ["a"]
