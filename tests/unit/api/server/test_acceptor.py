"""Connections of one listening socket, taken by several acceptors, as several processes would."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from metrics.shared_status import StatusRow
from orchestrator.api.server import acceptor as acceptor_module
from orchestrator.api.server.acceptor import Acceptor

DEADLINE_S = 10.0


class IndexSender(asyncio.Protocol):
    """Sends which process took the connection."""

    def __init__(self, index: int, on_lost: Callable[[], None]) -> None:
        self._index = index
        self._on_lost = on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"%d" % self._index)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()


class FullTable(socket.socket):
    """A listening socket of a process that has no descriptor left for a while."""

    num_refusals = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_refusals:
            self.num_refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class Acceptors:
    """Acceptors on one port, each with a copy of the socket of its own, as children inherit it."""

    def __init__(self, num_processes: int, kind: type[socket.socket] = socket.socket) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.rows = [StatusRow(index) for index in range(num_processes)]
        for row in self.rows:
            row.pid, row.heartbeat_at = 7, float("inf")
        self.acceptors = [self._acceptor(row, kind) for row in self.rows]

    @property
    def counts(self) -> list[int]:
        return [int(row.num_connections) for row in self.rows]

    async def connect(self) -> tuple[int, asyncio.StreamWriter]:
        """Return who took a new connection, and its writer."""
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(*self.address)
            return int(await reader.readexactly(1)), writer

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - rows are plain numbers
                await asyncio.sleep(0)

    def close(self) -> None:
        self._listener.close()

    def _acceptor(self, row: StatusRow, kind: type[socket.socket]) -> Acceptor:
        copy = kind(fileno=self._listener.dup().detach())
        siblings = [other for other in self.rows if other is not row]
        return Acceptor(copy, lambda on_lost: IndexSender(row.index, on_lost), row, siblings)


@asynccontextmanager
async def acceptors(num_processes: int, kind: type[socket.socket] = socket.socket) -> AsyncIterator[Acceptors]:
    built = Acceptors(num_processes, kind)
    for acceptor in built.acceptors:
        acceptor.start()
    try:
        yield built
    finally:
        for acceptor in built.acceptors:
            await acceptor.aclose()
        built.close()
        await built.until(lambda: sum(built.counts) == 0)


async def end(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
        await writer.wait_closed()


async def test_connections_one_after_another_go_round() -> None:
    async with acceptors(3) as built:
        taken = []
        for _ in range(9):
            index, writer = await built.connect()
            taken.append(index)
            await end(writer)
        assert sorted(taken) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


async def test_many_at_once_are_all_taken_and_evenly() -> None:
    async with acceptors(3) as built:
        taken = await asyncio.gather(*(built.connect() for _ in range(90)))
        assert sum(built.counts) == 90
        assert max(built.counts) - min(built.counts) <= 8
        await end(*(writer for _, writer in taken))
        await built.until(lambda: built.counts == [0, 0, 0])


async def test_what_is_the_turn_of_one_that_takes_nothing_is_taken_by_another() -> None:
    async with acceptors(2) as built:
        built.acceptors[1].close()  # it still shows itself on the shared status
        taken = [await built.connect() for _ in range(20)]
        assert {index for index, _ in taken} == {0}
        await end(*(writer for _, writer in taken))


async def test_without_descriptors_it_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "_NO_ROOM_PAUSE_S", 0.01)
    async with acceptors(1, FullTable) as built:
        index, writer = await built.connect()
        assert index == 0
        await end(writer)


async def test_nothing_is_taken_after_close() -> None:
    async with acceptors(1) as built:
        built.acceptors[0].close()
        built.acceptors[0].close()
        built.close()
        with pytest.raises(ConnectionRefusedError):
            await built.connect()


async def test_a_connection_that_cannot_be_opened_is_closed_logged_and_not_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = StatusRow(0)

    def fail(_on_lost: Callable[[], None]) -> asyncio.Protocol:
        raise RuntimeError("broken on purpose")

    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = Acceptor(listener, fail, row, ())
    acceptor.start()
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b""
    await end(writer)
    await acceptor.aclose()
    assert row.num_connections == 0
    assert "broken on purpose" in caplog.text
