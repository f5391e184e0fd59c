"""How long an engine goes on for a client that takes nothing."""

import math

from engine.proc.patience import Patience, Verdict


def make_patience() -> Patience:
    return Patience(stall_s=5.0, dead_s=30.0)


def test_a_client_that_takes_is_never_judged() -> None:
    patience = make_patience()
    assert (patience.judge(100.0), patience.wait_s(100.0)) == (None, math.inf)


def test_a_client_that_refuses_is_stalled_once_and_then_dead_again_and_again() -> None:
    patience = make_patience()
    patience.on_refused(10.0)
    patience.on_refused(12.0)
    verdicts = {now: patience.judge(now) for now in (14.9, 15.0, 20.0, 39.9, 40.0, 50.0, 70.0)}
    assert {now: v for now, v in verdicts.items() if v is not None} == {
        15.0: Verdict.STALLED,
        40.0: Verdict.DEAD,
        70.0: Verdict.DEAD,
    }


def test_one_frame_taken_ends_a_stall_and_the_count_begins_anew() -> None:
    patience = make_patience()
    patience.on_refused(10.0)
    assert patience.on_taken() is False
    patience.on_refused(20.0)
    assert patience.judge(25.0) is Verdict.STALLED
    assert patience.on_taken() is True
    patience.on_refused(26.0)
    assert patience.judge(30.0) is None
    assert patience.judge(31.0) is Verdict.STALLED


def test_the_wait_leads_to_the_next_verdict() -> None:
    patience = make_patience()
    patience.on_refused(10.0)
    assert patience.wait_s(12.0) == 3.0
    patience.judge(15.0)
    assert patience.wait_s(15.0) == 25.0
    assert patience.wait_s(99.0) == 0.0
