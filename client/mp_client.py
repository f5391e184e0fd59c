"""The client of engines in other processes: sockets, handshake, lives of engines, utility calls. No event loop yet."""

import logging
import time
import weakref
from abc import abstractmethod
from collections import Counter

from client.config import ClientConfig
from client.core_client import EngineCoreClient
from client.engine_connection import EngineConnection
from client.resources import ClientResources
from client.sender import RouterSender
from client.utility_calls import UtilityCalls
from engine.wire.codec import encode, output_decoder, ready_decoder
from engine.wire.drop_counter import DropCounter
from engine.wire.errors import MalformedMessageError
from engine.wire.ids import EngineId, RequestIds
from engine.wire.messages import ClientInfo, ClientReport, EngineCoreOutputs, EngineReady
from engine.wire.sockets import send_nowait
from engine.wire.tensors import Frames

_log = logging.getLogger(__name__)

MAX_REMEMBERED_ENGINES = 1024

MAX_EARLY_ENGINES = 64
MAX_EARLY_FRAMES = 8
"""Outputs that are kept until the handshake comes which they overtook: what an engine says before it was asked."""


class MPClient(EngineCoreClient):
    """Knows which engines have shaken hands and which are gone; turns frames into messages and messages into frames.

    _lines: every engine that can be spoken to. _gone: engines that never will be again, with the reason; frames from
    them are dropped, so nothing of a dead engine follows its death. The two are disjoint.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.client_id = config.client_id
        self.request_ids = RequestIds(config.client_id)
        self._config = config
        self._resources = ClientResources()
        self._finalizer = weakref.finalize(self, self._resources.close)
        try:
            self._resources.open(config)
        except BaseException:
            self._finalizer()
            raise
        self._connections: dict[EngineId, EngineConnection] = {}
        self._gone: dict[EngineId, str] = {}
        self._early_outputs: dict[EngineId, list[Frames]] = {}
        self._refused: dict[EngineId, str] = {}
        self._utility_calls = UtilityCalls()
        self._drop_counter = DropCounter()
        self._counts: Counter[str] = Counter()
        self._sender = RouterSender(self._resources, self._counts)
        self._output_decoder = output_decoder()
        self._ready_decoder = ready_decoder()
        self._report_seq = 0
        self._announce()

    @abstractmethod
    def _on_connection_opened(self, connection: EngineConnection) -> None:
        """React to a new engine."""

    @abstractmethod
    def _on_connection_closed(self, connection: EngineConnection, reason: str, *, restarted: bool) -> None:
        """React to the end of a line: what was in flight on it gets no answer there.

        restarted: the engine lives and is about to open a new line; otherwise it is gone.
        """

    @abstractmethod
    def _on_unknown_engine_died(self, engine_id: EngineId, reason: str) -> None:
        """React to the death of an engine that never shook hands."""

    @abstractmethod
    def _on_refused(self) -> None:
        """React to an engine that will not be spoken to."""

    def close_sockets(self) -> None:
        """Give everything back without leaving the group, where no loop is left to do more; idempotent."""
        self._finalizer()

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        held = {
            "engines": len(self._connections),
            "unapplied_messages": sum(connection.num_unapplied for connection in self._connections.values()),
            "utility_calls": len(self._utility_calls),
            "early_outputs": sum(map(len, self._early_outputs.values())),
            "refused_peers": self._resources.num_refused_peers,
            **self._sender.tracked.statistics(),
        }
        return {**self._drop_counter.counts, **self._counts, **held}

    def _announce(self, *, leaving: bool = False, wave_wanted: int = 0) -> None:
        """Tell the coordinator that this client lives and where engines reach it, and which wave it requests for."""
        self._report_seq += 1
        info = ClientInfo(self.client_id, self._resources.request_endpoint, self._resources.output_endpoint)
        send_nowait(self._resources.reports, [encode(ClientReport(self._report_seq, info, leaving, wave_wanted))])

    # --- what arrives on the request channel ---

    def _on_request_frames(self, frames: Frames) -> list[Frames]:
        """Take what an engine said on the request channel: its handshake, or nothing of ours.

        Returns its outputs that had overtaken the handshake.
        """
        sender = EngineId.from_identity(bytes(frames[0]))
        peer = frames[0].hex() if sender is None else str(sender)
        try:
            ready = self._ready_decoder.decode_frames(frames[1:])
        except MalformedMessageError as error:
            self._drop_counter.drop("malformed_handshakes", peer, str(error))
            return []
        if sender is None or ready.engine_id != sender:
            self._drop_counter.drop("malformed_handshakes", peer, "the routing id is not the engine's")
            return []
        self._on_ready(ready)
        return self._early_outputs.pop(sender, [])

    def _on_ready(self, ready: EngineReady) -> None:
        engine_id = ready.engine_id
        if engine_id in self._gone or self._has_newer(engine_id):
            self._drop_counter.drop("stale_handshakes", str(engine_id))
            return
        known = self._connections.get(engine_id)
        if known is not None and 0 < ready.channel_number <= known.ready.channel_number:
            self._counts["repeated_handshakes"] += 1
            return
        difference = self._difference(ready)
        if difference:
            self._refuse(engine_id, difference)
            return
        for old in [
            connection for connection in self._connections.values() if connection.engine_id.rank == engine_id.rank
        ]:
            again = old.engine_id == engine_id
            self._close_connection(old, "it began anew" if again else f"{engine_id} replaced it", forget=again)
        connection = EngineConnection(ready, time.monotonic())
        self._connections[engine_id] = connection
        for refused in [other for other in self._refused if other.rank == engine_id.rank]:
            del self._refused[refused]
        self._on_connection_opened(connection)

    def _has_newer(self, engine_id: EngineId) -> bool:
        return any(
            known.rank == engine_id.rank and known.incarnation > engine_id.incarnation
            for known in (*self._connections, *self._gone)
        )

    def _difference(self, ready: EngineReady) -> str:
        config = self._config
        pairs = [("build", ready.build_id, config.build_id), ("configuration", ready.config_hash, config.config_hash)]
        if ready.config_hash != config.config_hash:
            pairs += [(name, theirs, config.config.get(name, theirs)) for name, theirs in ready.config.items()]
        return "; ".join(f"its {what} is {theirs}, ours is {ours}" for what, theirs, ours in pairs if theirs != ours)

    def _refuse(self, engine_id: EngineId, difference: str) -> None:
        if engine_id not in self._refused:
            _log.error("engine %s is refused: %s", engine_id, difference)
        self._counts["refused_handshakes"] += 1
        _remember(self._refused, engine_id, f"refused: {difference}")
        self._on_refused()

    # --- the end of an engine ---

    def _close_connection(self, connection: EngineConnection, reason: str, *, forget: bool = False) -> None:
        """End a line; ``forget`` when the same engine is about to open a new one, so that it is not gone."""
        del self._connections[connection.engine_id]
        if not forget:
            self._remember_gone(connection.engine_id, reason)
        self._utility_calls.fail_engine(connection.engine_id, reason)
        self._on_connection_closed(connection, reason, restarted=forget)

    def _on_gone(self, engine_id: EngineId, reason: str) -> None:
        """Take the news that an engine is gone, from whomever and however often."""
        if engine_id in self._gone:
            return
        connection = self._connections.get(engine_id)
        if connection is None:
            self._remember_gone(engine_id, reason)
            self._on_unknown_engine_died(engine_id, reason)
        else:
            self._close_connection(connection, reason)

    def _remember_gone(self, engine_id: EngineId, reason: str) -> None:
        self._early_outputs.pop(engine_id, None)
        self._refused.pop(engine_id, None)
        _remember(self._gone, engine_id, reason)

    # --- what arrives on the output channel ---

    def _decode_outputs(self, frames: Frames) -> EngineCoreOutputs | None:
        """Decode one output message and move its line forward; None when it is not from an engine we speak to."""
        try:
            outputs = self._output_decoder.decode_frames(frames)
        except MalformedMessageError as error:
            # A PULL does not say who sent it: all strangers are one peer.
            self._drop_counter.drop("malformed_outputs", "the output channel", str(error))
            return None
        connection = self._connections.get(outputs.engine_id)
        if outputs.client_id != self.client_id:
            self._drop_counter.drop("misdirected_outputs", str(outputs.engine_id))
            return None
        if connection is None:
            self._on_outputs_of_unknown_engine(outputs, frames)
            return None
        missing = connection.on_out_seq(outputs.out_seq)
        if missing:
            self._counts["output_gaps"] += missing
            self._on_output_gap(connection, outputs)
        connection.on_applied(outputs.applied)
        return outputs

    def _on_output_gap(self, connection: EngineConnection, outputs: EngineCoreOutputs) -> None:
        """Take the news that frames before this one are lost; subclasses know what is in flight, and answer for it.

        The answers of utility calls may have been in them.
        """
        self._utility_calls.fail_engine(
            connection.engine_id, "outputs were lost on their way, the answer perhaps with them"
        )

    def _on_outputs_of_unknown_engine(self, outputs: EngineCoreOutputs, frames: Frames) -> None:
        """Keep what overtook the handshake, which travels on another socket; last words count at once."""
        engine_id = outputs.engine_id
        if outputs.dead is not None:
            self._on_gone(engine_id, outputs.dead)
        elif engine_id in self._gone or self._has_newer(engine_id) or not self._keep_early(engine_id, frames):
            self._drop_counter.drop("stale_outputs", str(engine_id))

    def _keep_early(self, engine_id: EngineId, frames: Frames) -> bool:
        early = self._early_outputs
        if engine_id not in early and len(early) >= MAX_EARLY_ENGINES:
            return False
        kept = early.setdefault(engine_id, [])
        if len(kept) >= MAX_EARLY_FRAMES:
            return False
        kept.append(frames)
        return True


def _remember(reasons: dict[EngineId, str], engine_id: EngineId, reason: str) -> None:
    reasons[engine_id] = reason
    if len(reasons) > MAX_REMEMBERED_ENGINES:
        del reasons[next(iter(reasons))]
