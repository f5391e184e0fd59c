"""The ranks of a deployment as one thing: started together, watched, filled again, dismissed together."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from client.tasks import log_failure
from engine.config.engine_spec import EngineSpec
from engine.wire.control import ClusterSettings
from engine.wire.curve import WireSecurity
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import EngineReport, GroupState
from lb.coordinator.config import CoordinatorEndpoints
from orchestrator.launch.host import EngineHandle, EngineHost
from orchestrator.processes.exits import ProcessExit
from orchestrator.processes.restarts import RestartRule
from orchestrator.processes.waits import wait_all
from orchestrator.ranks.coordinator_channel import CoordinatorChannel
from orchestrator.ranks.events import EventKind, EventLog
from orchestrator.ranks.progress import LineProgress, StartProgress
from orchestrator.ranks.replica_table import Replica, ReplicaTable

_LOG = logging.getLogger(__name__)

_LEAVE_S = 5.0  # dismissed engines get this long to end by themselves
_KILLED_S = 5.0  # a killed process is gone by then, or its host is

MakeSpec = Callable[[EngineId], EngineSpec]


class EngineGroup:
    """Holds the replicas, the host that runs their engines and the line on which they are published.

    replicas: written only here, on the event loop. on_death: called once per engine whose process ended, with its
    replica, whatever the reason; not for replicas that come or go with their engine, and not any more once ``stop`` has
    begun.
    events: where it is noted what happens to the ranks. group_state: the newest that was heard.

    A replica is filled again only after its host confirmed the end of the engine before: one device holds one engine.
    """

    def __init__(
        self,
        num_ranks: int,
        rule: RestartRule,
        host: EngineHost,
        progress: StartProgress,
        on_death: Callable[[Replica], None],
        events: EventLog | None = None,
        load_timeout_s: float | None = None,
    ) -> None:
        """Hold the replicas; nothing is started.

        load_timeout_s: for an engine that replaces a replica, from when its process was ordered; None: no limit.
        """
        self.replicas = ReplicaTable([EngineId(rank, 1) for rank in range(num_ranks)], rule)
        self.events = EventLog() if events is None else events
        self.group_state: GroupState | None = None
        self._host = host
        self._progress = progress
        self._on_death = on_death
        self._handles: dict[int, EngineHandle] = {}
        self._replacements: dict[int, asyncio.Task[None]] = {}
        self._load_timeout_s = load_timeout_s
        self._loads: dict[
            int, asyncio.Future[None]
        ] = {}  # of replicas being replaced, by rank; done when loaded or dead
        self._all_ready = asyncio.Event()
        self._is_stopping = False
        self._make_spec: MakeSpec | None = None
        self._watches_loads = False
        self._channel: CoordinatorChannel | None = None

    def connect(self, endpoints: CoordinatorEndpoints, security: WireSecurity | None) -> None:
        """Open the line to the coordinator and publish the replicas from now on."""
        self._channel = CoordinatorChannel(
            endpoints.report_endpoint,
            endpoints.state_endpoint,
            self.replicas.to_report,
            self._on_report,
            self.on_group_state,
            security,
        )
        self._channel.publish()

    async def start(self, make_spec: MakeSpec) -> None:
        """Start one engine per replica."""
        self._make_spec = make_spec
        for replica in self.replicas:
            await self._fill(replica)

    async def wait_ready(self) -> None:
        """Wait until every engine has loaded."""
        await self._all_ready.wait()

    def start_replacing(self) -> None:
        """From now on an engine that ends gets a successor, as far as the rule allows."""
        self.replicas.replacements = True
        self._progress = LineProgress()  # what drew the start is gone

    def on_client_gone(self, client_id: ClientId) -> None:
        """Publish that a client's process has ended, so that the engines free what it had in flight."""
        self.replicas.gone_clients[client_id.index] = client_id
        self._publish()

    def publish_settings(self, settings: ClusterSettings) -> None:
        """Publish what the operator wants."""
        self.replicas.settings = settings
        self._publish()

    def on_group_state(self, state: GroupState) -> None:
        """Take a newer state of the group: say who is suspect, and end what hangs."""
        self.group_state = state
        if self._is_stopping or not self.replicas.replacements:
            return
        news, hung = self.replicas.on_suspects(state.suspects)
        for replica in news:
            if replica.suspect is not None:
                _LOG.warning("%s gets no new requests: %s", replica.name, replica.suspect.reason)
                self._note(EventKind.RANK_SUSPECT, replica, reason=replica.suspect.reason)
            else:
                _LOG.info("%s is heard and makes progress again", replica.name)
                self._note(EventKind.RANK_RECOVERED, replica)
        for replica in self.replicas:
            self._give_up_if_lost(replica)
        for replica in hung:
            self._kill_hung(replica)

    # --- what a scale operation orders -------------------------------------------------------------------------------

    def add_replica(self, rank: int) -> None:
        """Start an engine for a new rank. Should it end, the replica stays empty until it is closed or kept."""
        replica = self.replicas.open(rank)
        self._note(EventKind.RANK_JOINING, replica)
        self._publish()
        self._listen_as_needed()
        self._begin_filling(rank, self._fill_or_say_why(replica))

    def cordon(self, rank: int) -> None:
        """Let a rank get nothing new, and its replica stay empty should its engine end."""
        replica = self._replica(rank)
        replica.is_draining = True
        if replica.replacement_in_s is not None:
            self._replacements[rank].cancel()
            replica.replacement_in_s = None
        self._publish()
        self._listen_as_needed()

    def migrate(self, rank: int) -> None:
        """Let everything a rank has go on elsewhere."""
        self._replica(rank).is_migrating = True
        self._publish()

    def leave(self, rank: int) -> None:
        """Let the group go on without a rank."""
        self._replica(rank).is_leaving = True
        self._publish()

    def dismiss(self, rank: int) -> None:
        """Ask the engine of a rank to end."""
        self._replica(rank).dismissed = True
        self._publish()

    def kill(self, rank: int) -> None:
        """End the engine of a rank at once, also while it is being started."""
        replica = self._replica(rank)
        handle = self._handles.get(rank)
        if handle is not None and handle.engine_id == replica.engine_id:
            self._host.kill(replica.engine_id)
        elif replica.exit is None:
            self._replacements[rank].cancel()
            self._on_end(replica.engine_id, ProcessExit(None, "given up while it was started"))

    def keep_replica(self, rank: int) -> None:
        """Make the replica of a rank like any other, and fill it again if its engine ended meanwhile."""
        pause_s = self.replicas.keep(rank, asyncio.get_running_loop().time())
        self._publish()
        self._listen_as_needed()
        if pause_s is not None:
            self._schedule_replacement(rank, pause_s)

    def remove_replica(self, rank: int) -> None:
        """Remove the replica of a rank whose engine has ended, if it has one."""
        replica = self.replicas.at(rank)
        if replica is None:
            return
        self.replicas.close(rank)
        self._handles.pop(rank, None)
        self._replacements.pop(rank, None)
        self._note(EventKind.RANK_LEFT, replica, reason=replica.end_reason)
        self._publish()
        self._listen_as_needed()

    # --- the end of the deployment ------------------------------------------------------------------------------------

    async def stop(self, force_stop: "asyncio.Future[Any]") -> list[str]:
        """Dismiss the engines that serve, kill those that do not leave, and return one line for each of these.

        force_stop: once it is done, nobody is waited for any more.
        """
        self._is_stopping = True
        await self._stop_replacements()
        self.replicas.dismiss()
        self._publish()
        # An engine that has not loaded holds nothing of anybody's: no reason to wait for it.
        ready = {replica.engine_id for replica in self.replicas if replica.is_ready}
        loaded = [handle.exited for handle in self._handles.values() if handle.engine_id in ready]
        await wait_all(loaded, _LEAVE_S, force_stop)
        leftovers = await self._kill_rest()
        if self._channel is not None:
            self._channel.close()
        return leftovers

    async def _fill(self, replica: Replica) -> None:
        assert self._make_spec is not None
        spec = msgspec.structs.replace(self._make_spec(replica.engine_id), is_joining=replica.is_joining)
        handle = await self._host.start(spec)
        self._handles[replica.engine_id.rank] = handle
        handle.exited.add_done_callback(partial(self._on_exit, replica.engine_id))
        handle.out_of_reach.add_done_callback(lambda _: self._on_out_of_reach(replica))

    async def _replace(self, rank: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        replica = self.replicas.replace(rank)
        self._note(EventKind.RANK_REPLACEMENT, replica)
        self._publish()
        self._listen_as_needed()
        load = self._loads[rank] = asyncio.get_running_loop().create_future()
        await self._fill_or_say_why(replica)
        await asyncio.wait([load], timeout=self._load_timeout_s)
        if not load.done():
            replica.hung = f"not loaded within {self._load_timeout_s:g} s (--start-timeout)"
            self._kill_hung(replica)

    async def _fill_or_say_why(self, replica: Replica) -> None:
        try:
            await self._fill(replica)
        except Exception as error:  # noqa: BLE001 - whatever a host raises, the replica is not filled and says why
            self._on_end(replica.engine_id, ProcessExit(None, f"could not be started: {error}"))

    async def _stop_replacements(self) -> None:
        tasks = list(self._replacements.values())
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
        if self._channel is not None:
            self._channel.publish()

    def _on_report(self, report: EngineReport) -> None:
        was_ready = {replica.engine_id for replica in self.replicas if replica.is_ready}
        replica = self.replicas.on_report(report, asyncio.get_running_loop().time())
        if replica is None:
            return
        if replica.engine_id in was_ready:
            return
        self._progress.show(replica)
        if replica.is_ready:
            self._end_load(replica.engine_id.rank)
            self._note(EventKind.RANK_READY, replica)
            self._publish()
            self._listen_as_needed()
        if self.replicas.all_ready:
            self._all_ready.set()

    def _on_out_of_reach(self, replica: Replica) -> None:
        _LOG.warning("%s: its host does not answer; its reports say whether it goes on", replica.name)
        self._give_up_if_lost(replica)

    def _give_up_if_lost(self, replica: Replica) -> None:
        """End an engine that neither reports nor can be asked after: the stall limit is for hosts that answer."""
        handle = self._handles.get(replica.engine_id.rank)
        if handle is None or handle.engine_id != replica.engine_id or not handle.out_of_reach.done():
            return
        if replica.exit is None and replica.suspect is not None and replica.suspect.is_silent:
            self._host.kill(replica.engine_id)

    def watch_loads(self, *, wanted: bool) -> None:
        """Hear every report of every engine, or only those of replicas that are not settled, which costs less."""
        self._watches_loads = wanted
        self._listen_as_needed()

    def _listen_as_needed(self) -> None:
        if self._channel is not None:
            self._channel.listen(self._watches_loads or not self.replicas.is_settled)

    def _on_exit(self, engine_id: EngineId, exited: "asyncio.Future[ProcessExit]") -> None:
        self._on_end(engine_id, exited.result())

    def _on_end(self, engine_id: EngineId, end: ProcessExit) -> None:
        replica = self.replicas.on_exit(engine_id, end, asyncio.get_running_loop().time())
        self._end_load(engine_id.rank)
        if self._is_stopping:
            return
        self._publish()
        self._listen_as_needed()
        if not replica.dismissed:
            self._note(
                EventKind.RANK_DEAD, replica, reason=replica.end_reason, replacement_in_s=replica.replacement_in_s
            )
        if replica.is_temporary:
            _LOG.info("%s has ended: %s", replica.name, replica.end_reason)
            return
        self._on_death(replica)
        if replica.replacement_in_s is not None:
            self._schedule_replacement(engine_id.rank, replica.replacement_in_s)

    def _end_load(self, rank: int) -> None:
        load = self._loads.pop(rank, None)
        if load is not None:
            load.set_result(None)

    def _kill_hung(self, replica: Replica) -> None:
        _LOG.error("%s is hung: %s; killing it", replica.name, replica.hung)
        self._note(EventKind.RANK_HUNG, replica, reason=replica.hung)
        self._host.kill(replica.engine_id)

    def _schedule_replacement(self, rank: int, pause_s: float) -> None:
        self._begin_filling(rank, self._replace(rank, pause_s))

    def _replica(self, rank: int) -> Replica:
        replica = self.replicas.at(rank)
        assert replica is not None, "actions are for ranks there are"
        return replica

    def _note(self, kind: EventKind, replica: Replica, **facts: Any) -> None:
        self.events.add(kind, rank=replica.engine_id.rank, engine_id=str(replica.engine_id), **facts)

    def _begin_filling(self, rank: int, filling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(filling, name=f"replace the engine of rank {rank}")
        self._replacements[rank] = task
        task.add_done_callback(log_failure)
