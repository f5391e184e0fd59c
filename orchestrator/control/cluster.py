"""The cluster control of the supervisor: serves calls that change the settings, relays those to all API processes."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args

import msgspec

from engine.wire.control import ClusterSettings
from engine.wire.ids import ClientId, EngineId
from engine.wire.process import set_log_level
from orchestrator.control.calls import Handler
from orchestrator.control.messages import AbortRequests, Cordon, GetSettings, ListReached, SettingsChange
from orchestrator.control.server import ControlServer
from orchestrator.control.settings import SettingsStore

_RELAY_S = 5.0
_REACH_S = 1.0  # an API process that hangs holds up no scale operation

_log = logging.getLogger(__name__)


class ClusterControl:
    """Holds the cluster's settings and the supervisor's end of the control channel."""

    def __init__(
        self,
        endpoint: str,
        ranks: Callable[[], Collection[int]],
        publish: Callable[[ClusterSettings], None],
        log_level: str,
    ) -> None:
        """Listen.

        ranks: those there are. publish: called with every new settings. log_level: when the settings name none.

        Raises:
            AddressError: the endpoint cannot be bound.
        """
        self._settings_store = SettingsStore(ranks)
        self._publish = publish
        self._log_level = log_level
        self._handlers: dict[type, Handler] = dict.fromkeys(get_args(SettingsChange), self._change)
        self._handlers |= {GetSettings: self._get, AbortRequests: self._abort}
        self._server = ControlServer(endpoint, self._handlers)  # which looks a handler up when a call comes

    def add_handlers(self, handlers: Mapping[type, Handler]) -> None:
        """Serve more kinds of calls from now on. handlers: by the type of the operation."""
        self._handlers.update(handlers)

    @property
    def endpoint(self) -> str:
        """Return where API processes connect."""
        return self._server.endpoint

    @property
    def settings(self) -> ClusterSettings:
        """Return the settings as they are wanted now."""
        return self._settings_store.current

    def forget_rank(self, rank: int) -> None:
        """Drop the settings of a rank that leaves: the next rank of its number begins without."""
        if rank in self._settings_store.current.cordoned:
            self._publish(self._settings_store.change(Cordon(rank, is_on=False)))

    async def reached(self) -> set[EngineId]:
        """Return the engines that every API process which answers can send requests to."""
        answers = await self._server.call_all(ListReached(), _REACH_S)
        reached = [set(msgspec.convert(found, list[EngineId])) for found in answers.values() if isinstance(found, list)]
        # No answer at all reaches nothing; a process that hangs serves nobody, and does not count.
        return set.intersection(*reached) if reached else set()

    def on_client_gone(self, client_id: ClientId) -> None:
        """Call an API process no more: it has ended."""
        self._server.forget(client_id)

    async def stop(self, _force_stop: "asyncio.Future[Any]") -> list[str]:
        """Close the channel."""
        await self._server.aclose()
        return []

    async def _change(self, change: SettingsChange) -> ClusterSettings:
        before = self._settings_store.current
        after = self._settings_store.change(change)
        # A change that changes nothing is not published: its number is in force already.
        if after.seq != before.seq:
            _log.info("settings %d: %s", after.seq, change)
            set_log_level(after.log_level or self._log_level)
            self._publish(after)
        return after

    async def _get(self, _: GetSettings) -> ClusterSettings:
        return self.settings

    async def _abort(self, operation: AbortRequests) -> dict[str, dict[str, Any]]:
        """Let every API process abort its part of these; return what each aborted, and which did not answer."""
        answers = await self._server.call_all(operation, _RELAY_S)
        failures = {str(client): str(answer) for client, answer in answers.items() if isinstance(answer, Exception)}
        aborted = {str(client): answer for client, answer in answers.items() if str(client) not in failures}
        return {"aborted": aborted, "failures": failures}
