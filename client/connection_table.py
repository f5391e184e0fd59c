"""The table of engines a client may speak to: handshakes, refusals, ends, and outputs that came too early. Pure."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from client.engine_connection import EngineConnection
from engine.wire.drop_counter import DropCounter
from engine.wire.errors import OverloadedError
from engine.wire.ids import EngineId
from engine.wire.messages import EngineCoreOutputs, EngineReady
from engine.wire.tensors import Buffer

_log = logging.getLogger(__name__)

MAX_REMEMBERED_ENGINES = 1024

MAX_EARLY_ENGINES = 64
MAX_EARLY_FRAMES = 8
"""Outputs that are kept until the handshake comes which they overtook: what an engine sends before it was asked."""


class OwnBuild(NamedTuple):
    """What an engine must have in common with its client.

    config: the values that ``config_hash`` covers, to name those that differ.
    """

    build_id: str
    config_hash: str
    config: Mapping[str, str]


class Opened(NamedTuple):
    """An engine has shaken hands."""

    connection: EngineConnection


class Refused(NamedTuple):
    """An engine will not be spoken to."""

    engine_id: EngineId
    reason: str


class Closed(NamedTuple):
    """A connection has ended: what was in flight on it gets no answer there.

    restarted: the engine lives and opens a new connection; otherwise it is gone.
    """

    connection: EngineConnection
    reason: str
    restarted: bool


class Gone(NamedTuple):
    """An engine has ended; as a change of the table: one that never shook hands."""

    engine_id: EngineId
    reason: str


Change = Opened | Refused | Closed | Gone


class ConnectionTable:
    """Judges every handshake and all news of an engine's end; returns what changed by it, in order, to be acted on.

    connections: every engine that can be spoken to. gone: engines that never will be again, and why. The two are
        disjoint, so nothing of a dead engine follows its death.
    refused: engines of another build or configuration, and why; kept until their rank has another engine.
    """

    def __init__(self, own: OwnBuild | None, counts: Counter[str], drop_counter: DropCounter) -> None:
        """Begin. own: None takes engines of any build: they are of this process."""
        self.connections: dict[EngineId, EngineConnection] = {}
        self.gone: dict[EngineId, str] = {}
        self.refused: dict[EngineId, str] = {}
        self._own = own
        self._early: dict[EngineId, list[list[Buffer]]] = {}
        self._counts = counts
        self._drop_counter = drop_counter

    @property
    def num_ready(self) -> int:
        """Return how many engines serve and stay."""
        return sum(not connection.leaving for connection in self.connections.values())

    def only(self) -> EngineConnection:
        """Return the connection of a client that has one engine.

        Raises:
            OverloadedError: it has not shaken hands yet.
        """
        for connection in self.connections.values():
            return connection
        raise OverloadedError("no engine has shaken hands yet")

    def statistics(self) -> dict[str, int]:
        """Return sizes of what is held now."""
        return {
            "engines": len(self.connections),
            "unapplied_messages": sum(connection.num_unapplied for connection in self.connections.values()),
            "early_outputs": sum(map(len, self._early.values())),
        }

    def describe_missing(self) -> list[str]:
        """Return a sentence for each engine that will not come."""
        return [f"engine {engine_id}: {reason}" for engine_id, reason in {**self.gone, **self.refused}.items()]

    # --- handshakes -------------------------------------------------------------------------------------------------

    def on_ready(self, ready: EngineReady, now: float) -> list[Change]:
        """Take a handshake.

        It ends the connection to an earlier incarnation of its rank, and one to the same engine, which with a higher
        ``channel_number`` has dropped what it had of this client. now: monotonic seconds.
        """
        engine_id = ready.engine_id
        if engine_id in self.gone or self._has_newer(engine_id):
            self._drop_counter.drop("stale_handshakes", str(engine_id))
            return []
        known = self.connections.get(engine_id)
        if known is not None and 0 < ready.channel_number <= known.ready.channel_number:
            self._counts["repeated_handshakes"] += 1
            return []
        if difference := self._difference(ready):
            return [self._refuse(engine_id, difference)]
        changes: list[Change] = []
        for old in [other for other in self.connections.values() if other.engine_id.rank == engine_id.rank]:
            if old.engine_id == engine_id:
                changes.append(self._close(old, "it began anew", restarted=True))
            else:
                changes.append(self._close(old, f"{engine_id} replaced it"))
        connection = EngineConnection(ready, now)
        self.connections[engine_id] = connection
        for other in [other for other in self.refused if other.rank == engine_id.rank]:
            del self.refused[other]
        return [*changes, Opened(connection)]

    def _has_newer(self, engine_id: EngineId) -> bool:
        return any(
            known.rank == engine_id.rank and known.incarnation > engine_id.incarnation
            for known in (*self.connections, *self.gone)
        )

    def _difference(self, ready: EngineReady) -> str:
        own = self._own
        if own is None:
            return ""
        pairs = [("build", ready.build_id, own.build_id), ("configuration", ready.config_hash, own.config_hash)]
        if ready.config_hash != own.config_hash:
            pairs += [(name, theirs, own.config.get(name, theirs)) for name, theirs in ready.config.items()]
        return "; ".join(f"its {what} is {theirs}, ours is {ours}" for what, theirs, ours in pairs if theirs != ours)

    def _refuse(self, engine_id: EngineId, difference: str) -> Refused:
        if engine_id not in self.refused:
            _log.error("engine %s is refused: %s", engine_id, difference)
        self._counts["refused_handshakes"] += 1
        refused = Refused(engine_id, f"refused: {difference}")
        _remember(self.refused, *refused)
        return refused

    # --- ends -------------------------------------------------------------------------------------------------------

    def on_gone(self, engine_id: EngineId, reason: str) -> list[Change]:
        """Take the news that an engine is gone, from whomever and however often."""
        if engine_id in self.gone:
            return []
        connection = self.connections.get(engine_id)
        if connection is not None:
            return [self._close(connection, reason)]
        self._remember_gone(engine_id, reason)
        return [Gone(engine_id, reason)]

    def _close(self, connection: EngineConnection, reason: str, *, restarted: bool = False) -> Closed:
        del self.connections[connection.engine_id]
        if not restarted:
            self._remember_gone(connection.engine_id, reason)
        return Closed(connection, reason, restarted)

    def _remember_gone(self, engine_id: EngineId, reason: str) -> None:
        self._early.pop(engine_id, None)
        self.refused.pop(engine_id, None)
        _remember(self.gone, engine_id, reason)

    # --- outputs of engines that have not shaken hands --------------------------------------------------------------

    def on_unknown_outputs(self, outputs: EngineCoreOutputs, frames: list[Buffer]) -> list[Change]:
        """Keep outputs that overtook their handshake, which travels on another socket; last words count at once."""
        engine_id = outputs.engine_id
        if outputs.dead is not None:
            return self.on_gone(engine_id, outputs.dead)
        if engine_id in self.gone or self._has_newer(engine_id) or not self._keep_early(engine_id, frames):
            self._drop_counter.drop("stale_outputs", str(engine_id))
        return []

    def take_early(self, engine_id: EngineId) -> list[list[Buffer]]:
        """Return the outputs that were kept of an engine, to be looked at again: its handshake has come."""
        return self._early.pop(engine_id, [])

    def _keep_early(self, engine_id: EngineId, frames: list[Buffer]) -> bool:
        # Both bounds: whoever can reach the socket can name any engine, as often as it likes.
        if engine_id not in self._early and len(self._early) >= MAX_EARLY_ENGINES:
            return False
        kept = self._early.setdefault(engine_id, [])
        if len(kept) >= MAX_EARLY_FRAMES:
            return False
        kept.append(frames)
        return True


def _remember(reasons: dict[EngineId, str], engine_id: EngineId, reason: str) -> None:
    reasons[engine_id] = reason
    if len(reasons) > MAX_REMEMBERED_ENGINES:
        del reasons[next(iter(reasons))]
