"""Floods on every port of a deployment whose channels are plain TCP: it serves on and counts what it drops."""

import contextlib
import itertools
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest
import zmq

from engine.wire.codec import encode
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import (
    GROUP_TOPIC,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    EngineReport,
    FinishReason,
)
from engine.wire.sockets import connect, make_socket
from engine.wire.states import EnginePhase
from tests.integration.serving import HTTP, Deployment, chat, deployment, eventually, ranks_of
from tests.unit.wire.mutations import mutations

PLAIN_TCP = ("--engine", "sim", "--executor", "local", "--data-parallel-size", "2", "--sim-step-ms", "2")
CHANNELS = ("--advertise-host", "127.0.0.1", "--wire-security", "none")
NUM_CONNECTIONS = 1000
NUM_MESSAGES = 500
BIG_FRAME = bytes(50_000_000)

UNKNOWN = EngineId(77, 1)
UNKNOWN_MESSAGES = [
    encode(EngineReady(UNKNOWN, "0.1", "cafe", 9, 9, 9, 9, "cpu", "none", "n", 1)),
    encode(EngineCoreOutputs(UNKNOWN, ClientId(9, 9), 1, 1, 1, [EngineCoreOutput(1, 0, 0, 0, [1], FinishReason.STOP)])),
    encode(EngineReport(UNKNOWN, 1, 0, 0, 0, 0, EnginePhase.IDLE, 0, False, {}, Load())),
]

Send = Callable[[list[bytes]], object]


@pytest.fixture(scope="module")
def served() -> Iterator[Deployment]:
    with deployment(*PLAIN_TCP, *CHANNELS) as served:
        served.wait_ready()
        yield served


class Traffic:
    """Chats one after the other in a thread, for as long as the block lasts; each must be answered in full."""

    def __init__(self, url: str) -> None:
        self.num_answered = 0
        self.failure: Exception | None = None
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Traffic":
        self._thread.start()
        eventually(lambda: self.num_answered)
        return self

    def wait_answer(self) -> None:
        """Wait for the answer to a request that is sent from now on."""
        before = self.num_answered
        eventually(lambda: self.failure or self.num_answered > before + 1)  # the next one may be under way

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                assert chat(self._url, max_tokens=20) == "length"
                self.num_answered += 1
        except (AssertionError, httpx.HTTPError) as error:
            self.failure = error


def channel_ports(served: Deployment, url: str) -> list[int]:
    return sorted(set().union(*served.listening().values()) - {int(url.rpartition(":")[2])})


def pids(served: Deployment) -> set[int]:
    return {process.pid for process in served.processes()}


@contextlib.contextmanager
def many_connections(port: int, rng: random.Random) -> Iterator[None]:
    """Hold many connections open during the block, each of which has sent something that is no ZMTP greeting."""
    greetings = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", rng.randbytes(64), b"\x16\x03\x01\x02"]
    with contextlib.ExitStack() as connections:
        for number in range(NUM_CONNECTIONS):
            connection = connections.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(ConnectionError):
                connection.sendall(greetings[number % len(greetings)])
        yield


def send_mutations(port: int, rng: random.Random) -> None:
    """Send everything to a port that a peer of some kind could: which kind listens there is not known outside."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = make_socket(context, zmq.DEALER, identity=rng.randbytes(9))
    impostor = make_socket(context, zmq.DEALER, identity=UNKNOWN.to_identity())
    push = make_socket(context, zmq.PUSH)
    subscriber = make_socket(context, zmq.XSUB, topics=[GROUP_TOPIC])
    frames = mutations(UNKNOWN_MESSAGES, seed=rng.randrange(1000))
    for peer in (dealer, impostor, push, subscriber):
        connect(peer, f"tcp://127.0.0.1:{port}")
        for message in _messages(frames, rng):
            with contextlib.suppress(zmq.Again):  # no socket of the other kind is there
                peer.send_multipart(message, zmq.NOBLOCK)
    context.destroy(linger=200)


def _messages(frames: Iterator[bytes], rng: random.Random) -> Iterator[list[bytes]]:
    yield from ([b""], [b"", b"", b""], [BIG_FRAME], *([frame] for frame in UNKNOWN_MESSAGES))
    for frame in itertools.islice(frames, NUM_MESSAGES):
        yield [frame] * rng.choice((1, 1, 1, 2, 3))


def test_a_flood_on_every_channel_is_survived_counted_and_logged_once_per_peer_and_kind(served: Deployment) -> None:
    url, rng = served.wait_ready(), random.Random(8)
    before, ports = pids(served), channel_ports(served, url)
    assert len(ports) == 4
    with Traffic(url) as traffic:
        for port in ports:
            send_mutations(port, rng)
            with many_connections(port, rng):
                traffic.wait_answer()
        eventually(lambda: len(_dropped(url)) >= 3)
    assert pids(served) == before, "every process is the one it was"
    eventually(lambda: {rank["state"] for rank in ranks_of(url).values()} == {"ready"})
    assert sum(_dropped(url).values()) > NUM_MESSAGES
    lines = Counter(line.partition("dropped ")[2].partition(":")[0] for line in served.stderr.splitlines())
    del lines[""]
    assert set(lines.values()) == {1}, "one line per peer and kind"
    assert all(_resident(pid) < 600 * 1024 * 1024 for pid in before)


def _dropped(url: str) -> dict[str, int]:
    statistics = HTTP.get(f"{url}/v1/cluster").json()["statistics"]
    kinds = ("malformed_handshakes", "malformed_outputs", "misdirected_outputs", "stale_outputs")
    return {kind: statistics[kind] for kind in kinds if statistics.get(kind)}


def _resident(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def test_many_open_connections_to_the_http_port_keep_no_request_out(served: Deployment) -> None:
    url = served.wait_ready()
    before = pids(served)
    with Traffic(url) as traffic, many_connections(int(url.rpartition(":")[2]), random.Random(9)):
        traffic.wait_answer()
    assert pids(served) == before
