"""Open streams that note when each of their tokens came, and nothing else."""

import asyncio
import json
import time
from typing import Any, cast

_EVENT = b"data: {"
_ENDED = b"0\r\n\r\n"


class TimedStream(asyncio.Protocol):
    """One streamed request on a connection of its own.

    times: ``time.monotonic()`` of every chunk, tokens that came together counted once. has_begun: set with the first.
    failed: it ended in any other way than by its last chunk, or with an error.
    """

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.times: list[float] = []
        self.has_begun = asyncio.Event()
        self.failed = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        self._request = head.encode() + b"\r\n\r\n" + content

    async def open(self, url: str) -> None:
        """Connect and ask."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        await asyncio.get_running_loop().create_connection(lambda: self, host, int(port))

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note the time of tokens, and the end."""
        if _EVENT in data:
            self.times.append(time.monotonic())
            self.has_begun.set()
        self.failed = self.failed or b'"error"' in data
        if data.endswith(_ENDED):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take an end without a last chunk for a failure, unless we hung up ourselves."""
        if not self.ended.done():
            self.failed = self.failed or not self._transport.is_closing() or exc is not None
            self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
