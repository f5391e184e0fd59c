"""Which engines are suspect and which are hung: the failure detector on hand-made times."""

from typing import Any

import pytest
from msgspec.structs import replace

from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import EnginePhase, ReplicaState
from lb.coordinator.failure_detector import FailureDetector, RecentMax

E0, E1 = EngineId(0, 1), EngineId(1, 1)
STALL_S = 3.0


class Group:
    """A detector, and engines that report every 1/4 s unless they are stopped; time moves in such steps."""

    def __init__(self, *engine_ids: EngineId) -> None:
        self.detector = FailureDetector(STALL_S)
        self.now = 100.0
        self.reports = {
            engine_id: EngineReport(engine_id, 0, 0, 0, 0, 0, EnginePhase.IDLE, 0, False, {}, Load())
            for engine_id in engine_ids
        }
        self.stopped: set[EngineId] = set()

    def set(self, engine_id: EngineId, **changes: Any) -> None:
        self.reports[engine_id] = replace(self.reports[engine_id], **changes)

    def work(self, engine_id: EngineId, num_steps: int = 1, **load: Any) -> None:
        self.set(engine_id, phase=EnginePhase.RUNNING, has_work=True, load=Load(num_steps=num_steps, **load))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            for engine_id, report in self.reports.items():
                if engine_id not in self.stopped:
                    self.detector.on_report(report, self.now)
            self.detector.judge(self.now)

    def judged(self) -> dict[EngineId, bool]:
        """Return who is suspect, and whether hung."""
        return {suspect.engine_id: suspect.is_hung for suspect in self.detector.suspects}


def test_engines_that_report_are_not_suspect_however_long_they_idle_or_load() -> None:
    group = Group(E0, E1)
    group.set(E1, phase=EnginePhase.LOADING, has_work=True)
    group.run(1000)
    assert group.judged() == {}


def test_a_silent_engine_is_suspect_after_a_second_and_hung_after_the_limit_idle_or_not() -> None:
    group = Group(E0, E1)
    group.run(1)
    group.stopped.add(E1)
    group.run(1.0)
    assert group.judged() == {}
    group.run(0.25)
    assert group.judged() == {E1: False}
    group.run(1.75)
    assert group.judged() == {E1: False}
    group.run(0.25)
    assert group.judged() == {E1: True}
    (suspect,) = group.detector.suspects
    assert suspect.reason == "silent for 3.2 s (behind step 0)"


def test_a_silent_engine_that_loads_is_not_judged() -> None:
    group = Group(E0, E1)
    group.set(E1, phase=EnginePhase.LOADING)
    group.run(1)
    group.stopped.add(E1)
    group.run(1000)
    assert group.judged() == {}


def test_a_suspect_that_is_heard_again_is_none() -> None:
    group = Group(E0, E1)
    group.run(1)
    group.stopped.add(E1)
    group.run(2)
    assert group.judged() == {E1: False}
    group.stopped.clear()
    group.run(0.25)
    assert group.judged() == {}


def test_work_without_a_step_is_a_stall_and_arrivals_are_no_progress() -> None:
    group = Group(E0, E1)
    group.work(E1, num_steps=7)
    group.run(1.0)
    for num_queued in range(9):
        group.work(E1, num_steps=7, num_queued=num_queued)
        group.run(0.25)
    assert group.judged() == {E1: False}
    group.run(0.25)
    assert group.judged() == {E1: True}
    assert group.detector.suspects[0].reason == "no step for 3.2 s (behind step 7)"


def test_work_that_begins_starts_the_clock_and_work_that_moves_starts_it_again() -> None:
    group = Group(E0)
    group.run(1000)
    for num_steps in range(1, 100):
        group.work(E0, num_steps)
        group.run(0.75)
        assert group.judged() == {}


def test_the_limit_follows_the_longest_recent_step() -> None:
    group = Group(E0)
    group.work(E0, 1)
    group.run(0.25)
    group.run(2.75)  # the step takes 3 s in all
    assert group.judged() == {E0: False}
    group.work(E0, 2)
    group.run(0.25)
    group.run(6.0)
    assert group.judged() == {}  # twice the longest step has not passed
    group.run(8.75)
    assert group.judged() == {E0: False}
    group.run(0.5)
    assert group.judged() == {E0: True}


