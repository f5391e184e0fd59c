"""The floor of ``bench.frontend``: one timer and one write per token of a stream, on a bare uvloop server.

It answers every POST on its port with the chunks of its specification, at the pace given there.
``python -m bench.floor_server`` reads one ``FloorSpec`` as JSON on standard input and prints its port.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import cast

import uvloop

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorSpec:
    """The answer to every request. chunk: framed, written ``num_chunks`` times, once every ``interval_s`` seconds."""

    chunk: str
    num_chunks: int
    interval_s: float


class _Stream(asyncio.Protocol):
    def __init__(self, spec: FloorSpec) -> None:
        self._chunk = spec.chunk.encode()
        self._num_chunks = spec.num_chunks
        self._interval_s = spec.interval_s
        self._left = 0
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, not a subclass

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"POST"):
            self._transport.write(_HEAD)
            self._left = self._num_chunks
            self._loop.call_later(self._interval_s, self._write)

    def _write(self) -> None:
        self._left -= 1
        if self._left:
            self._transport.write(self._chunk)
            self._loop.call_later(self._interval_s, self._write)
        else:
            self._transport.write(self._chunk + _END)


async def serve(spec: FloorSpec) -> None:
    """Serve for ever; print the port first."""
    server = await asyncio.get_running_loop().create_server(lambda: _Stream(spec), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(FloorSpec(**json.loads(sys.stdin.readline()))))
