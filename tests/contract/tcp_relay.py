"""A line that can be cut: a relay between what a client advertises and what it bound, which resets connections."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

RELAY_HOST = "127.0.0.2"
"""Also loopback, so a relay can take the very port that its client has on 127.0.0.1."""

_NO_LINGER = struct.pack("ii", 1, 0)  # closing then sends a reset, and what was under way is lost
_CHUNK_BYTES = 4096


class TcpRelay:
    """Passes on what comes for one port. num_opened, num_resets: connections so far, and how often all were cut."""

    def __init__(self, port: int) -> None:
        self.num_opened = 0
        self.num_resets = 0
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._bytes_to_reset = 0
        self._bytes_left = 0
        self._resets_left = 0

    def reset_every(self, num_bytes: int, times: int) -> None:
        """Reset all connections whenever so many bytes have passed; so many times."""
        self._bytes_to_reset = self._bytes_left = num_bytes
        self._resets_left = times

    def reset(self) -> None:
        """Reset all connections now, at both their ends."""
        for end in self._ends:
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            end.transport.abort()
        self.num_resets += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator["TcpRelay"]:
        """Relay for the duration of the block."""
        server = await asyncio.start_server(self._accept, RELAY_HOST, self._port)
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._relay(reader, writer), name="relay")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ends = {writer, onward_writer}
        self._ends |= ends
        self.num_opened += 1
        back = asyncio.create_task(self._pass_on(onward_reader, writer), name="relay back")
        try:
            await self._pass_on(reader, onward_writer)
        finally:
            self._ends -= ends
            for end in ends:
                end.close()
            await asyncio.gather(back, *(end.wait_closed() for end in ends), return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # an end is gone
            while chunk := await reader.read(_CHUNK_BYTES):
                if self._is_reset_due(len(chunk)):
                    self.reset()  # and this chunk is lost for certain
                    return
                writer.write(chunk)
                await writer.drain()

    def _is_reset_due(self, num_bytes: int) -> bool:
        self._bytes_left -= num_bytes
        if not self._resets_left or self._bytes_left > 0:
            return False
        self._bytes_left = self._bytes_to_reset
        self._resets_left -= 1
        return True
