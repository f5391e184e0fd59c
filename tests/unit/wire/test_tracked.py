"""Large frames go without a copy, and are held until ZeroMQ has let go of every one of a message."""

import hashlib
import itertools
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import zmq

from engine.wire.endpoints import ipc_endpoint
from engine.wire.sockets import MAX_MESSAGE_BYTES, SendOutcome, bind, connect, receive_nowait
from engine.wire.tensors import Buffer
from engine.wire.tracked import COPY_BELOW_BYTES, TrackedSends
from tests.unit.wire.conftest import Sockets

Socket = zmq.Socket[bytes]
DEADLINE_S = 20.0
LARGE = COPY_BELOW_BYTES


@pytest.fixture
def line(make: Sockets, run_dir: Path) -> tuple[Socket, Socket]:
    """Return a PULL and the PUSH connected to it."""
    pull, push = make(zmq.PULL), make(zmq.PUSH)
    connect(push, bind(pull, ipc_endpoint(run_dir, "line")))
    return pull, push


def receive(socket: Socket) -> list[Buffer]:
    assert socket.poll(int(DEADLINE_S * 1000))
    return receive_nowait(socket)


def wait_drained(tracked: TrackedSends) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while tracked.statistics()["pending_messages"]:
        assert time.monotonic() < deadline, "ZeroMQ never let go"
        time.sleep(0.001)
    assert tracked.statistics() == {"pending_messages": 0, "pending_bytes": 0}


def test_small_frames_are_copied_and_nothing_is_pending(line: tuple[Socket, Socket]) -> None:
    pull, push = line
    tracked = TrackedSends()
    assert tracked.send_nowait(push, [b"head", b"x" * (LARGE - 1)]) is SendOutcome.ACCEPTED
    assert len(tracked) == 0
    assert [bytes(frame) for frame in receive(pull)] == [b"head", b"x" * (LARGE - 1)]


def test_a_message_is_pending_until_all_its_frames_are_let_go(make: Sockets, run_dir: Path) -> None:
    pull, push = make(zmq.PULL), make(zmq.PUSH)
    tracked = TrackedSends()
    frames = [b"head", b"a" * LARGE, b"b" * (8 * 1024 * 1024), b"tail"]
    connect(push, endpoint := ipc_endpoint(run_dir, "late"))
    assert tracked.send_nowait(push, frames) is SendOutcome.ACCEPTED
    # Nobody listens yet, so ZeroMQ's thread cannot have let go of a frame before this looks.
    assert tracked.statistics() == {"pending_messages": 1, "pending_bytes": sum(map(len, frames))}
    bind(pull, endpoint)
    assert [bytes(frame) for frame in receive(pull)] == frames
    wait_drained(tracked)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_message_is_let_go_with_the_last_of_its_frames_in_any_order(order: tuple[int, ...]) -> None:
    released = [threading.Event() for _ in order]
    tracked = TrackedSends()
    assert tracked.send_nowait(_HoldingSocket(released), [b"x" * LARGE] * len(released)) is SendOutcome.ACCEPTED  # type: ignore[arg-type]
    for number, index in enumerate(order, start=1):
        assert tracked.statistics()["pending_messages"] == 1
        released[index].set()
        assert tracked.statistics()["pending_messages"] == (number < len(order))


class _HoldingSocket:
    """A stub of a socket that lets go of its frames one by one: ZeroMQ's own thread does so when it likes."""

    def __init__(self, released: Sequence[threading.Event]) -> None:
        self._released = iter(released)

    def send(self, frame: Buffer, flags: int, *, copy: bool, track: bool) -> zmq.MessageTracker:
        assert (copy, track) == (False, True)
        return zmq.MessageTracker(next(self._released))


def test_a_full_table_copies_instead_of_growing(line: tuple[Socket, Socket]) -> None:
    _, push = line
    tracked = TrackedSends(max_bytes=20 * LARGE)
    tracked.send_nowait(push, [b"x" * (20 * LARGE)])
    assert tracked.is_full
    assert tracked.send_nowait(push, [b"y" * (20 * LARGE)]) is SendOutcome.ACCEPTED
    assert len(tracked) == 1


def test_a_refused_message_is_not_pending(make: Sockets) -> None:
    tracked = TrackedSends()
    assert tracked.send_nowait(make(zmq.PUSH), [b"x" * LARGE, b"y" * LARGE]) is SendOutcome.FULL
    wait_drained(tracked)


def test_what_a_closed_socket_never_sent_is_let_go(make: Sockets, run_dir: Path) -> None:
    push = make(zmq.PUSH)
    connect(push, ipc_endpoint(run_dir, "nobody"))
    tracked = TrackedSends()
    assert tracked.send_nowait(push, [b"x" * LARGE]) is SendOutcome.ACCEPTED
    assert len(tracked) == 1
    push.close()
    wait_drained(tracked)


def test_nothing_is_changed_on_the_way_whatever_the_sizes(line: tuple[Socket, Socket]) -> None:
    pull, push = line
    rng = random.Random(1)
    tracked = TrackedSends()
    sent = []
    for _ in range(300):
        frames = [rng.randbytes(rng.choice((1, 1_000, LARGE - 1, LARGE, 1_000_000))) for _ in range(rng.randint(1, 3))]
        sent.append([hashlib.sha256(frame).digest() for frame in frames])
        assert tracked.send_nowait(push, frames) is SendOutcome.ACCEPTED
        del frames
        if rng.random() < 0.5:
            assert [hashlib.sha256(frame).digest() for frame in receive(pull)] == sent.pop(0)
    for digests in sent:
        assert [hashlib.sha256(frame).digest() for frame in receive(pull)] == digests
    wait_drained(tracked)


def test_frames_behind_the_first_are_views_that_outlive_their_message(line: tuple[Socket, Socket]) -> None:
    pull, push = line
    push.send_multipart([b"head", b"x" * 100_000, b""])
    head, tensor, empty = receive(pull)
    assert isinstance(head, bytes)
    assert isinstance(tensor, memoryview)
    push.send_multipart([b"head", b"y" * 100_000])
    receive(pull)
    assert bytes(tensor) == b"x" * 100_000
    assert bytes(empty) == b""


def test_a_message_of_too_many_frames_is_cut_and_the_next_one_is_whole(line: tuple[Socket, Socket]) -> None:
    pull, push = line
    shared = bytes(MAX_MESSAGE_BYTES // 4)
    TrackedSends().send_nowait(push, [b"head", *[shared] * 6])
    push.send(b"next")
    assert len(receive(pull)) == 1 + 3
    assert receive(pull) == [b"next"]
