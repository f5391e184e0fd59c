"""Sockets are made with their options, name what is wrong with an address, and return what became of a send."""

import re
from pathlib import Path

import pytest
import zmq

from engine.wire.endpoints import MAX_IPC_PATH, advertised, ipc_endpoint, tcp_endpoint
from engine.wire.errors import AddressError
from engine.wire.ids import EngineId
from engine.wire.sockets import MAX_INBOUND_BYTES, MAX_MESSAGE_BYTES, SendOutcome, bind, connect, send_nowait
from tests.unit.wire.conftest import Sockets

WAIT_MS = 5_000
IDENTITY = EngineId(0, 1).to_identity()


def test_ipv6_hosts_are_bracketed() -> None:
    assert tcp_endpoint("::1", 5) == "tcp://[::1]:5"
    assert tcp_endpoint("127.0.0.1", 5) == "tcp://127.0.0.1:5"
    assert tcp_endpoint("head.example") == "tcp://head.example:0"


def test_a_path_too_long_for_a_unix_socket_is_refused_with_the_way_out(run_dir: Path) -> None:
    room = MAX_IPC_PATH - len(str(run_dir)) - 1
    assert ipc_endpoint(run_dir, "x" * room).startswith("ipc:///")
    with pytest.raises(AddressError, match="shorter run folder"):
        ipc_endpoint(run_dir, "x" * (room + 1))
    with pytest.raises(AddressError):
        ipc_endpoint(run_dir, "é" * (room // 2 + 1))  # two bytes each


def test_port_zero_publishes_the_port_the_system_gave(make: Sockets) -> None:
    endpoint = bind(make(zmq.PULL), tcp_endpoint("127.0.0.1"))
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", endpoint)


def test_a_taken_port_is_named(make: Sockets) -> None:
    endpoint = bind(make(zmq.PULL), tcp_endpoint("127.0.0.1"))
    with pytest.raises(AddressError, match=re.escape(f"cannot bind {endpoint} (--port-range): Address already in use")):
        bind(make(zmq.PULL), endpoint)


def test_of_a_range_of_ports_the_first_free_one_is_taken(make: Sockets) -> None:
    first = bind(make(zmq.PULL), tcp_endpoint("127.0.0.1"))
    low = int(first.rpartition(":")[2])
    ports = tcp_endpoint("127.0.0.1", f"{low}-{low + 20}")
    second = bind(make(zmq.PULL), ports)
    assert low < int(second.rpartition(":")[2]) <= low + 20
    with pytest.raises(AddressError, match=re.escape(f":{low}-{low} (--port-range): Address already in use")):
        bind(make(zmq.PULL), tcp_endpoint("127.0.0.1", f"{low}-{low}"))


def test_an_address_that_is_not_this_hosts_names_the_option_that_says_what_is(make: Sockets) -> None:
    for host in ("192.0.2.77", "no-such-interface"):
        with pytest.raises(AddressError, match=f"cannot bind tcp://{host}:0 .--interface"):
            bind(make(zmq.PULL), tcp_endpoint(host))


def test_a_network_interface_is_bound_by_its_ipv4_address(make: Sockets) -> None:
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", bind(make(zmq.PULL), tcp_endpoint("lo")))


def test_what_is_bound_is_advertised_under_another_host() -> None:
    assert advertised("tcp://0.0.0.0:71", "10.0.0.9") == "tcp://10.0.0.9:71"
    assert advertised("tcp://0.0.0.0:71", "fe80::1") == "tcp://[fe80::1]:71"
    assert advertised("tcp://10.0.0.1:71", None) == "tcp://10.0.0.1:71"
    assert advertised("ipc:///tmp/x", "10.0.0.9") == "ipc:///tmp/x"


def test_addresses_that_cannot_be_are_named(make: Sockets, run_dir: Path) -> None:
    socket = make(zmq.PUSH)
    with pytest.raises(AddressError, match="cannot bind"):
        bind(socket, ipc_endpoint(run_dir / "missing", "x"))
    with pytest.raises(AddressError, match="cannot connect to nonsense"):
        connect(socket, "nonsense")


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.DEALER, zmq.PUSH, zmq.PULL, zmq.XPUB, zmq.XSUB])
def test_every_socket_is_bounded_and_does_not_linger(make: Sockets, kind: int) -> None:
    socket = make(kind, high_water_mark=7)
    assert socket.get(zmq.LINGER) == 0
    assert (socket.get(zmq.SNDHWM), socket.get(zmq.RCVHWM)) == (7, 7)
    assert socket.get(zmq.MAXMSGSIZE) == MAX_INBOUND_BYTES.get(kind, MAX_MESSAGE_BYTES)


def test_a_send_to_an_unknown_engine_is_not_connected(make: Sockets) -> None:
    router = make(zmq.ROUTER)
    bind(router, tcp_endpoint("127.0.0.1"))
    assert send_nowait(router, [IDENTITY, b"x"]) is SendOutcome.NOT_CONNECTED


def test_a_send_to_an_engine_that_does_not_read_ends_up_full(make: Sockets, run_dir: Path) -> None:
    router = make(zmq.ROUTER, high_water_mark=1)
    dealer = make(zmq.DEALER, identity=IDENTITY, high_water_mark=1)
    connect(dealer, bind(router, ipc_endpoint(run_dir, "channel")))
    dealer.send(b"hello")
    assert router.poll(WAIT_MS)
    outcomes = [send_nowait(router, [IDENTITY, b"x" * 100_000]) for _ in range(1_000)]
    assert outcomes[0] is SendOutcome.ACCEPTED
    assert outcomes[-1] is SendOutcome.FULL


def test_a_send_to_no_peer_is_full_and_other_errors_are_raised(make: Sockets) -> None:
    socket = make(zmq.PUSH)
    assert send_nowait(socket, [b"x"]) is SendOutcome.FULL
    socket.close()
    with pytest.raises(zmq.ZMQError):
        send_nowait(socket, [b"x"])


def test_a_reconnected_engine_takes_its_name_over(make: Sockets) -> None:
    router = make(zmq.ROUTER)
    endpoint = bind(router, tcp_endpoint("127.0.0.1"))
    for word in (b"first", b"second"):
        dealer = make(zmq.DEALER, identity=IDENTITY)
        connect(dealer, endpoint)
        dealer.send(word)
        assert router.recv_multipart() == [IDENTITY, word]
        assert send_nowait(router, [IDENTITY, b"to " + word]) is SendOutcome.ACCEPTED
        assert dealer.poll(WAIT_MS)
        assert dealer.recv() == b"to " + word  # and the first one stays open, as a half-dead peer would


def test_a_subscriber_gets_its_topics_only(make: Sockets, run_dir: Path) -> None:
    publisher = make(zmq.XPUB)
    subscriber = make(zmq.XSUB, topics=[b"G"])
    connect(subscriber, bind(publisher, ipc_endpoint(run_dir, "state")))
    assert publisher.recv() == b"\x01G"
    for topic in (b"L", b"G"):
        send_nowait(publisher, [topic, b"payload"])
    assert subscriber.recv_multipart() == [b"G", b"payload"]
