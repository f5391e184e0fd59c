"""The client of a data-parallel group: it also hears the coordinator's state channel."""

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

from client.async_mp_client import AsyncMPClient
from client.config import ClientConfig
from client.engine_connection import EngineConnection
from client.inbox import Death
from client.mailbox import Mailbox
from client.tasks import loop_is_running, whenever_filled
from engine.wire.codec import state_decoder
from engine.wire.control import ClusterSettings
from engine.wire.errors import MalformedMessageError
from engine.wire.ids import EngineId
from engine.wire.messages import EngineReport, GroupState, LoadSnapshot
from engine.wire.replicas import ReplicaInfo, replicas_by_rank
from engine.wire.sockets import AsyncReceiver
from engine.wire.states import EnginePhase, ReplicaState
from engine.wire.tensors import Frames
from lb.views.group_view import GroupView, view_group
from lb.views.totals import RankTotals

_log = logging.getLogger(__name__)

SNAPSHOT_STALE_S = 3.0
"""Snapshots come at least once a second; after three missing ones the client's own counts are worth more."""


class DPAsyncMPClient(AsyncMPClient):
    """Follows membership, deaths and loads as the coordinator publishes them.

    current_wave: number of the running period of a lockstep group, as far as this client has heard or wished; 0 for
        independent ranks.
    lb_engines: the engines of the committed membership, in the order of their ranks.
    num_clients: live clients of the deployment, this one included.
    settings: the newest that the operator wants. on_settings: told when they change; must not raise.
    eep_scaling_cache: the last notification about an elastic change, of the engine that each rank had last.

    A GroupState or LoadSnapshot counts when its (generation, seq) is above the last one's, so loss, repetition and a
    restarted coordinator need no other rule. Silence of the coordinator changes nothing but the age of what is known.
    """

    def __init__(self, config: ClientConfig, totals: RankTotals | None = None) -> None:
        """Begin. totals: what keeps the counters of the ranks; default: one that ends with this client."""
        super().__init__(config)
        self.current_wave = 0
        self.lb_engines: list[EngineId] = []
        self.num_clients = 1
        self.settings = ClusterSettings()
        self.on_settings: Callable[[ClusterSettings], None] | None = None
        self.eep_scaling_cache: dict[EngineId, Any] = {}
        self._replicas: dict[int, ReplicaInfo] = {}
        self._dismissed: frozenset[EngineId] = frozenset()
        self._suspects: dict[EngineId, str] = {}
        self._reports: dict[EngineId, EngineReport] = {}
        self._group_state: GroupState | None = None
        self._totals = RankTotals() if totals is None else totals
        self._group_order = (-1, -1)
        self._snapshot_order = (-1, -1)
        self._snapshot_at: float | None = None
        self._state_decoder = state_decoder()
        self._states: Mailbox[Frames] = Mailbox()
        self._state_receiver: AsyncReceiver | None = None
        if loop_is_running():
            self._ensure_stats_update_task()

    def snapshot_age_s(self) -> float | None:
        """Return seconds since the last LoadSnapshot came; None before the first."""
        return None if self._snapshot_at is None else time.monotonic() - self._snapshot_at

    def group_view(self) -> GroupView | None:
        """Return what is known of the lockstep group; None for independent ranks."""
        return view_group(self._group_state)

    def _wake_idle_group(self) -> None:
        """Wish for the next wave behind a request that was sent while all members of a lockstep group were idle.

        The engine that got it says so too, one hop later; so a request that is lost, or made for nothing, does no harm,
        and it is made once for each wave.
        """
        reports = [self._reports.get(member) for member in self.lb_engines]
        if any(r is None or r.member is None or r.phase is not EnginePhase.IDLE for r in reports) or not reports:
            return
        if all(report is not None and report.wave == self.current_wave for report in reports):
            self.current_wave += 1
            self._announce(wave_wanted=self.current_wave)

    async def eep_process_engine_core_notification(self, engine_id: EngineId, notification: Any) -> None:
        """Note what an engine says about an elastic change. A projection for observers; nothing waits on it."""
        _log.info("engine %s: %s", engine_id, notification)
        others = {known: said for known, said in self.eep_scaling_cache.items() if known.rank != engine_id.rank}
        self.eep_scaling_cache = others | {engine_id: notification}

    def _ensure_tasks(self) -> None:
        super()._ensure_tasks()
        self._ensure_stats_update_task()

    def _ensure_stats_update_task(self) -> None:
        """Start to follow the state channel, once."""
        if self._state_receiver is None:
            self._state_receiver = self._resources.receive(self._resources.states, self._states.put)
            follow = whenever_filled(weakref.ref(self), self._states, lambda client: client._on_states())
            self._start_task("state", follow)

    def _on_states(self) -> None:
        for frames in self._states.drain():
            self._on_state_frames(frames)

    def _on_state_frames(self, frames: Frames) -> None:
        try:
            state = self._state_decoder.decode_frames(frames[1:])
        except MalformedMessageError as error:
            self._drop_counter.drop("malformed_states", "the state channel", str(error))
            return
        order = (state.generation, state.seq)
        if isinstance(state, GroupState):
            if order > self._group_order:
                self._group_order = order
                self._on_group_state(state)
        elif order > self._snapshot_order:
            self._snapshot_order = order
            self._on_load_snapshot(state)

    def _on_group_state(self, state: GroupState) -> None:
        self._group_state = state
        self.current_wave = state.wave_started
        self.lb_engines = sorted(state.committed.members)
        self.num_clients = max(1, len(state.clients))
        if state.settings.seq > self.settings.seq:  # a coordinator that has just restarted may not know them yet
            self.settings = state.settings
            if self.on_settings is not None:
                self.on_settings(state.settings)
        self._replicas = replicas_by_rank(state.replicas)
        self._dismissed = frozenset(state.dismissed)
        self._suspects = {suspect.engine_id: suspect.reason for suspect in state.suspects}
        for engine_id, reason in self._deaths():
            self._inbox.put(Death(engine_id, reason))
        for connection in self._connections.values():
            self._update_status(connection)
        self._pending.engines_changed.set()

    def _deaths(self) -> list[tuple[EngineId, str]]:
        """Return engines that the supervisor's hosts saw end, whether or not they ever shook hands with this client."""
        deaths = [
            (replica.engine_id, replica.reason or "its process ended")
            for replica in self._replicas.values()
            if replica.state is ReplicaState.DEAD
        ]
        for engine_id in self._connections:
            replica = self._replicas.get(engine_id.rank)
            if replica is not None and replica.engine_id.incarnation > engine_id.incarnation:
                deaths.append((engine_id, f"{replica.engine_id} replaced it"))
            elif replica is None and self._replicas:  # no replicas at all: the supervisor was not heard yet
                deaths.append((engine_id, "its replica was removed"))
        return [(engine_id, reason) for engine_id, reason in deaths if engine_id not in self._gone]

    def _on_unknown_engine_died(self, engine_id: EngineId, reason: str) -> None:
        """Let ``wait_ready`` look again; in a group, the death of an engine never spoken to ends nothing."""
        self._pending.engines_changed.set()

    def _update_status(self, connection: EngineConnection) -> None:
        """Write on a line what the newest state says of its engine."""
        connection.leaving = self._is_leaving(connection.engine_id)
        connection.dismissed = connection.dismissed or connection.engine_id in self._dismissed
        connection.cordoned = connection.engine_id.rank in self.settings.cordoned
        connection.suspect = connection.engine_id in self._suspects

    def _is_leaving(self, engine_id: EngineId) -> bool:
        replica = self._replicas.get(engine_id.rank)
        if (
            replica is not None
            and replica.engine_id == engine_id
            and (replica.state is ReplicaState.LEAVING or replica.is_draining)
        ):
            return True
        return engine_id in self._dismissed

    def _on_load_snapshot(self, snapshot: LoadSnapshot) -> None:
        now = time.monotonic()
        self._snapshot_at = now
        self._reports = {report.engine_id: report for report in snapshot.reports}
        self._totals.on_reports(snapshot.reports)
        for connection in self._connections.values():
            report = self._reports.get(connection.engine_id)
            if report is not None:
                applied = report.applied.get(self.client_id, 0)
                connection.on_applied(applied)
                connection.ledger.on_report(report.report_seq, applied, report.load, now)

    def _on_heartbeat(self, now: float) -> None:
        super()._on_heartbeat(now)
        for connection in self._connections.values():
            if now - connection.ledger.fresh_at > SNAPSHOT_STALE_S:
                connection.ledger.stale = True

    def _describe_missing(self) -> list[str]:
        if self._group_order == (-1, -1):
            return [*super()._describe_missing(), "nothing was heard from the coordinator"]
        loading = [
            f"engine {report.engine_id}: loading, {report.detail or 'no detail'} ({report.progress:.0%})"
            for report in self._reports.values()
            if report.phase is EnginePhase.LOADING
        ]
        silent = [
            f"engine {replica.engine_id}: {replica.state.name.lower()}, has not reported"
            for replica in self._replicas.values()
            if replica.engine_id not in self._reports and replica.engine_id not in self._gone
        ]
        return [*super()._describe_missing(), *loading, *silent]
