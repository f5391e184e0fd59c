"""When a lockstep group runs: reports in, waves out."""

from typing import Any

from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.states import EnginePhase
from lb.coordinator.lockstep_group import Waves

EPOCH = 4


def report(rank: int = 0, wave: int = 3, **changes: Any) -> EngineReport:
    fields = {"epoch": EPOCH, "ready_epoch": EPOCH, "max_epoch_seen": EPOCH, "has_work": False} | changes
    phase = fields.pop("phase", EnginePhase.IDLE)
    return EngineReport(EngineId(rank, 1), 1, wave=wave, phase=phase, coll_seq=0, applied={}, load=Load(), **fields)


def started_by(*reports: EngineReport, before: int = 3) -> int:
    made = Waves()
    made.started = before
    made.update(reports, EPOCH)
    return made.started


def test_an_idle_member_with_work_starts_the_next_wave() -> None:
    assert started_by(report(0), report(1, has_work=True)) == 4


def test_a_group_that_rests_or_runs_starts_none() -> None:
    assert started_by(report(0), report(1)) == 3
    assert started_by(report(0, phase=EnginePhase.RUNNING, has_work=True)) == 3
    assert started_by(report(0, phase=EnginePhase.PARKED, has_work=True)) == 3


def test_a_member_that_is_behind_will_run_in_the_newest_wave() -> None:
    assert started_by(report(0, wave=2, has_work=True)) == 3


def test_a_wave_that_a_predecessor_started_is_everybodys() -> None:
    assert started_by(report(0, wave=7, phase=EnginePhase.RUNNING), report(1, wave=6), before=0) == 7


def test_a_commit_wakes_a_group_that_rests_because_it_takes_effect_at_a_step() -> None:
    assert started_by(report(0, epoch=EPOCH - 1), report(1, epoch=EPOCH - 1)) == 4
    assert started_by(report(0, epoch=EPOCH - 1, phase=EnginePhase.RUNNING)) == 3
    assert started_by(report(0, epoch=EPOCH - 1, phase=EnginePhase.PARKED)) == 3


def test_a_group_that_rests_without_having_switched_is_woken() -> None:
    """Found by the search.

    Rank 0 has work, and wave 2 starts; 1 sees it late, together with the commit of an epoch and its wave, 3. In the
    exchange rank 0 has seen no commit, so nobody switches, and nobody has work any more: both rest, in wave 3.
    """
    assert started_by(report(0, wave=3, epoch=EPOCH - 1), report(1, wave=3)) == 4
