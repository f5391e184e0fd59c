"""The engines of a deployment as one group: started together, watched, replaced when they end, dismissed together.

Composed of three parts: the table of replicas, which decides (``replica_table.py``); the launcher, which runs engines
on their host (``engine_launcher.py``); and the publisher, through which everybody else sees the table
(``publisher.py``). What a scale operation does to ranks is in ``replica_actions.py``.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from engine.wire.control import ClusterSettings
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import EngineReport, GroupState
from orchestrator.launch.host import EngineHost
from orchestrator.processes.exits import ProcessExit
from orchestrator.ranks.engine_launcher import EngineLauncher, MakeSpec
from orchestrator.ranks.events import EventKind
from orchestrator.ranks.progress import LineProgress, StartProgress
from orchestrator.ranks.publisher import Connect, ReplicaPublisher
from orchestrator.ranks.replica_actions import ReplicaActions
from orchestrator.ranks.replica_table import Replica, ReplicaTable

_LOG = logging.getLogger(__name__)


class EngineGroup:
    """Keeps table, engines and published state in agreement: what happens to an engine is entered, published, acted on.

    replicas: written only here and by ``actions``, on the event loop. actions: what a scale operation can do to a rank.
    events: what happened to the ranks. group_state: the newest that was received.
    """

    def __init__(
        self,
        replicas: ReplicaTable,
        host: EngineHost,
        make_spec: MakeSpec,
        connect: Connect,
        progress: StartProgress,
        on_death: Callable[[Replica], None],
        load_timeout_s: float | None = None,
    ) -> None:
        """Connect to the coordinator; no engine is started yet.

        on_death: called once per engine whose process ended, with its replica, whatever the reason; not for replicas
        that come or go by a scale operation, and not any more once ``stop`` has begun.
        load_timeout_s: for an engine that is a replacement, from when its process was ordered; None: no limit.
        """
        self.replicas = replicas
        self.group_state: GroupState | None = None
        self._progress = progress
        self._on_death = on_death
        self._all_ready = asyncio.Event()
        self._is_stopping = False
        self._launcher = EngineLauncher(
            host,
            make_spec,
            next_replica=self._next_replica,
            on_end=self._on_end,
            on_out_of_reach=self._on_out_of_reach,
            on_hung=self._on_hung,
            load_timeout_s=load_timeout_s,
        )
        channel = connect(replicas.to_report, self.on_report, self.on_group_state)
        self._publisher = ReplicaPublisher(replicas, channel)
        self.events = self._publisher.events
        self.actions = ReplicaActions(replicas, self._launcher, self._publisher)

    # --- start and stop -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Publish the replicas from now on, and start one engine in each.

        Raises:
            Exception: whatever the host raises.
        """
        self._publisher.publish()
        for replica in self.replicas:
            await self._launcher.start(replica)

    async def wait_ready(self) -> None:
        """Wait until every engine has loaded."""
        await self._all_ready.wait()

    def start_replacing(self) -> None:
        """Give an engine that ends a successor from now on, as far as the restart rule allows."""
        self.replicas.replacements = True
        self._progress = LineProgress()  # the bars of the start are gone from the screen

    async def stop(self, force_stop: "asyncio.Future[Any]") -> list[str]:
        """Dismiss the engines that serve, kill those that do not end, and return one line for each of these.

        force_stop: once it is done, none is waited for any more.
        """
        self._is_stopping = True
        # In this order: no new engine may be ordered behind the dismissal of the old ones.
        await self._launcher.stop_starting()
        self.replicas.dismiss()
        self._publisher.publish()
        loaded = {replica.engine_id for replica in self.replicas if replica.is_ready}
        leftovers = await self._launcher.stop(loaded, force_stop)
        self._publisher.close()
        return leftovers

    # --- what is published besides ------------------------------------------------------------------------------------

    def on_client_gone(self, client_id: ClientId) -> None:
        """Publish that a client's process has ended, so that the engines free what it had in flight."""
        self.replicas.gone_clients[client_id.index] = client_id
        self._publisher.publish()

    def publish_settings(self, settings: ClusterSettings) -> None:
        """Publish the desired state of the deployment."""
        self.replicas.settings = settings
        self._publisher.publish()

    def watch_loads(self, *, wanted: bool) -> None:
        """Receive every report of every engine, or only those of replicas that change, which costs less."""
        self._publisher.watch_loads(wanted=wanted)

    # --- what happens to engines --------------------------------------------------------------------------------------

    def on_report(self, report: EngineReport) -> None:
        """Take a report of an engine."""
        # Most reports come from engines that are long ready, and change nothing here.
        before = self.replicas.of(report.engine_id)
        was_ready = before is not None and before.is_ready
        replica = self.replicas.on_report(report, _now())
        if replica is None or was_ready:
            return
        self._progress.show(replica)
        if replica.is_ready:
            self._launcher.on_loaded(replica.engine_id.rank)
            self._publisher.note(EventKind.RANK_READY, replica)
            self._publisher.publish()
        if self.replicas.all_ready:
            self._all_ready.set()

    def on_group_state(self, state: GroupState) -> None:
        """Take a newer state of the group: log which engines are suspect, and kill those that hang."""
        self.group_state = state
        if self._is_stopping or not self.replicas.replacements:
            return
        changed, hung = self.replicas.on_suspects(state.suspects)
        for replica in changed:
            self._note_suspicion(replica)
        for replica in self.replicas:
            self._kill_if_lost(replica)
        for replica in hung:
            self._kill_hung(replica)

    def _on_end(self, engine_id: EngineId, end: ProcessExit) -> None:
        replica = self.replicas.on_exit(engine_id, end, _now())
        if self._is_stopping:
            return
        # Published before the next engine is ordered: a client that sees the successor has seen the death.
        self._publisher.publish()
        if not replica.dismissed:
            self._publisher.note(
                EventKind.RANK_DEAD, replica, reason=replica.end_reason, replacement_in_s=replica.replacement_in_s
            )
        # The scale operation sees the end in the table, and decides what follows.
        if replica.is_temporary:
            _LOG.info("%s has ended: %s", replica.name, replica.end_reason)
            return
        self._on_death(replica)
        if replica.replacement_in_s is not None:
            self._launcher.replace_later(engine_id.rank, replica.replacement_in_s)

    def _next_replica(self, rank: int) -> Replica:
        replica = self.replicas.replace(rank)
        self._publisher.note(EventKind.RANK_REPLACEMENT, replica)
        self._publisher.publish()
        return replica

    def _on_hung(self, replica: Replica, reason: str) -> None:
        replica.hung = reason
        self._kill_hung(replica)

    def _kill_hung(self, replica: Replica) -> None:
        _LOG.error("%s is hung: %s; killing it", replica.name, replica.hung)
        self._publisher.note(EventKind.RANK_HUNG, replica, reason=replica.hung)
        self._launcher.kill(replica)

    def _on_out_of_reach(self, replica: Replica) -> None:
        _LOG.warning("%s: its host does not answer; its reports say whether it goes on", replica.name)
        self._kill_if_lost(replica)

    def _kill_if_lost(self, replica: Replica) -> None:
        # Without reports and without a host that answers, nothing can prove it alive. The stall limit is for engines
        # whose host answers, and would confirm their end.
        is_silent = replica.suspect is not None and replica.suspect.is_silent
        if is_silent and replica.exit is None and self._launcher.is_out_of_reach(replica):
            self._launcher.kill(replica)

    def _note_suspicion(self, replica: Replica) -> None:
        if replica.suspect is not None:
            _LOG.warning("%s gets no new requests: %s", replica.name, replica.suspect.reason)
            self._publisher.note(EventKind.RANK_SUSPECT, replica, reason=replica.suspect.reason)
        else:
            _LOG.info("%s is heard and makes progress again", replica.name)
            self._publisher.note(EventKind.RANK_RECOVERED, replica)


def _now() -> float:
    return asyncio.get_running_loop().time()
