"""The client of a data-parallel group: it also follows the coordinator's state channel."""

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

from client.async_mp_client import AsyncMPClient
from client.config import ClientConfig
from client.connection_table import Gone
from client.engine_connection import EngineConnection
from client.mailbox import Mailbox
from client.state_follower import StateFollower
from client.tasks import loop_is_running, whenever_filled
from engine.wire.codec import state_decoder
from engine.wire.control import ClusterSettings
from engine.wire.errors import MalformedMessageError
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.tensors import Frames
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView
from lb.views.totals import RankTotals

_log = logging.getLogger(__name__)


class DPAsyncMPClient(AsyncMPClient):
    """Follows membership, deaths and loads as the coordinator publishes them, by means of a ``StateFollower``.

    on_settings: told when the operator's settings change; must not raise.
    eep_scaling_cache: the last notification about an elastic change, of the engine that each rank had last.
    """

    def __init__(self, config: ClientConfig, totals: RankTotals | None = None) -> None:
        """Begin. totals: what keeps the counters of the ranks; default: one that ends with this client."""
        super().__init__(config)
        self.on_settings: Callable[[ClusterSettings], None] | None = None
        self.eep_scaling_cache: dict[EngineId, Any] = {}
        self._follower = StateFollower(self.client_id, self._engines, RankTotals() if totals is None else totals)
        self._states: Mailbox[Frames] = Mailbox()
        self._state_decoder = state_decoder()
        self._is_following = False
        if loop_is_running():
            self._ensure_stats_update_task()

    @property
    def current_wave(self) -> int:
        """Return the number of the running period of a lockstep group; 0 for independent ranks."""
        return self._follower.current_wave

    @property
    def lb_engines(self) -> list[EngineId]:
        """Return the engines of the committed membership, in the order of their ranks."""
        return self._follower.lb_engines

    @property
    def num_clients(self) -> int:
        """Return how many clients of the deployment live, this one included."""
        return self._follower.num_clients

    @property
    def settings(self) -> ClusterSettings:
        """Return the newest settings that the operator wants."""
        return self._follower.settings

    def snapshot_age_s(self) -> float | None:
        """Return seconds since the last LoadSnapshot came; None before the first."""
        return self._follower.snapshot_age_s(time.monotonic())

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every engine, one per rank, in the order of the ranks."""
        return self._follower.engine_views()

    def group_view(self) -> GroupView | None:
        """Return what is known of the lockstep group; None for independent ranks."""
        return self._follower.group_view()

    async def eep_process_engine_core_notification(self, engine_id: EngineId, notification: Any) -> None:
        """Note what an engine notifies of an elastic change. A projection for observers; nothing waits on it."""
        _log.info("engine %s: %s", engine_id, notification)
        others = {known: last for known, last in self.eep_scaling_cache.items() if known.rank != engine_id.rank}
        self.eep_scaling_cache = others | {engine_id: notification}

    # --- what this class changes of its base ------------------------------------------------------------------------

    def _on_opened(self, connection: EngineConnection) -> None:
        self._follower.note_status(connection)  # first: it may be one that takes no requests
        super()._on_opened(connection)

    def _on_unknown_gone(self, gone: Gone) -> None:
        """Let ``wait_ready`` look again: in a group, the death of an engine never spoken to ends nothing."""

    def _on_request_sent(self) -> None:
        """Request the next wave of a lockstep group that is idle: one hop shorter than the engine's own report."""
        if wave := self._follower.wave_to_request():
            self._report(wave_wanted=wave)

    def _on_heartbeat(self, now: float) -> None:
        self._follower.on_time(now)
        super()._on_heartbeat(now)

    def _describe_missing(self) -> list[str]:
        return [*super()._describe_missing(), *self._follower.describe_missing()]

    # --- the state channel ------------------------------------------------------------------------------------------

    def _start_tasks(self) -> None:
        super()._start_tasks()
        self._ensure_stats_update_task()

    def _ensure_stats_update_task(self) -> None:
        """Start to follow the state channel, once."""
        if self._is_following:
            return
        self._is_following = True
        self._resources.receive(self._resources.states, self._states.put)
        follow = whenever_filled(weakref.ref(self), self._states, lambda client: client._on_states())
        self._start_task("state", follow)

    def _on_states(self) -> None:
        for frames in self._states.drain():
            try:
                state = self._state_decoder.decode_frames(frames[1:])  # behind the topic
            except MalformedMessageError as error:
                self._drop_counter.drop("malformed_states", "the state channel", str(error))
                continue
            if isinstance(state, GroupState):
                self._on_group_state(state)
            else:
                self._follower.on_snapshot(state, time.monotonic())

    def _on_group_state(self, state: GroupState) -> None:
        change = self._follower.on_group_state(state)
        if change is None:
            return
        if change.settings is not None and self.on_settings is not None:
            self.on_settings(change.settings)
        for death in change.deaths:
            self._inbox.put(death)  # not acted on here: behind the frames that came before it
        self._routing.on_group_changed(self._follower.num_clients, change.migrating)
        self._routing.settle()
        self._results.engines_changed.set()