def test_an_engine_in_which_a_pause_is_in_force_is_not_stalled_and_its_clock_starts_when_the_pause_ends() -> None:
    group = Group(E0)
    group.work(E0)
    group.run(0.25)
    group.set(E0, phase=EnginePhase.IDLE, has_work=False, settings_seq=1)
    group.run(1000)
    assert group.judged() == {}
    group.set(E0, phase=EnginePhase.RUNNING, has_work=True, settings_seq=2)
    group.run(0.75)
    assert group.judged() == {}
    group.run(3.0)
    assert group.judged() == {E0: True}


def test_when_nobody_is_heard_nobody_is_suspect_until_the_limit() -> None:
    group = Group(E0, E1)
    group.run(1)
    group.stopped = {E0, E1}
    group.run(2.75)
    assert group.judged() == {}
    group.run(0.5)
    assert group.judged() == {E0: True, E1: True}


def test_the_own_absence_of_the_coordinator_is_nobodys_silence() -> None:
    group = Group(E0, E1)
    group.work(E1)
    group.run(0.25)
    group.now += 500
    group.detector.on_report(group.reports[E0], group.now)
    assert not group.detector.judge(group.now)
    group.stopped.add(E1)
    group.run(1.25)
    assert group.judged() == {E1: False}


def test_behind_a_restart_engines_that_serve_have_the_whole_limit_to_be_heard() -> None:
    group = Group(E0)
    group.run(0.25)
    group.detector.on_replicas(
        {0: ReplicaInfo(E0, ReplicaState.ALIVE), 1: ReplicaInfo(E1, ReplicaState.ALIVE)}, group.now
    )
    group.run(1.0)
    assert group.judged() == {}
    group.run(0.25)
    assert group.judged() == {E1: False}
    group.run(2.0)
    assert group.judged() == {E1: True}


@pytest.mark.parametrize(
    "replicas",
    [
        {0: ReplicaInfo(E0, ReplicaState.ALIVE), 1: ReplicaInfo(E1, ReplicaState.DEAD)},
        {0: ReplicaInfo(E0, ReplicaState.ALIVE), 1: ReplicaInfo(EngineId(1, 2), ReplicaState.STARTING)},
        {0: ReplicaInfo(E0, ReplicaState.ALIVE)},
    ],
    ids=["dead", "replaced", "removed"],
)
def test_an_engine_that_has_ended_is_no_suspect_any_more(replicas: dict[int, ReplicaInfo]) -> None:
    group = Group(E0, E1)
    group.run(1)
    group.stopped.add(E1)
    group.run(5)
    assert group.judged() == {E1: True}
    group.detector.on_replicas(replicas, group.now)
    group.run(5)
    assert group.judged() == {}


def test_a_successor_is_judged_by_itself_although_the_replicas_are_not_known_to_have_changed() -> None:
    group = Group(E0, E1)
    group.work(E1, 50)
    group.run(2)
    replacement = EngineId(1, 2)
    group.reports[replacement] = replace(group.reports.pop(E1), engine_id=replacement, phase=EnginePhase.LOADING)
    group.detector.on_replicas(
        {0: ReplicaInfo(E0, ReplicaState.ALIVE), 1: ReplicaInfo(E1, ReplicaState.ALIVE)}, group.now
    )
    group.run(100)
    assert group.judged() == {}


def test_the_next_deadline_is_when_the_judgement_changes_if_nothing_is_heard() -> None:
    group = Group(E0, E1)
    group.work(E0)
    group.run(0.25)
    heard_at = group.now
    changes: list[tuple[float, dict[EngineId, bool]]] = []
    while (deadline := group.detector.next_deadline(group.now)) < float("inf"):
        group.now = deadline + 1e-6
        group.detector.on_report(group.reports[E1], group.now)
        group.detector.judge(group.now)
        if group.judged() and group.judged() not in [change for _, change in changes]:
            changes.append((round(group.now - heard_at, 3), group.judged()))
        if group.now > heard_at + 10:
            break
    assert changes == [(1.0, {E0: False}), (3.0, {E0: True})]


def test_no_engine_is_no_deadline() -> None:
    assert FailureDetector(STALL_S).next_deadline(5.0) == float("inf")


def test_a_recent_maximum_fades_after_two_windows() -> None:
    largest = RecentMax()
    largest.add(5.0, 0.0)
    largest.add(2.0, 10.0)
    assert [largest.get(now) for now in (10.0, 299.0, 301.0, 599.0)] == [5.0] * 4
    largest.add(3.0, 599.0)
    assert [largest.get(now) for now in (602.0, 900.0, 1300.0)] == [3.0, 3.0, 0.0]
