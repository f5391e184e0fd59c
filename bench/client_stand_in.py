"""Two engines and a coordinator in one process, reduced to what a client sees of them, as fast as they can.

``python -m bench.client_stand_in`` with a ``StandInSpec`` as JSON on standard input; it runs until it is killed.
"""

import sys
import time
from collections.abc import Iterator

import zmq
from msgspec import Struct

from engine.wire.codec import channel_decoder, encode
from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import (
    LOAD_TOPIC,
    AddRequest,
    ClientInfo,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    EngineReport,
    FinishReason,
    LoadSnapshot,
)
from engine.wire.process import die_with_parent, read_spec
from engine.wire.sockets import bind, connect, make_socket, send_nowait
from engine.wire.states import EnginePhase

BUILD_ID = "bench"
CONFIG_HASH = "bench"
NUM_ENGINES = 2
NUM_OUTPUTS = 128
MAX_AHEAD = 64
"""Frames in an output channel at a time: enough to keep the receiver busy, few enough to stay in the caches."""

SNAPSHOT_S = 0.05


class StandInSpec(Struct, frozen=True, kw_only=True):
    """The clients to serve, and the endpoints that the coordinator's sockets bind."""

    clients: list[ClientInfo]
    report_endpoint: str
    state_endpoint: str


class _Engine:
    """One engine's channels to one client. Each frame holds one token of each of its sequences, at most 128."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", rank: int, info: ClientInfo) -> None:
        self._engine_id = EngineId(rank, 1)
        self._client_id = info.client_id
        self._requests = make_socket(context, zmq.DEALER, identity=self._engine_id.to_identity())
        connect(self._requests, info.request_endpoint)
        self._outputs = make_socket(context, zmq.PUSH, high_water_mark=MAX_AHEAD)
        connect(self._outputs, info.output_endpoint)
        self._decode = channel_decoder().decode
        self._left: dict[int, int] = {}  # request id -> tokens to come
        self._next: dict[int, EngineCoreOutput] = {}  # request id -> its next output; made once, then counted on
        self._out_seq = 0
        self._report_seq = 0
        self.applied = 0
        self._pending: bytes | None = None
        ready = EngineReady(self._engine_id, BUILD_ID, CONFIG_HASH, 8192, 256, 100_000, 256, "none", "none", "", 0)
        self._requests.send(encode(ready))

    def turn(self) -> bool:
        """Take the requests that came and send one frame; False when there was nothing to do."""
        received = self._receive()
        return self._send() or received

    def report(self) -> EngineReport:
        """Return the state a real engine would report."""
        self._report_seq += 1
        load = Load(num_running=len(self._left))
        applied = {self._client_id: self.applied}
        return EngineReport(self._engine_id, self._report_seq, 1, 1, 1, 0, EnginePhase.RUNNING, 0, True, applied, load)

    def _receive(self) -> bool:
        received = False
        while len(self._left) < NUM_OUTPUTS:
            try:
                message = self._decode(self._requests.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            received = True
            self.applied = message.channel_seq
            if isinstance(message, AddRequest):
                self._left[message.request_id] = message.sampling.max_tokens
                self._next[message.request_id] = EngineCoreOutput(message.request_id, 0, 0, 0, [101])
        return received

    def _send(self) -> bool:
        if self._pending is None:
            self._pending = self._next_frame()
        if self._pending is None:
            return False
        if send_nowait(self._outputs, [self._pending]).name == "ACCEPTED":
            self._pending = None
            return True
        return False

    def _next_frame(self) -> bytes | None:
        if not self._left:
            return None
        self._out_seq += 1
        ended = [request_id for request_id, left in self._left.items() if left == 1]
        for request_id in ended:
            self._next[request_id].finish_reason = FinishReason.LENGTH
        frame = encode(
            EngineCoreOutputs(
                self._engine_id,
                self._client_id,
                self._out_seq,
                self.applied,
                self._report_seq + 1,
                list(self._next.values()),
            )
        )
        for request_id in ended:
            del self._left[request_id], self._next[request_id]
        for request_id, output in self._next.items():
            output.first_position += 1
            self._left[request_id] -= 1
        return frame


def main() -> int:
    """Serve until killed."""
    die_with_parent()
    spec = read_spec(StandInSpec)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reports = make_socket(context, zmq.PULL)
    bind(reports, spec.report_endpoint)
    states = make_socket(context, zmq.XPUB)
    bind(states, spec.state_endpoint)
    engines = [_Engine(context, rank, info) for info in spec.clients for rank in range(NUM_ENGINES)]
    for snapshot in _serve(engines):
        states.send_multipart([LOAD_TOPIC, encode(snapshot)])
        while reports.poll(0):
            reports.recv_multipart()
    return 0


def _serve(engines: list[_Engine]) -> Iterator[LoadSnapshot]:
    """Let the engines work; yield a snapshot whenever one is due. The first client's engines are those reported."""
    due, seq = 0.0, 0
    while True:
        busy = [engine.turn() for engine in engines]
        if not any(busy):
            time.sleep(0.000_05)
        now = time.monotonic()
        if now >= due:
            due, seq = now + SNAPSHOT_S, seq + 1
            yield LoadSnapshot(1, seq, [engine.report() for engine in engines[:NUM_ENGINES]])


if __name__ == "__main__":
    sys.exit(main())
