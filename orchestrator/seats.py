"""What the supervisor knows of every seat: plain data in, decisions out. No socket, clock or process in here."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import (
    ClusterSettings,
    EnginePhase,
    EngineReport,
    Seat,
    SeatState,
    SupervisorReport,
    Suspect,
)
from orchestrator.launch.host import EngineExit
from orchestrator.restarts import RestartRule, Restarts


@dataclass(slots=True)
class SeatHistory:
    """What outlives the engines of a seat.

    restarts: whether and when the next one starts. refills: how many did, by the kind of the end before. last_reason:
    why the last one that ended did.
    """

    restarts: Restarts
    refills: Counter[str] = field(default_factory=Counter)
    last_reason: str = ""


@dataclass(slots=True)
class SeatStatus:
    """One seat and the engine in it.

    report: the engine's newest. exit: set once, when its host confirmed the end; refill_in_s: set with it, the pause
    before the next engine, None when there will be none. suspect: what the coordinator says of it. hung: why it was
    killed by us.
    is_joining, is_draining, is_vacating, is_leaving: where a scale operation has brought it.
    """

    engine_id: EngineId
    history: SeatHistory
    report: EngineReport | None = None
    exit: EngineExit | None = None
    refill_in_s: float | None = None
    dismissed: bool = False
    suspect: Suspect | None = None
    hung: str = ""
    is_joining: bool = False
    is_draining: bool = False
    is_vacating: bool = False
    is_leaving: bool = False

    @property
    def is_temporary(self) -> bool:
        """Tell whether the seat may go with its engine: it is not filled again by itself."""
        return self.is_joining or self.is_draining or self.is_leaving or self.dismissed

    @property
    def is_empty(self) -> bool:
        """Tell whether the engine takes nothing new and has nothing left."""
        return self.report is not None and self.report.is_draining and self.num_sequences == 0

    @property
    def num_sequences(self) -> int:
        """Return how many sequences the engine has, as it said last."""
        return self.report.load.num_sequences if self.report is not None else 0

    @property
    def is_ready(self) -> bool:
        """Tell whether the engine has loaded and lives."""
        return self.exit is None and self.report is not None and self.report.phase is not EnginePhase.LOADING

    @property
    def is_lost(self) -> bool:
        """Tell whether the seat's engine is dead and no other will take its place."""
        return self.exit is not None and self.refill_in_s is None

    @property
    def state(self) -> SeatState:
        """Return the state as it is published."""
        if self.exit is not None:
            return SeatState.DEAD
        if self.dismissed or self.is_leaving:
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
    def name(self) -> str:
        """Name the engine so that a person finds it: rank, process and node."""
        where = f", pid {self.report.pid} on {self.report.node}" if self.report is not None else ""
        return f"rank {self.engine_id.rank} (engine {self.engine_id}{where})"

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
    """All seats of the deployment, by rank; each holds one engine at a time.

    refills: whether the seats of engines that end are filled again; not while the deployment starts, where an end is an
    error of the start. gone_clients: by index, the newest client whose process has ended. settings: what the operator
    wants; published with the seats.
    """

    def __init__(self, engine_ids: Sequence[EngineId], rule: RestartRule) -> None:
        self.refills = False
        self._rule = rule
        self.gone_clients: dict[int, ClientId] = {}
        self.settings = ClusterSettings()
        self._closed: dict[int, SeatStatus] = {}
        self._seats = {engine_id.rank: SeatStatus(engine_id, SeatHistory(Restarts(rule))) for engine_id in engine_ids}

    def __iter__(self) -> Iterator[SeatStatus]:
        return iter(self._seats.values())

    def at(self, rank: int) -> SeatStatus | None:
        """Return the seat of a rank, None when there is none."""
        return self._seats.get(rank)

    def of(self, engine_id: EngineId) -> SeatStatus | None:
        """Return the seat in which this engine sits, or None when it never did or does not any more."""
        seat = self._seats.get(engine_id.rank)
        return seat if seat is not None and seat.engine_id == engine_id else None

    def on_report(self, report: EngineReport, now: float) -> SeatStatus | None:
        """Take an engine's report and return its seat; None for a stale report or one of no engine of ours."""
        seat = self.of(report.engine_id)
        if seat is None or (seat.report is not None and report.report_seq <= seat.report.report_seq):
            return None
        seat.report = report
        if seat.is_ready:
            seat.history.restarts.on_serving(now)
        return seat

    def on_exit(self, engine_id: EngineId, end: EngineExit, now: float) -> SeatStatus:
        """Take the confirmed end of an engine's process; return its seat, with whether and when it is filled again."""
        seat = self.of(engine_id)
        assert seat is not None, "a seat is filled again only after the end of its engine"
        if seat.hung:
            end = replace(end, reason=f"hung: {seat.hung}, killed", was_hung=True)
        seat.exit = end
        if not seat.dismissed:
            seat.history.last_reason = end.reason
        seat.refill_in_s = seat.history.restarts.on_end(now) if self.refills and not seat.is_temporary else None
        return seat

    def on_suspects(self, suspects: Sequence[Suspect]) -> tuple[list[SeatStatus], list[SeatStatus]]:
        """Take the coordinator's suspects; return the seats of which that is news, and those whose engine hangs.

        An engine hangs once: it is killed for it, and what is said of it until it is gone is no news.
        """
        by_engine = {suspect.engine_id: suspect for suspect in suspects}
        news, hung = [], []
        for seat in self._seats.values():
            suspect = by_engine.get(seat.engine_id)
            if seat.exit is not None or seat.hung:
                continue
            if suspect is not None and suspect.is_hung:
                seat.hung = suspect.reason
                hung.append(seat)
            elif (suspect is None) != (seat.suspect is None):
                news.append(seat)
            seat.suspect = suspect
        return news, hung

    def refill(self, rank: int) -> SeatStatus:
        """Put the next engine into the seat of one that ended, and return the seat."""
        old = self._seats[rank]
        assert old.exit is not None
        old.history.refills[old.exit.kind] += 1
        engine_id = EngineId(rank, old.engine_id.incarnation + 1)
        self._seats[rank] = SeatStatus(engine_id, old.history)
        return self._seats[rank]

    def open(self, rank: int) -> SeatStatus:
        """Add a seat that is not filled again by itself. One that was closed goes on under its next incarnation."""
        assert rank not in self._seats
        closed = self._closed.pop(rank, None)
        if closed is None:
            seat = SeatStatus(EngineId(rank, 1), SeatHistory(Restarts(self._rule)), is_joining=True)
        else:
            engine_id = EngineId(rank, closed.engine_id.incarnation + 1)
            seat = SeatStatus(engine_id, closed.history, is_joining=True)
        self._seats[rank] = seat
        return seat

    def close(self, rank: int) -> None:
        """Remove a seat whose engine has ended. What it has counted, and which engines it had, is remembered."""
        seat = self._seats.pop(rank)
        assert seat.exit is not None
        self._closed[rank] = seat

    def keep(self, rank: int, now: float) -> float | None:
        """Make a seat like any other; return the pause before it is filled again if its engine ended meanwhile."""
        seat = self._seats[rank]
        seat.is_joining = seat.is_draining = seat.is_vacating = seat.is_leaving = False
        if seat.exit is not None and seat.refill_in_s is None and self.refills:
            seat.refill_in_s = seat.history.restarts.on_end(now)
            return seat.refill_in_s
        return None

    def dismiss(self) -> None:
        """Ask every engine to leave."""
        for seat in self._seats.values():
            seat.dismissed = True

    @property
    def all_ready(self) -> bool:
        """Tell whether every seat's engine can serve."""
        return all(seat.is_ready for seat in self._seats.values())

    @property
    def is_settled(self) -> bool:
        """Tell whether there is nothing to see: each engine serves or is dead, and none comes or goes."""
        return all((seat.is_ready or seat.exit is not None) and not seat.is_temporary for seat in self)

    @property
    def all_lost(self) -> bool:
        """Tell whether no engine is left and none will come."""
        return all(seat.is_lost for seat in self._seats.values())

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
            gone_clients=list(self.gone_clients.values()),
            settings=self.settings,
        )


def _to_wire(seat: SeatStatus) -> Seat:
    return Seat(
        engine_id=seat.engine_id,
        state=seat.state,
        reason=seat.end_reason,
        node=seat.report.node if seat.report is not None else "",
        restarts=dict(seat.history.refills),
        is_draining=seat.is_draining,
        is_vacating=seat.is_vacating,
        last_reason=seat.history.last_reason,
    )
