"""The client of engines in other processes, without an event loop: sockets, table of engines, report, decoding."""

import weakref
from collections import Counter

from client.config import ClientConfig
from client.connection_table import ConnectionTable, OwnBuild
from client.core_client import EngineCoreClient
from client.resources import ClientResources, RouterSender
from engine.wire.codec import encode, output_decoder, ready_decoder
from engine.wire.drop_counter import DropCounter
from engine.wire.errors import MalformedMessageError
from engine.wire.ids import EngineId, RequestIds
from engine.wire.messages import ClientInfo, ClientReport, EngineCoreOutputs, EngineReady
from engine.wire.sockets import send_nowait
from engine.wire.tensors import Frames


class MPClient(EngineCoreClient):
    """Owns the parts that need no loop, and turns frames into messages: whatever bytes come, nothing is raised.

    _engines: which engines can be spoken to. _sender: numbered messages to them. _counts, _drop_counter: what
    ``statistics`` shows. _finalizer: gives everything back when the client is dropped.
    """

    def __init__(self, config: ClientConfig) -> None:
        """Bind and connect.

        Raises:
            AddressError: an endpoint cannot be bound or connected.
        """
        self.client_id = config.client_id
        self.request_ids = RequestIds(config.client_id)
        self._config = config
        self._resources = ClientResources(config)
        self._finalizer = weakref.finalize(self, self._resources.close)
        self._counts: Counter[str] = Counter()
        self._drop_counter = DropCounter()
        own = OwnBuild(config.build_id, config.config_hash, config.config)
        self._engines = ConnectionTable(own, self._counts, self._drop_counter)
        self._sender = RouterSender(self._resources, self._counts)
        self._output_decoder = output_decoder()
        self._ready_decoder = ready_decoder()
        self._report_seq = 0
        self._report()

    def close_sockets(self) -> None:
        """Give everything back without leaving the group, where no loop is left to do more; idempotent."""
        self._finalizer()

    def statistics(self) -> dict[str, int]:
        """Return counters since the start and sizes of what is held now."""
        held = {"refused_peers": self._resources.num_refused_peers, **self._engines.statistics()}
        return {**self._drop_counter.counts, **self._counts, **held, **self._sender.tracked.statistics()}

    def _report(self, *, leaving: bool = False, wave_wanted: int = 0) -> None:
        """Report to the coordinator that this client lives, where engines reach it, and which wave it requests."""
        self._report_seq += 1
        info = ClientInfo(self.client_id, self._resources.request_endpoint, self._resources.output_endpoint)
        send_nowait(self._resources.reports, [encode(ClientReport(self._report_seq, info, leaving, wave_wanted))])

    def _decode_handshake(self, frames: Frames) -> EngineReady | None:
        """Decode what came on the request channel; None when it is no handshake of the engine that sent it."""
        sender = EngineId.from_identity(bytes(frames[0]))
        peer = frames[0].hex() if sender is None else str(sender)
        try:
            ready = self._ready_decoder.decode_frames(frames[1:])
        except MalformedMessageError as error:
            self._drop_counter.drop("malformed_handshakes", peer, str(error))
            return None
        if sender is None or ready.engine_id != sender:
            self._drop_counter.drop("malformed_handshakes", peer, "the routing id is not the engine's")
            return None
        return ready

    def _decode_outputs(self, frames: Frames) -> EngineCoreOutputs | None:
        """Decode what came on the output channel; None when it is no batch for this client."""
        try:
            outputs = self._output_decoder.decode_frames(frames)
        except MalformedMessageError as error:
            # A PULL does not know who sent it: all unknown senders are one peer.
            self._drop_counter.drop("malformed_outputs", "the output channel", str(error))
            return None
        if outputs.client_id != self.client_id:
            self._drop_counter.drop("misdirected_outputs", str(outputs.engine_id))
            return None
        return outputs
