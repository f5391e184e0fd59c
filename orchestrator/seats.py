"""What the supervisor knows of every seat: plain data in, decisions out. No socket, clock or process in here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.wire.ids import EngineId
from engine.wire.messages import EnginePhase, EngineReport, Seat, SeatState, SupervisorReport
from orchestrator.launch.host import EngineExit


@dataclass(slots=True)
class SeatStatus:
    """One seat. report: the newest of its engine. exit: set once, when its host confirmed the end."""

    engine_id: EngineId
    report: EngineReport | None = None
    exit: EngineExit | None = None
    dismissed: bool = False

    @property
    def is_ready(self) -> bool:
        """Tell whether the engine has loaded and lives."""
        return self.exit is None and self.report is not None and self.report.phase is not EnginePhase.LOADING

    @property
    def state(self) -> SeatState:
        """Return the state as it is published."""
        if self.exit is not None:
            return SeatState.DEAD
        if self.dismissed:
            return SeatState.LEAVING
        return SeatState.ALIVE if self.is_ready else SeatState.STARTING

    @property
    def progress(self) -> float:
        """Return how far the engine has loaded, 0..1."""
        return 1.0 if self.is_ready else self.report.progress if self.report is not None else 0.0

    @property
    def activity(self) -> str:
        """Say in a few words what the seat is doing, or why it is dead."""
        if self.exit is not None:
            return f"dead: {self.exit.reason}"
        if self.report is None:
            return "starting"
        if self.report.phase is EnginePhase.LOADING:
            return f"loading: {self.report.detail}" if self.report.detail else "loading"
        return f"ready on {self.report.device} of {self.report.node} (pid {self.report.pid})"

    @property
    def end_reason(self) -> str:
        """Return why the engine's process ended; empty while it lives."""
        return self.exit.reason if self.exit is not None else ""

    def describe(self) -> str:
        """Say what the seat is doing, how far it is, and where."""
        if self.exit is None and self.report is not None and self.report.phase is EnginePhase.LOADING:
            return f"{self.activity}, {self.progress:.0%}, pid {self.report.pid} on {self.report.node}"
        return self.activity


class SeatTable:
    """All seats of the deployment, by EngineId."""

    def __init__(self, engine_ids: Sequence[EngineId]) -> None:
        self._seats = {engine_id: SeatStatus(engine_id) for engine_id in engine_ids}

    def __iter__(self) -> Iterator[SeatStatus]:
        return iter(self._seats.values())

    def of(self, engine_id: EngineId) -> SeatStatus:
        """Return the seat of an engine of this deployment."""
        return self._seats[engine_id]

    def on_report(self, report: EngineReport) -> SeatStatus | None:
        """Take an engine's report and return its seat; None for a stale report or one of no engine of ours."""
        seat = self._seats.get(report.engine_id)
        if seat is None or (seat.report is not None and report.report_seq <= seat.report.report_seq):
            return None
        seat.report = report
        return seat

    def on_exit(self, engine_id: EngineId, end: EngineExit) -> SeatStatus:
        """Take the confirmed end of an engine's process and return its seat."""
        seat = self._seats[engine_id]
        seat.exit = end
        return seat

    def dismiss(self) -> None:
        """Ask every engine to leave."""
        for seat in self._seats.values():
            seat.dismissed = True

    @property
    def all_ready(self) -> bool:
        """Tell whether every seat's engine can serve."""
        return all(seat.is_ready for seat in self._seats.values())

    @property
    def all_dead(self) -> bool:
        """Tell whether no engine is left."""
        return all(seat.exit is not None for seat in self._seats.values())

    def describe_unready(self) -> str:
        """Name each rank that is not ready, what it is doing and what it said last."""
        lines = [f"rank {seat.engine_id.rank}: {seat.describe()}" for seat in self._seats.values() if not seat.is_ready]
        return "; ".join(lines)

    def to_report(self, report_seq: int) -> SupervisorReport:
        """Return the whole table as it is published."""
        seats = self._seats.values()
        return SupervisorReport(
            report_seq=report_seq,
            seats=[_to_wire(seat) for seat in seats],
            dismissed=[seat.engine_id for seat in seats if seat.dismissed],
            gone_clients=[],
        )


def _to_wire(seat: SeatStatus) -> Seat:
    return Seat(
        engine_id=seat.engine_id,
        state=seat.state,
        reason=seat.end_reason,
        node=seat.report.node if seat.report is not None else "",
    )
