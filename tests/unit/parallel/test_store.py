"""Members find each other's addresses in a store that answers, whatever is asked, and whose absence ends in time."""

import threading
from collections.abc import Iterator

import pytest
import zmq

from engine.parallel.store import MAX_KEYS, MAX_VALUE_BYTES, GroupStore, KeyTable, StoreError, StoreServer
from engine.wire.errors import AddressError

HOST = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    serving = StoreServer(HOST)
    yield serving
    serving.close()


def client(server: StoreServer, timeout_s: float = 30.0) -> GroupStore:
    return GroupStore(server.endpoint, timeout_s, lambda: False)


def test_what_one_sets_another_gets(server: StoreServer) -> None:
    one, other = client(server), client(server)
    one.set("a", b"\x00\xff")
    assert other.get("a") == b"\x00\xff"
    other.set("a", b"newer")
    assert one.get("a") == b"newer"
    assert [one.add("n", 2), other.add("n", 3), one.add("n", 0)] == [2, 5, 5]
    one.close()
    other.close()


def test_a_key_that_is_not_set_yet_is_sent_to_whoever_waits_for_it() -> None:
    keys = KeyTable()
    assert keys.handle(b"early", [b"get", b"k", b""]) == []
    assert keys.handle(b"other", [b"get", b"another", b""]) == []
    assert keys.handle(b"late", [b"set", b"k", b"1"]) == [(b"late", b""), (b"early", b"1")]
    assert keys.handle(b"late", [b"set", b"k", b"2"]) == [(b"late", b"")], "once"


def test_who_comes_early_waits(server: StoreServer) -> None:
    is_waiting = threading.Event()

    def must_leave() -> bool:  # polled when a reply has not come for a while
        is_waiting.set()
        return False

    early, late = GroupStore(server.endpoint, 30.0, must_leave), client(server)
    got: list[bytes] = []

    def wait() -> None:
        early.wait(["a", "b"])
        got.append(early.get("b"))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert is_waiting.wait(30)
    late.set("b", b"2")
    late.set("a", b"1")
    waiting.join(30)
    assert got == [b"2"]
    early.close()
    late.close()


def test_nobody_sets_it_in_time(server: StoreServer) -> None:
    store = client(server, timeout_s=0.05)
    with pytest.raises(StoreError, match="no answer to get a"):
        store.get("a")
    store.close()


def test_a_server_that_is_not_there_is_no_wait_for_ever(server: StoreServer) -> None:
    server.close()
    store = client(server, timeout_s=0.05)
    with pytest.raises(StoreError, match="in time"):
        store.set("a", b"")
    store.close()


def test_who_is_told_to_leave_leaves(server: StoreServer) -> None:
    store = GroupStore(server.endpoint, 3600.0, lambda: True)
    with pytest.raises(StoreError, match="ordered to leave"):
        store.get("a")
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("a")


def test_a_host_that_is_not_here_cannot_be_served() -> None:
    with pytest.raises(AddressError, match=r"192\.0\.2\.1"):
        StoreServer("192.0.2.1")


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"get"], [b"get", b"k"], [b"put", b"k", b""], [b"add", b"k", b"-1"], [b"add", b"k", b"9" * 5000]],
)
def test_what_makes_no_sense_is_not_answered(frames: list[bytes]) -> None:
    keys = KeyTable()
    assert keys.handle(b"peer", frames) == []
    assert len(keys) == 0


def test_numbers_are_not_added_to_what_is_none() -> None:
    keys = KeyTable()
    keys.handle(b"peer", [b"set", b"k", b"text"])
    assert keys.handle(b"peer", [b"add", b"k", b"1"]) == []
    assert keys.handle(b"peer", [b"set", b"k", b"x" * (MAX_VALUE_BYTES + 1)]) == []
    assert keys.handle(b"peer", [b"get", b"k", b""]) == [(b"peer", b"text")]


def test_keys_are_bounded_and_the_oldest_goes() -> None:
    keys = KeyTable()
    for number in range(MAX_KEYS + 5):
        keys.handle(b"peer", [b"set", b"%d" % number, b""])
    assert len(keys) == MAX_KEYS
    assert keys.handle(b"peer", [b"get", b"4", b""]) == []
    assert keys.handle(b"peer", [b"get", b"5", b""]) == [(b"peer", b"")]


def test_malformed_requests_do_not_end_the_server(server: StoreServer) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    unknown = context.socket(zmq.DEALER)
    unknown.connect(server.endpoint)
    for frames in ([b""], [b"\xff" * 100] * 7, [b"get", b"\xff\xfe", b""], [b"set", b"k", b"x" * 100_000]):
        unknown.send_multipart(frames)
    unknown.send_multipart([b"set", b"k", b""])
    assert unknown.poll(20_000), "an answer to what made sense"
    context.destroy(linger=0)
    store = client(server)
    assert store.get("k") == b""
    store.close()
