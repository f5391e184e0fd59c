"""Lines with keys: members are let in, everybody else is turned away, counted and logged once, and hears nothing."""

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from engine.wire.curve import ZapAuthenticator, draw_keys
from engine.wire.endpoints import WireSecurity, tcp_endpoint
from engine.wire.sockets import SendOutcome, bind, connect, make_socket, send_nowait
from tests.unit.wire.conftest import Sockets

WAIT_MS = 10_000
KEYS = draw_keys()
FOREIGN = draw_keys()
LOOPBACK = tcp_endpoint("127.0.0.1")

Context = zmq.Context[zmq.Socket[bytes]]


def eventually(look: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_MS / 1000
    while not look():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class Guarded:
    """A PULL with keys and its ZAP authenticator, in a context of its own."""

    def __init__(self, keys: WireSecurity = KEYS, *, is_guarded: bool = True) -> None:
        self.context: Context = zmq.Context()
        self.socket = make_socket(self.context, zmq.PULL, security=keys)
        self.authenticator = ZapAuthenticator(self.context, keys, {"outputs": self.socket}) if is_guarded else None
        self.endpoint = bind(self.socket, LOOPBACK)

    @property
    def num_refused(self) -> int:
        assert self.authenticator is not None
        return self.authenticator.refused["outputs"]


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    made = Guarded()
    yield made
    made.context.destroy(linger=0)


def knock(make: Sockets, endpoint: str, security: WireSecurity | None, *messages: bytes) -> None:
    """Connect and send something."""
    push = make(zmq.PUSH, security=security)
    connect(push, endpoint)
    for message in messages:
        push.send(message)


STRANGERS = {
    "no key at all": None,
    "keys of another deployment": FOREIGN,
    "the server's key but no member's": msgspec.structs.replace(FOREIGN, server_public=KEYS.server_public),
}


@pytest.mark.parametrize("keys", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_peer_without_the_key_is_turned_away_and_members_go_on(
    make: Sockets, guarded: Guarded, keys: WireSecurity | None, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        knock(make, guarded.endpoint, keys, b"let me in")
    eventually(lambda: guarded.num_refused >= 3)
    knock(make, guarded.endpoint, KEYS.for_connecting(), b"hello", b"again")
    assert [guarded.socket.recv() for _ in range(2) if guarded.socket.poll(WAIT_MS)] == [b"hello", b"again"]
    assert not guarded.socket.poll(0)
    assert sum("refused a peer" in record.message for record in caplog.records) == 1


def test_a_subscriber_without_the_key_hears_nothing(make: Sockets) -> None:
    publisher = make(zmq.XPUB, security=KEYS)
    authenticator = ZapAuthenticator(make.context, KEYS, {"state": publisher})
    endpoint = bind(publisher, LOOPBACK)
    hopefuls = [make(zmq.XSUB, topics=[b"G"], security=keys) for keys in STRANGERS.values()]
    member = make(zmq.XSUB, topics=[b"G"], security=KEYS)
    for subscriber in (*hopefuls, member):
        connect(subscriber, endpoint)
    eventually(lambda: authenticator.refused["state"] >= len(hopefuls))
    assert publisher.poll(WAIT_MS)
    assert publisher.recv() == b"\x01G"
    publisher.send_multipart([b"G", b"loads"])
    assert member.poll(WAIT_MS)
    assert not any(hopeful.poll(0) for hopeful in hopefuls)


def test_a_member_sends_nothing_to_a_server_that_is_not_ours(make: Sockets) -> None:
    impostor = Guarded(FOREIGN)
    knock(make, impostor.endpoint, KEYS, b"hello")
    eventually(lambda: impostor.num_refused)
    assert not impostor.socket.poll(0)
    impostor.context.destroy(linger=0)


def test_requests_and_handshakes_pass_over_a_router_with_keys(make: Sockets) -> None:
    router = make(zmq.ROUTER, security=KEYS)
    ZapAuthenticator(make.context, KEYS, {"requests": router})
    dealer = make(zmq.DEALER, identity=b"engine", security=KEYS.for_connecting())
    connect(dealer, bind(router, LOOPBACK))
    dealer.send(b"ready")
    assert router.poll(WAIT_MS)
    assert router.recv_multipart() == [b"engine", b"ready"]
    assert send_nowait(router, [b"engine", b"add"]) is SendOutcome.ACCEPTED
    assert dealer.poll(WAIT_MS)
    assert dealer.recv() == b"add"


def test_without_an_authenticator_nobody_is_let_in(make: Sockets) -> None:
    """Were there a moment without one, ZeroMQ's default would let anybody in who knows the server's key."""
    unguarded = Guarded(is_guarded=False)
    knock(make, unguarded.endpoint, KEYS, b"hello")
    assert not unguarded.socket.poll(300)
    unguarded.context.destroy(linger=0)


def test_random_bytes_and_half_open_connections_keep_nobody_out(make: Sockets, guarded: Guarded) -> None:
    port = int(guarded.endpoint.rpartition(":")[2])
    rng = random.Random(3)
    with contextlib.ExitStack() as open_connections:
        for size in (0, 1, 10, 64, 300) * 10:
            connection = open_connections.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(ConnectionError):
                connection.sendall(rng.randbytes(size))
        knock(make, guarded.endpoint, KEYS, b"hello")
        assert guarded.socket.poll(WAIT_MS)
        assert guarded.socket.recv() == b"hello"


def test_keys_are_not_shown_and_engines_do_not_get_the_servers_secret() -> None:
    spec_keys = KEYS.for_connecting()
    assert spec_keys.server_secret is None
    assert spec_keys.member_secret == KEYS.member_secret
    secrets = (KEYS.server_secret, KEYS.member_secret, KEYS.server_public, KEYS.member_public)
    assert not any(str(secret) in repr(KEYS) + str(KEYS) + f"{[KEYS]}" for secret in secrets)
    assert msgspec.json.decode(msgspec.json.encode(KEYS), type=WireSecurity) == KEYS
    assert draw_keys() != KEYS
