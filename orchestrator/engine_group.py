"""The ranks of a deployment as one thing: started together, watched, filled again, dismissed together."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from client.tasks import log_failure
from engine.config import EngineSpec
from engine.wire.curve import WireSecurity
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import ClusterSettings, EngineReport, GroupState
from orchestrator.coordinator_keeper import BoundEndpoints
from orchestrator.events import EventKind, EventLog
from orchestrator.group_line import GroupLine
from orchestrator.launch.host import EngineExit, EngineHandle, EngineHost
from orchestrator.launch.waits import wait_all
from orchestrator.progress import LineProgress, StartProgress
from orchestrator.restarts import RestartRule
from orchestrator.seats import SeatStatus, SeatTable

_LOG = logging.getLogger(__name__)

_LEAVE_S = 5.0  # dismissed engines get this long to end by themselves
_KILLED_S = 5.0  # a killed process is gone by then, or its host is

MakeSpec = Callable[[EngineId], EngineSpec]


class EngineGroup:
    """Holds the seats, the host that runs their engines and the line on which they are published.

    seats: written only here, on the event loop. on_death: called once per engine whose process ended, with its seat,
    whatever the reason; not for seats that come or go with their engine, and not any more once ``stop`` has begun.
    events: where it is noted what happens to the ranks. group_state: the newest that was heard.

    A seat is filled again only after its host confirmed the end of the engine before: one device holds one engine.
    """

    def __init__(
        self,
        num_ranks: int,
        rule: RestartRule,
        host: EngineHost,
        progress: StartProgress,
        on_death: Callable[[SeatStatus], None],
        events: EventLog | None = None,
        load_timeout_s: float | None = None,
    ) -> None:
        """Hold the seats; nothing is started.

        load_timeout_s: for an engine that refills a seat, from when its process was ordered; None: no limit.
        """
        self.seats = SeatTable([EngineId(rank, 1) for rank in range(num_ranks)], rule)
        self.events = EventLog() if events is None else events
        self.group_state: GroupState | None = None
        self._host = host
        self._progress = progress
        self._on_death = on_death
        self._handles: dict[int, EngineHandle] = {}
        self._refills: dict[int, asyncio.Task[None]] = {}
        self._load_timeout_s = load_timeout_s
        self._loads: dict[int, asyncio.Future[None]] = {}  # of seats being refilled, by rank; done when loaded or dead
        self._all_ready = asyncio.Event()
        self._is_stopping = False
        self._make_spec: MakeSpec | None = None
        self._watches_loads = False
        self._line: GroupLine | None = None

    def connect(self, endpoints: BoundEndpoints, security: WireSecurity | None) -> None:
        """Open the line to the coordinator and publish the seats from now on."""
        self._line = GroupLine(
            endpoints.report_endpoint,
            endpoints.state_endpoint,
            self.seats.to_report,
            self._on_report,
            self.on_group_state,
            security,
        )
        self._line.publish()

    async def start(self, make_spec: MakeSpec) -> None:
        """Order one engine per seat."""
        self._make_spec = make_spec
        for seat in self.seats:
            await self._fill(seat)

    async def wait_ready(self) -> None:
        """Wait until every engine has loaded."""
        await self._all_ready.wait()

    def keep_filled(self) -> None:
        """From now on an engine that ends gets a successor, as far as the rule allows."""
        self.seats.refills = True
        self._progress = LineProgress()  # what drew the start is gone

    def on_client_gone(self, client_id: ClientId) -> None:
        """Publish that a client's process has ended, so that the engines free what it had in flight."""
        self.seats.gone_clients[client_id.index] = client_id
        self._publish()

    def publish_settings(self, settings: ClusterSettings) -> None:
        """Publish what the operator wants."""
        self.seats.settings = settings
        self._publish()

    def on_group_state(self, state: GroupState) -> None:
        """Take a newer state of the group: say who is suspect, and end what hangs."""
        self.group_state = state
        if self._is_stopping or not self.seats.refills:
            return
        news, hung = self.seats.on_suspects(state.suspects)
        for seat in news:
            if seat.suspect is not None:
                _LOG.warning("%s gets no new requests: %s", seat.name, seat.suspect.reason)
                self._note(EventKind.RANK_SUSPECT, seat, reason=seat.suspect.reason)
            else:
                _LOG.info("%s is heard and makes progress again", seat.name)
                self._note(EventKind.RANK_RECOVERED, seat)
        for seat in self.seats:
            self._give_up_if_lost(seat)
        for seat in hung:
            self._kill_hung(seat)

    # --- what a scale operation orders -------------------------------------------------------------------------------

    def open_seat(self, rank: int) -> None:
        """Start an engine for a new rank. Should it end, the seat stays empty until it is closed or kept."""
        seat = self.seats.open(rank)
        self._note(EventKind.RANK_JOINING, seat)
        self._publish()
        self._listen_as_needed()
        self._begin_filling(rank, self._fill_or_say_why(seat))

    def cordon(self, rank: int) -> None:
        """Let a rank get nothing new, and its seat stay empty should its engine end."""
        seat = self._seat(rank)
        seat.is_draining = True
        if seat.refill_in_s is not None:
            self._refills[rank].cancel()
            seat.refill_in_s = None
        self._publish()
        self._listen_as_needed()

    def vacate(self, rank: int) -> None:
        """Let everything a rank has go on elsewhere."""
        self._seat(rank).is_vacating = True
        self._publish()

    def leave(self, rank: int) -> None:
        """Let the group go on without a rank."""
        self._seat(rank).is_leaving = True
        self._publish()

    def dismiss(self, rank: int) -> None:
        """Ask the engine of a rank to end."""
        self._seat(rank).dismissed = True
        self._publish()

    def kill(self, rank: int) -> None:
        """End the engine of a rank at once, also while it is being started."""
        seat = self._seat(rank)
        handle = self._handles.get(rank)
        if handle is not None and handle.engine_id == seat.engine_id:
            self._host.kill(seat.engine_id)
        elif seat.exit is None:
            self._refills[rank].cancel()
            self._on_end(seat.engine_id, EngineExit(None, "given up while it was started"))

    def keep_seat(self, rank: int) -> None:
        """Make the seat of a rank like any other, and fill it again if its engine ended meanwhile."""
        pause_s = self.seats.keep(rank, asyncio.get_running_loop().time())
        self._publish()
        self._listen_as_needed()
        if pause_s is not None:
            self._order_refill(rank, pause_s)

    def close_seat(self, rank: int) -> None:
        """Remove the seat of a rank whose engine has ended, if it has one."""
        seat = self.seats.at(rank)
        if seat is None:
            return
        self.seats.close(rank)
        self._handles.pop(rank, None)
        self._refills.pop(rank, None)
        self._note(EventKind.RANK_LEFT, seat, reason=seat.end_reason)
        self._publish()
        self._listen_as_needed()

    # --- the end of the deployment ------------------------------------------------------------------------------------

    async def stop(self, hurry: "asyncio.Future[Any]") -> list[str]:
        """Dismiss the engines that serve, kill those that do not leave, and return one line for each of these.

        hurry: once it is done, nobody is waited for any more.
        """
        self._is_stopping = True
        await self._stop_refills()
        self.seats.dismiss()
        self._publish()
        # An engine that has not loaded holds nothing of anybody's: no reason to wait for it.
        ready = {seat.engine_id for seat in self.seats if seat.is_ready}
        loaded = [handle.exited for handle in self._handles.values() if handle.engine_id in ready]
        await wait_all(loaded, _LEAVE_S, hurry)
        remarks = await self._kill_rest()
        if self._line is not None:
            self._line.close()
        return remarks

    async def _fill(self, seat: SeatStatus) -> None:
        assert self._make_spec is not None
        spec = msgspec.structs.replace(self._make_spec(seat.engine_id), is_joining=seat.is_joining)
        handle = await self._host.start(spec)
        self._handles[seat.engine_id.rank] = handle
        handle.exited.add_done_callback(partial(self._on_exit, seat.engine_id))
        handle.out_of_reach.add_done_callback(lambda _: self._on_out_of_reach(seat))

    async def _refill(self, rank: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        seat = self.seats.refill(rank)
        self._note(EventKind.RANK_REFILL, seat)
        self._publish()
        self._listen_as_needed()
        load = self._loads[rank] = asyncio.get_running_loop().create_future()
        await self._fill_or_say_why(seat)
        await asyncio.wait([load], timeout=self._load_timeout_s)
        if not load.done():
            seat.hung = f"not loaded within {self._load_timeout_s:g} s (--start-timeout)"
            self._kill_hung(seat)

    async def _fill_or_say_why(self, seat: SeatStatus) -> None:
        try:
            await self._fill(seat)
        except Exception as error:  # noqa: BLE001 - whatever a host raises, the seat is not filled and says why
            self._on_end(seat.engine_id, EngineExit(None, f"could not be started: {error}"))

    async def _stop_refills(self) -> None:
        tasks = list(self._refills.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _kill_rest(self) -> list[str]:
        rest = [handle for handle in self._handles.values() if not handle.exited.done()]
        for handle in rest:
            self._host.kill(handle.engine_id)
        await wait_all([handle.exited for handle in rest], _KILLED_S)
        return [
            f"rank {handle.engine_id.rank} {'was' if handle.exited.done() else 'could not be'} killed"
            for handle in rest
        ]

    def _publish(self) -> None:
        if self._line is not None:
            self._line.publish()

    def _on_report(self, report: EngineReport) -> None:
        was_ready = {seat.engine_id for seat in self.seats if seat.is_ready}
        seat = self.seats.on_report(report, asyncio.get_running_loop().time())
        if seat is None:
            return
        if seat.engine_id in was_ready:
            return
        self._progress.show(seat)
        if seat.is_ready:
            self._end_load(seat.engine_id.rank)
            self._note(EventKind.RANK_READY, seat)
            self._publish()
            self._listen_as_needed()
        if self.seats.all_ready:
            self._all_ready.set()

    def _on_out_of_reach(self, seat: SeatStatus) -> None:
        _LOG.warning("%s: its host does not answer; its reports say whether it goes on", seat.name)
        self._give_up_if_lost(seat)

    def _give_up_if_lost(self, seat: SeatStatus) -> None:
        """End an engine that neither reports nor can be asked after: the stall limit is for hosts that answer."""
        handle = self._handles.get(seat.engine_id.rank)
        if handle is None or handle.engine_id != seat.engine_id or not handle.out_of_reach.done():
            return
        if seat.exit is None and seat.suspect is not None and seat.suspect.is_silent:
            self._host.kill(seat.engine_id)

    def watch_loads(self, *, wanted: bool) -> None:
        """Hear every report of every engine, or only those of seats that are not settled, which costs less."""
        self._watches_loads = wanted
        self._listen_as_needed()

    def _listen_as_needed(self) -> None:
        if self._line is not None:
            self._line.listen(self._watches_loads or not self.seats.is_settled)

    def _on_exit(self, engine_id: EngineId, exited: "asyncio.Future[EngineExit]") -> None:
        self._on_end(engine_id, exited.result())

    def _on_end(self, engine_id: EngineId, end: EngineExit) -> None:
        seat = self.seats.on_exit(engine_id, end, asyncio.get_running_loop().time())
        self._end_load(engine_id.rank)
        if self._is_stopping:
            return
        self._publish()
        self._listen_as_needed()
        if not seat.dismissed:
            self._note(EventKind.RANK_DEAD, seat, reason=seat.end_reason, refill_in_s=seat.refill_in_s)
        if seat.is_temporary:
            _LOG.info("%s has ended: %s", seat.name, seat.end_reason)
            return
        self._on_death(seat)
        if seat.refill_in_s is not None:
            self._order_refill(engine_id.rank, seat.refill_in_s)

    def _end_load(self, rank: int) -> None:
        load = self._loads.pop(rank, None)
        if load is not None:
            load.set_result(None)

    def _kill_hung(self, seat: SeatStatus) -> None:
        _LOG.error("%s is hung: %s; killing it", seat.name, seat.hung)
        self._note(EventKind.RANK_HUNG, seat, reason=seat.hung)
        self._host.kill(seat.engine_id)

    def _order_refill(self, rank: int, pause_s: float) -> None:
        self._begin_filling(rank, self._refill(rank, pause_s))

    def _seat(self, rank: int) -> SeatStatus:
        seat = self.seats.at(rank)
        assert seat is not None, "orders are for ranks that have a seat"
        return seat

    def _note(self, kind: EventKind, seat: SeatStatus, **facts: Any) -> None:
        self.events.add(kind, rank=seat.engine_id.rank, engine_id=str(seat.engine_id), **facts)

    def _begin_filling(self, rank: int, filling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(filling, name=f"fill the seat of rank {rank}")
        self._refills[rank] = task
        task.add_done_callback(log_failure)
