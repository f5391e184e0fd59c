"""CPU of ``DPLBAsyncMPClient`` per token and per request, beside a bare loop over the same sockets and bytes.

Two engine stand-ins in another process answer as fast as they can, so both sides are measured hot and saturated: CPU
per message of a process that sleeps between messages depends on the machine's caches more than on the code.
CPU is the whole process's, ZeroMQ's I/O threads included. Rounds of both sides alternate; figures are medians.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq
from rich.progress import track

from bench.client_stand_in import BUILD_ID, CONFIG_HASH, NUM_ENGINES, StandInSpec
from bench.report import Row, finish, parse_arguments
from client.config import ClientConfig
from client.dplb_async_mp_client import DPLBAsyncMPClient
from engine.wire.codec import encode, output_decoder
from engine.wire.endpoints import ipc_endpoint
from engine.wire.ids import ClientId, RequestIds
from engine.wire.messages import AddRequest, ClientInfo
from engine.wire.process import child_environment
from engine.wire.sampling import SamplingParams
from engine.wire.sockets import bind, make_socket

NUM_CONCURRENT = 256
TOKENS_PER_REQUEST = 2000
NUM_SHORT_REQUESTS = 10_000
PROMPT = list(range(64))
MAX_US_PER_TOKEN = 1.5
MAX_US_PER_REQUEST = 80.0


class BareLoop:
    """The floor: one ROUTER, one PULL, encode, send, receive, decode, count. Round-robin, no event loop, no books."""

    name = "bare zmq loop"

    def __init__(self, info: ClientInfo) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = make_socket(self._context, zmq.ROUTER)
        bind(self._router, info.request_endpoint)
        self._pull = make_socket(self._context, zmq.PULL)
        bind(self._pull, info.output_endpoint)
        self._decode = output_decoder().decode
        self._client_id = info.client_id
        self._ids = RequestIds(info.client_id)
        self._channel_seqs: dict[bytes, int] = {}
        self._ring: deque[bytes] = deque()

    async def wait_ready(self) -> None:
        """Take the handshakes."""
        for _ in range(NUM_ENGINES):
            identity, _ready = self._router.recv_multipart()
            self._channel_seqs[identity] = 0
            self._ring.append(identity)

    async def add(self, max_tokens: int) -> None:
        """Send one request."""
        identity = self._ring[0]
        self._ring.rotate(-1)
        self._channel_seqs[identity] += 1
        request = make_request(self._client_id, self._ids.draw(), max_tokens)
        request.channel_seq = self._channel_seqs[identity]
        self._router.send_multipart([identity, encode(request)])

    async def next_batch(self) -> Any:
        """Receive one message."""
        return self._decode(self._pull.recv())

    async def aclose(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)


class Client:
    """The client under test."""

    name = "client"

    def __init__(self, config: ClientConfig) -> None:
        self._client = DPLBAsyncMPClient(config)
        self.next_batch = self._client.get_output_async
        self.aclose = self._client.aclose

    async def wait_ready(self) -> None:
        """Wait for the handshakes."""
        await self._client.wait_ready(20, NUM_ENGINES)

    async def add(self, max_tokens: int) -> None:
        """Send one request."""
        request = make_request(self._client.client_id, self._client.request_ids.draw(), max_tokens)
        await self._client.add_request_async(request)


Side = BareLoop | Client


def make_request(client_id: ClientId, request_id: int, max_tokens: int) -> AddRequest:
    """Return a request with a prompt of 64 tokens."""
    return AddRequest(client_id, 0, request_id, 0, 0, PROMPT, [], SamplingParams(max_tokens=max_tokens))


async def us_per_token(side: Side) -> float:
    """Return CPU microseconds per token while 256 requests stream."""
    for _ in range(NUM_CONCURRENT):
        await side.add(TOKENS_PER_REQUEST)
    # The first batches are left out: they come while the last requests are still on their way.
    left = NUM_CONCURRENT * TOKENS_PER_REQUEST
    for _ in range(20):
        left -= len((await side.next_batch()).outputs)
    num_tokens, started = left, time.process_time()
    while left > 0:
        left -= len((await side.next_batch()).outputs)
    return (time.process_time() - started) / num_tokens * 1e6


async def us_per_request(side: Side) -> float:
    """Return CPU microseconds per request of one token, 256 in flight."""
    started = time.process_time()
    for _ in range(NUM_CONCURRENT):
        await side.add(1)
    ended = 0
    while ended < NUM_SHORT_REQUESTS:
        batch = await side.next_batch()
        for _ in range(min(len(batch.outputs), NUM_SHORT_REQUESTS - NUM_CONCURRENT - ended)):
            await side.add(1)
        ended += len(batch.outputs)
    return (time.process_time() - started) / NUM_SHORT_REQUESTS * 1e6


@contextmanager
def stand_in(spec: StandInSpec) -> Iterator[None]:
    """Run the engines' process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.client_stand_in"], stdin=subprocess.PIPE, env=child_environment()
    )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec))
        process.stdin.close()
        yield
    finally:
        process.kill()
        process.wait()


def make_config(folder: Path) -> ClientConfig:
    """Return the configuration of the client under test."""
    return ClientConfig(
        client_id=ClientId(0, 1),
        report_endpoint=ipc_endpoint(folder, "reports"),
        state_endpoint=ipc_endpoint(folder, "states"),
        request_bind=ipc_endpoint(folder, "requests0"),
        output_bind=ipc_endpoint(folder, "outputs0"),
        build_id=BUILD_ID,
        config_hash=CONFIG_HASH,
    )


Measure = Callable[[Side], Coroutine[Any, Any, float]]


async def run(num_rounds: int, *, quiet: bool) -> list[Row]:
    """Measure both sides in turn; return the medians."""
    figures: dict[tuple[str, str], list[float]] = {}
    measures: dict[str, Measure] = {"token": us_per_token, "request": us_per_request}
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        folder = Path(name)
        config = make_config(folder)
        bare_info = ClientInfo(ClientId(1, 1), ipc_endpoint(folder, "requests1"), ipc_endpoint(folder, "outputs1"))
        sides: list[Side] = [Client(config), BareLoop(bare_info)]
        spec = StandInSpec(
            clients=[ClientInfo(config.client_id, config.request_bind, config.output_bind), bare_info],
            report_endpoint=config.report_endpoint,
            state_endpoint=config.state_endpoint,
        )
        with stand_in(spec):
            for side in sides:
                await side.wait_ready()
            for _ in track(range(num_rounds), "rounds", disable=quiet):
                for unit, measure in measures.items():
                    for side in sides:
                        figures.setdefault((side.name, unit), []).append(await measure(side))
            for side in sides:
                await side.aclose()
    bars = {"token": MAX_US_PER_TOKEN, "request": MAX_US_PER_REQUEST}
    return [
        Row(
            f"client CPU per {unit}",
            "us",
            statistics.median(figures[Client.name, unit]),
            statistics.median(figures[BareLoop.name, unit]),
            BareLoop.name,
            bar=bar,
            bar_on="value",
        )
        for unit, bar in bars.items()
    ]


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each side (default: %(default)s)")
    options = parse_arguments(__doc__ or "", parser)
    rows = uvloop.run(run(options.rounds, quiet=options.json))
    return finish("client: 256 requests in flight, 2 engines, 128 outputs per message, saturated", rows, options)


if __name__ == "__main__":
    sys.exit(main())
