"""What the threads of an engine share: counts and reports that never contradict each other."""

import threading

import pytest

from engine.proc.shared import ClientGone, Received, SharedState
from engine.wire.errors import EngineDeadError
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import AbortRequest, AddRequest
from engine.wire.sampling import SamplingParams
from engine.wire.states import EnginePhase

CLIENT = ClientId(0, 1)


def make_shared(changes: list[None] | None = None) -> SharedState:
    shared = SharedState(EngineId(0, 1), "here", lambda: None if changes is None else changes.append(None))
    shared.set_loaded("cpu")
    return shared


def add(channel_seq: int) -> AddRequest:
    return AddRequest(CLIENT, channel_seq, channel_seq, 0, 0, [1], [], SamplingParams(1))


def test_applied_and_queued_rise_together() -> None:
    shared = make_shared()
    shared.receive(add(1), 0.0)
    shared.receive(AbortRequest(CLIENT, 2, 9, 0, 0), 0.0)
    report = shared.take_report()
    assert (report.applied, report.load.num_queued) == ({CLIENT: 2}, 1)
    assert (report.phase, report.has_work) == (EnginePhase.RUNNING, True)


def test_a_sequence_moves_from_queued_to_the_cores_counts_in_one_go() -> None:
    shared = make_shared()
    shared.receive(add(1), 0.0)
    assert shared.take(core_has_work=False) == [Received(add(1), 0.0)]
    assert shared.take_report().load.num_queued == 1
    shared.commit(Load(num_waiting=1), has_work=True, num_taken=1)
    load = shared.take_report().load
    assert (load.num_queued, load.num_waiting) == (0, 1)


def test_a_commit_names_the_first_report_that_reflects_it() -> None:
    shared = make_shared()
    shared.take_report()
    report_seq = shared.commit(Load(num_steps=1), has_work=False)
    report = shared.take_report()
    assert (report.report_seq, report.load.num_steps) == (report_seq, 1)


def test_reports_are_numbered_from_one() -> None:
    shared = make_shared()
    assert [shared.take_report().report_seq for _ in range(3)] == [1, 2, 3]


def test_the_reporter_is_woken_once_per_report() -> None:
    changes: list[None] = []
    shared = make_shared(changes)
    shared.take_report()
    for step in range(1, 4):
        shared.commit(Load(num_steps=step), has_work=True)
    assert len(changes) == 1
    assert shared.changed


def test_a_step_that_changed_nothing_wakes_nobody() -> None:
    changes: list[None] = []
    shared = make_shared(changes)
    shared.take_report()
    shared.commit(Load(), has_work=False)
    assert changes == []


def test_the_loop_sleeps_until_something_comes() -> None:
    shared = make_shared()
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(shared.take(core_has_work=False)))
    thread.start()
    shared.free_client(CLIENT)
    thread.join()
    assert taken == [[ClientGone(CLIENT)]]


def test_a_stop_leaves_what_arrived_for_the_end() -> None:
    shared = make_shared()
    shared.receive(add(1), 0.0)
    shared.request_stop("dismissed")
    shared.request_stop("SIGTERM")
    assert shared.take(core_has_work=True) is None
    assert len(shared.take_rest()) == 1
    assert shared.stop_reason == "dismissed"
    assert shared.turns_away


def test_a_fault_of_an_io_thread_is_the_loops_death() -> None:
    shared = make_shared()
    shared.fail("no more descriptors")
    with pytest.raises(EngineDeadError, match="no more descriptors"):
        shared.take(core_has_work=False)


def test_a_forgotten_client_leaves_the_report() -> None:
    shared = make_shared()
    shared.receive(add(1), 0.0)
    shared.forget_client(CLIENT)
    assert shared.take_report().applied == {}


def test_loading_is_reported_with_its_progress() -> None:
    shared = SharedState(EngineId(0, 1), "here", lambda: None)
    shared.set_progress("loading weights", 0.5)
    report = shared.take_report()
    assert (report.phase, report.detail, report.progress) == (EnginePhase.LOADING, "loading weights", 0.5)
    shared.set_loaded("cpu")
    report = shared.take_report()
    assert (report.phase, report.detail, report.device) == (EnginePhase.IDLE, "", "cpu")
