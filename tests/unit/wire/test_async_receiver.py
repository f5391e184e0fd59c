"""The receiver sees every message although the descriptor it watches is edge-triggered."""

import asyncio
import random
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine.wire.codec import Decoder, encode
from engine.wire.endpoints import ipc_endpoint
from engine.wire.ids import ClientId
from engine.wire.messages import UtilityRequest
from engine.wire.sockets import AsyncReceiver, SendOutcome, bind, connect, send_nowait
from engine.wire.tensors import Frames
from tests.unit.wire.conftest import Sockets

Socket = zmq.Socket[bytes]
DEADLINE_S = 20.0


class Inbox:
    """Collects messages and reports when enough have come."""

    def __init__(self) -> None:
        self.messages: list[Frames] = []
        self._arrived = asyncio.Event()

    def on_message(self, frames: Frames) -> None:
        self.messages.append(frames)
        self._arrived.set()

    async def wait_for(self, num_messages: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.messages) < num_messages:
                self._arrived.clear()
                await self._arrived.wait()


@pytest.fixture
def channel(make: Sockets, run_dir: Path) -> tuple[Socket, Socket]:
    """Return a PULL and the PUSH connected to it."""
    pull, push = make(zmq.PULL), make(zmq.PUSH)
    connect(push, bind(pull, ipc_endpoint(run_dir, "channel")))
    return pull, push


@pytest.mark.parametrize("already_waiting", [True, False])
async def test_a_burst_is_seen_whole_though_it_is_one_edge(
    channel: tuple[Socket, Socket], already_waiting: bool
) -> None:
    pull, push = channel
    inbox = Inbox()
    receiver = None if already_waiting else AsyncReceiver(pull, inbox.on_message)
    for number in range(1_000):
        push.send(b"%d" % number)
    receiver = receiver or AsyncReceiver(pull, inbox.on_message)
    await inbox.wait_for(1_000)
    assert inbox.messages == [[b"%d" % number] for number in range(1_000)]
    receiver.close()


async def test_messages_that_come_one_by_one_are_all_seen(channel: tuple[Socket, Socket]) -> None:
    pull, push = channel
    inbox = Inbox()
    receiver = AsyncReceiver(pull, inbox.on_message)
    for number in range(1, 101):
        push.send(b"x")
        await inbox.wait_for(number)
    receiver.close()


async def test_a_poke_after_a_send_recovers_the_edge_that_the_send_swallowed(make: Sockets, run_dir: Path) -> None:
    router, dealer = make(zmq.ROUTER), make(zmq.DEALER, identity=b"E1")
    connect(dealer, bind(router, ipc_endpoint(run_dir, "channel")))
    inbox = Inbox()
    receiver = AsyncReceiver(router, inbox.on_message)
    dealer.send(b"hello")
    await inbox.wait_for(1)
    for number in range(2, 102):
        dealer.send(b"x")
        assert router.poll(int(DEADLINE_S * 1_000))  # it is there, and looking has already taken the edge away
        assert send_nowait(router, [b"E1", b"y"]) is SendOutcome.ACCEPTED
        receiver.poke()
        await inbox.wait_for(number)
    receiver.close()


async def test_one_busy_socket_leaves_turns_to_the_rest_of_the_loop(channel: tuple[Socket, Socket]) -> None:
    pull, push = channel
    for _ in range(100):
        push.send(b"x")
    inbox = Inbox()
    seen_at_each_turn: list[int] = []
    receiver = AsyncReceiver(pull, inbox.on_message, max_per_turn=10)
    while len(inbox.messages) < 100:
        await asyncio.sleep(0)
        seen_at_each_turn.append(len(inbox.messages))
    assert max(b - a for a, b in zip([0, *seen_at_each_turn], seen_at_each_turn, strict=False)) <= 20
    receiver.close()


async def test_a_callback_that_raises_costs_its_own_message_only(channel: tuple[Socket, Socket]) -> None:
    pull, push = channel
    inbox = Inbox()
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reported.append(report))
    receiver = AsyncReceiver(pull, _failing_on(b"bad", inbox))
    for word in (b"bad", b"good", b"bad", b"good"):
        push.send(word)
    await inbox.wait_for(2)
    assert [str(report["exception"]) for report in reported] == ["bad", "bad"]
    receiver.close()


def _failing_on(word: bytes, inbox: Inbox) -> Callable[[Frames], None]:
    def on_message(frames: Frames) -> None:
        if frames == [word]:
            raise ValueError(word.decode())
        inbox.on_message(frames)

    return on_message


async def test_nothing_is_delivered_after_close(channel: tuple[Socket, Socket]) -> None:
    pull, push = channel
    inbox = Inbox()
    receiver = AsyncReceiver(pull, inbox.on_message)
    push.send(b"x")
    receiver.close()
    receiver.close()
    receiver.poke()
    assert pull.poll(int(DEADLINE_S * 1_000))
    await asyncio.sleep(0)
    assert not inbox.messages


async def test_closing_from_the_callback_keeps_the_rest_in_the_socket(channel: tuple[Socket, Socket]) -> None:
    pull, push = channel
    for _ in range(3):
        push.send(b"x")
    inbox = Inbox()

    def take_one(frames: Frames) -> None:
        inbox.on_message(frames)
        receiver.close()

    receiver = AsyncReceiver(pull, take_one)
    await inbox.wait_for(1)
    await asyncio.sleep(0)
    assert len(inbox.messages) == 1
    assert pull.poll(int(DEADLINE_S * 1_000))


def test_a_receiver_outlives_its_loop_without_a_complaint(channel: tuple[Socket, Socket]) -> None:
    async def make() -> AsyncReceiver:
        return AsyncReceiver(channel[0], lambda _: None)

    asyncio.run(make()).close()


async def test_a_slow_reader_gets_every_byte_of_messages_of_all_sizes(make: Sockets, run_dir: Path) -> None:
    """A sender that reused its buffer would overwrite what ZeroMQ's I/O thread still reads."""
    num_messages = 5_000
    pull, push = make(zmq.PULL, high_water_mark=4), make(zmq.PUSH, high_water_mark=4)
    connect(push, bind(pull, ipc_endpoint(run_dir, "channel")))
    inbox = Inbox()
    decoder = Decoder[UtilityRequest](UtilityRequest)

    def check(frames: Frames) -> None:
        checksum, payload = decoder.decode(frames[0]).args
        inbox.on_message([b"good" if zlib.crc32(payload) == checksum else b"broken"])

    receiver = AsyncReceiver(pull, check)
    num_full: list[int] = []
    sender = threading.Thread(target=lambda: num_full.append(_send_all(push, num_messages)))
    sender.start()
    await inbox.wait_for(num_messages)
    sender.join()
    assert inbox.messages == [[b"good"]] * num_messages
    assert num_full[0] > 0  # the reader was the slower one
    receiver.close()


def _send_all(push: Socket, num_messages: int) -> int:
    """Send messages of 1 byte to 1 MB, sizes log-uniform; return how often the pipe was full."""
    rng = random.Random(3)
    material = rng.randbytes(2_000_000)
    num_full = 0
    for number in range(num_messages):
        start = rng.randrange(1_000_000)
        payload = material[start : start + int(10 ** rng.uniform(0, 6))]
        frame = encode(UtilityRequest(ClientId(0, 1), number, number, "x", [zlib.crc32(payload), payload]))
        while send_nowait(push, [frame]) is SendOutcome.FULL:
            num_full += 1
            push.poll(int(DEADLINE_S * 1_000), zmq.POLLOUT)
    return num_full
