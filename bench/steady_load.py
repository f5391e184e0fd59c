"""So many streamed requests a second, for as long as something else is looked at."""

import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from bench.timed_streams import TimedStream

_END_S = 60.0


class SteadyLoad:
    """Streams that were opened so far. path, body: of each; ``seed`` and the prompt's number differ."""

    def __init__(self, url: str, per_s: float, path: str, body: dict[str, Any]) -> None:
        self.streams: list[TimedStream] = []
        self.num_refused = 0
        self._url = url
        self._pause_s = 1.0 / per_s
        self._path = path
        self._body = body

    @property
    def num_failed(self) -> int:
        """Return how many were not let in or did not come to their end."""
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
        """Open streams, one after another and whatever became of those before."""
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
    """Ask for completions ``per_s`` times a second during the block, and wait for all of them behind it."""
    completion = {"model": "sim", "max_tokens": 20, "ignore_eos": True, "stream": True} | body
    load = SteadyLoad(url, per_s, "/v1/completions", completion)
    opening = asyncio.create_task(load.run(), name="steady load")
    try:
        yield load
    finally:
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await load.wait_ended()
