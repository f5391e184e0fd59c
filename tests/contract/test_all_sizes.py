"""Messages of every size through an engine's real output thread to a reader that lets it wait: none changed or lost."""

import math
import random
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from engine.proc.output import OutputThread
from engine.proc.shared import SharedState
from engine.wire.codec import output_decoder
from engine.wire.endpoints import ipc_endpoint, tcp_endpoint
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import UtilityOutput
from engine.wire.sockets import bind, make_socket

CLIENT, ENGINE = ClientId(0, 1), EngineId(0, 1)
MAX_BYTES = 1_000_000
WINDOW = 2_000  # more than the pipe takes, so that the sender is stopped again and again
MAX_GROWTH_BYTES = 600 * 1024 * 1024
SOURCE = random.Random(1).randbytes(2 * MAX_BYTES)

Piece = tuple[int, int]
"""(offset, size) of a payload in SOURCE: so every payload is known to both ends and none is kept."""


def pieces(count: int) -> Iterator[Piece]:
    """Yield pieces of 1 byte to 1 MB whose sizes are spread evenly over the orders of magnitude."""
    rng = random.Random(17)
    for _ in range(count):
        yield rng.randrange(MAX_BYTES), int(math.exp(rng.uniform(0, math.log(MAX_BYTES))))


def payload(piece: Piece) -> bytes:
    offset, size = piece
    return SOURCE[offset : offset + size]


class SlowReader:
    """Reads in bursts, and only when the sender has as much under way as it may."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.under_way: deque[Piece] = deque()
        self._socket = socket
        self._decode = output_decoder().decode
        self._num_read = 0

    def read(self, count: int) -> None:
        for _ in range(count):
            assert self._socket.poll(20_000), "nothing came"
            outputs = self._decode(self._socket.recv())
            self._num_read += 1
            assert outputs.out_seq == self._num_read
            assert outputs.utility_output is not None
            assert outputs.utility_output.result == payload(self.under_way.popleft())


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.chaos)])
def test_messages_of_every_size_reach_a_slow_reader_unchanged(count: int, transport: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    output = OutputThread(context, ENGINE, SharedState(ENGINE, "here", lambda: None))
    memory = psutil.Process().memory_info
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        pull = make_socket(context, zmq.PULL, high_water_mark=8)
        endpoint = ipc_endpoint(Path(folder), "outputs") if transport == "ipc" else tcp_endpoint("127.0.0.1")
        output.start()
        output.open(CLIENT, bind(pull, endpoint))
        reader, rng, before, peak = SlowReader(pull), random.Random(3), memory().rss, 0
        for number, piece in enumerate(pieces(count)):
            output.put_utility(CLIENT, UtilityOutput(number, payload(piece)), report_seq=1)
            reader.under_way.append(piece)
            if len(reader.under_way) >= WINDOW:
                peak = max(peak, memory().rss)
                reader.read(rng.randrange(1, WINDOW))
        reader.read(len(reader.under_way))
        output.finish(flush_s=1.0)
        context.destroy(linger=0)
    assert peak - before < MAX_GROWTH_BYTES
