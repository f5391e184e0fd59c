"""The failure detector of the coordinator: reports and ``now`` in, suspects out. Pure; times are monotonic seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.replicas import ReplicaInfo, Suspect, has_ended
from engine.wire.states import EnginePhase, ReplicaState

SILENCE_S = 1.0
"""Engines report at least every 0.2 s, also while a step hangs: five missing reports are a sign."""

SERVING = (EnginePhase.IDLE, EnginePhase.RUNNING)

_WATCHED = (*SERVING, EnginePhase.PARKED)

_STEPS_TO_A_HANG = 5.0  # this many times the longest recent step
_RECENT_S = 300.0
_ABSENT_S = 1.5  # the process wakes at least once a second; what took longer was its own absence


class RecentMax:
    """The largest of the values of the last 5 to 10 minutes; 0 without any.

    Two periods of 5 minutes instead of a list of values: memory does not grow with the number of steps.
    """

    def __init__(self) -> None:
        self._began_at = float("-inf")
        self._current = 0.0
        self._previous = 0.0

    def add(self, value: float, now: float) -> None:
        """Take a value."""
        self._turn(now)
        self._current = max(self._current, value)

    def get(self, now: float) -> float:
        """Return the largest."""
        self._turn(now)
        return max(self._current, self._previous)

    def _turn(self, now: float) -> None:
        age_s = now - self._began_at
        if age_s < _RECENT_S:
            return
        self._previous = self._current if age_s < 2 * _RECENT_S else 0.0
        self._current, self._began_at = 0.0, now


@dataclass(slots=True)
class _EngineRecord:
    """One engine. heard_at: its last report. progressed_at: its last progress under work, or when the work began.

    progress: counters that only the engine's loop moves.
    has_work: it should make progress; a lockstep rank that runs should, with work of its own or without.
    position: epoch and collectives entered, of a lockstep rank; None of an independent one.
    """

    engine_id: EngineId
    heard_at: float
    progressed_at: float
    is_serving: bool = True
    has_work: bool = False
    progress: Load = field(default_factory=Load)
    position: tuple[int, int] | None = None
    gaps: RecentMax = field(default_factory=RecentMax)

    def on_report(self, report: EngineReport, now: float) -> None:
        position = None if report.member is None else (report.epoch, report.coll_seq)
        has_work = report.has_work if position is None else report.phase is EnginePhase.RUNNING
        has_work = has_work and report.phase in SERVING
        progress = replace(report.load, num_queued=0)  # the input thread counts arrivals, also while a step hangs
        if not (self.has_work and has_work) or (progress, position) != (self.progress, self.position):
            if self.has_work:  # a step has ended: by the longest ones a stall and a hang are measured
                self.gaps.add(now - self.progressed_at, now)
            self.progressed_at = now
        self.heard_at, self.has_work, self.progress, self.position = now, has_work, progress, position
        self.is_serving = report.phase in _WATCHED


@dataclass(frozen=True, slots=True)
class _Limits:
    """Seconds. stall_s: without progress under work, suspect. hang_s: without progress, or silent, hung."""

    stall_s: float
    hang_s: float


class FailureDetector:
    """Judges the engines that serve.

    Suspect is one that is silent for a second, or has work and makes no progress for a third of the stall limit; hung
    is one that does so for the whole limit: ``stall_timeout_s``, or 5 times the longest recent step if that is more.
    An engine that loads or has no work to do is never stalled. Nothing here declares a death: that is for the host
    of the engine, which is asked to end what is hung.

    suspects: changes only in ``judge``.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self.suspects: list[Suspect] = []
        self._stall_timeout_s = stall_timeout_s
        self._records: dict[int, _EngineRecord] = {}
        self._judged_at: float | None = None

    def on_report(self, report: EngineReport, now: float) -> None:
        """Take a report that is newer than all before it."""
        record = self._records.get(report.engine_id.rank)
        if record is None or record.engine_id != report.engine_id:
            record = self._records[report.engine_id.rank] = _EngineRecord(report.engine_id, now, now)
        record.on_report(report, now)

    def on_replicas(self, replicas: Mapping[int, ReplicaInfo], now: float) -> None:
        """Take what the supervisor knows: engines that are dead, replaced or removed are not watched any more.

        The clock of an engine that serves and was not heard yet starts now, so that behind a restart of the
        coordinator nobody is suspect before the limit has passed.
        """
        for record in list(self._records.values()):
            if has_ended(record.engine_id, replicas.get(record.engine_id.rank)):
                del self._records[record.engine_id.rank]
                if record.position is not None:
                    self._restart_stalls(now)  # those that waited for it have only now something to do
        for rank, replica in replicas.items():
            if rank not in self._records and replica.state is ReplicaState.ALIVE:
                self._records[rank] = _EngineRecord(replica.engine_id, now, now)

    def judge(self, now: float) -> bool:
        """Work out who is suspect; True when that changed.

        A pause needs no exception: an engine in which it is in force reports no work, and one that hangs in a step, so
        that it never comes into force there, is to be found.
        """
        self._forgive_own_absence(now)
        suspects = self._find(now)
        changed = _who(suspects) != _who(self.suspects)
        if changed:
            self.suspects = suspects
        return changed

    def next_deadline(self, now: float) -> float:
        """Return when ``judge`` may next find something new; infinity when no engine serves."""
        deadlines = (deadline for record in self._serving() for deadline in self._deadlines(record, now))
        return min((deadline for deadline in deadlines if deadline > now), default=float("inf"))

    def _serving(self) -> list[_EngineRecord]:
        return [record for record in self._records.values() if record.is_serving]

    def _find(self, now: float) -> list[Suspect]:
        records = sorted(self._serving(), key=lambda record: record.engine_id)
        # Hearing nobody at all is more likely this process's fault; picks then go on from the clients' ledgers.
        is_deaf = all(now - record.heard_at > SILENCE_S for record in records)
        suspects = (self._judge(record, now) for record in _without_waiting(records, now))
        return [suspect for suspect in suspects if suspect is not None and (suspect.is_hung or not is_deaf)]

    def _judge(self, record: _EngineRecord, now: float) -> Suspect | None:
        limits = self._limits(record, now)
        silent_s = now - record.heard_at
        stalled_s = now - record.progressed_at if record.has_work else 0.0
        if silent_s <= SILENCE_S and stalled_s <= limits.stall_s:
            return None
        is_hung = max(silent_s, stalled_s) > limits.hang_s
        reason = _describe(record, silent_s, stalled_s)
        return Suspect(record.engine_id, is_hung, reason, is_silent=silent_s > SILENCE_S)

    def _limits(self, record: _EngineRecord, now: float) -> _Limits:
        longest_s = record.gaps.get(now)
        hang_s = max(self._stall_timeout_s, _STEPS_TO_A_HANG * longest_s)
        return _Limits(stall_s=max(self._stall_timeout_s / 3, 2 * longest_s), hang_s=hang_s)

    def _deadlines(self, record: _EngineRecord, now: float) -> list[float]:
        limits = self._limits(record, now)
        deadlines = [record.heard_at + SILENCE_S, record.heard_at + limits.hang_s]
        if record.has_work:
            deadlines += [record.progressed_at + limits.stall_s, record.progressed_at + limits.hang_s]
        return deadlines

    def _restart_stalls(self, now: float) -> None:
        for record in self._records.values():
            record.progressed_at = now

    def _forgive_own_absence(self, now: float) -> None:
        """Take the time in which this process itself stood still out of everybody's account."""
        judged_at, self._judged_at = self._judged_at, now
        if judged_at is None or now - judged_at <= _ABSENT_S:
            return
        absent_s = now - judged_at
        for record in self._records.values():
            record.heard_at = min(now, record.heard_at + absent_s)
            record.progressed_at = min(now, record.progressed_at + absent_s)


def _without_waiting(records: list[_EngineRecord], now: float) -> list[_EngineRecord]:
    """Leave out the lockstep ranks that only wait for another: everybody stands still when one does.

    While some are silent, it is they who are waited for; else those that entered the fewest collectives.
    """
    members = [record for record in records if record.position is not None]
    late = [record for record in members if now - record.heard_at > SILENCE_S]
    if not late:
        first = min(
            (record.position for record in members if record.has_work and record.position is not None), default=None
        )
        late = [record for record in members if record.position == first]
    return [record for record in records if record.position is None or record in late]


def _who(suspects: list[Suspect]) -> list[tuple[EngineId, bool, bool]]:
    return [(suspect.engine_id, suspect.is_hung, suspect.is_silent) for suspect in suspects]


def _describe(record: _EngineRecord, silent_s: float, stalled_s: float) -> str:
    signs = [f"no step for {stalled_s:.1f} s"] if record.has_work else []
    if silent_s > SILENCE_S:
        signs.append(f"silent for {silent_s:.1f} s")
    return f"{', '.join(signs)} (behind step {record.progress.num_steps})"
