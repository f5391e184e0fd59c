"""Open streams that record when each of their tokens arrives, one by one or as a steady load."""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
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
        """Connect and send the request."""
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


_END_S = 60.0


class SteadyLoad:
    """The streams opened so far. path, body: of each; ``seed`` and the prompt's number differ."""

    def __init__(self, url: str, per_s: float, path: str, body: dict[str, Any]) -> None:
        self.streams: list[TimedStream] = []
        self.num_refused = 0
        self._url = url
        self._pause_s = 1.0 / per_s
        self._path = path
        self._body = body

    @property
    def num_failed(self) -> int:
        """Return how many were refused or did not come to their end."""
        return self.num_refused + sum(stream.failed or not stream.times for stream in self.streams)

    def longest_gap_s(self, since: float = 0.0, until: float = float("inf")) -> float:
        """Return the longest time between two tokens of one stream of which the later came within these times."""
        pairs = (pair for stream in self.streams for pair in itertools.pairwise(stream.times))
        return max((later - earlier for earlier, later in pairs if since < later <= until), default=0.0)

    def normal_gap_s(self, since: float = 0.0, until: float = float("inf")) -> float:
        """Return the median of the times between two tokens of one stream, by the same rule."""
        pairs = (pair for stream in self.streams for pair in itertools.pairwise(stream.times))
        return statistics.median(later - earlier for earlier, later in pairs if since < later <= until)

    async def run(self) -> None:
        """Open streams, one after another and whatever becomes of those before."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        for number in itertools.count():
            await asyncio.sleep(max(0.0, due - loop.time()))
            due += self._pause_s
            stream = TimedStream(self._path, self._body | {"seed": number, "prompt": f"request {number}"})
            try:
                await stream.open(self._url)
            except OSError:
                self.num_refused += 1
            else:
                self.streams.append(stream)
                stream.ended.add_done_callback(partial(_hang_up, stream))

    async def wait_ended(self) -> None:
        """Wait for the ends of all streams."""
        if self.streams:
            await asyncio.wait([stream.ended for stream in self.streams], timeout=_END_S)
        for stream in self.streams:
            stream.failed = stream.failed or not stream.ended.done()
            stream.close()


def _hang_up(stream: TimedStream, _ended: "asyncio.Future[None]") -> None:
    stream.close()  # else connections pile up on both sides


@asynccontextmanager
async def steady_load(url: str, per_s: float, **body: Any) -> AsyncIterator[SteadyLoad]:
    """Send requests for completions ``per_s`` times a second during the block, and wait for all of them after it."""
    completion = {"model": "sim", "max_tokens": 20, "ignore_eos": True, "stream": True} | body
    load = SteadyLoad(url, per_s, "/v1/completions", completion)
    opening = asyncio.create_task(load.run(), name="steady load")
    try:
        yield load
    finally:
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await load.wait_ended()
