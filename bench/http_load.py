"""A light HTTP load: many connections, raw bytes, nothing parsed but the end of each answer.

``python -m bench.http_load`` reads one ``Load`` as JSON per line of standard input and answers each with one ``Result``
per line of standard output, so that the generator is warm and its own start is not measured.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import cast

import uvloop

_CHUNKED_END = b"0\r\n\r\n"
_EVENT = b"data: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests to send. num_requests: in all, at most ``concurrency`` at once. stream: answers are chunked."""

    port: int
    path: str
    body: str
    num_requests: int
    concurrency: int
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Responses received. num_events: server-sent events. num_failed: answers that were not 200."""

    num_bytes: int
    num_events: int
    num_failed: int
    wall_s: float


class _Caller(asyncio.Protocol):
    """One connection that sends the request again and again until all are done."""

    def __init__(self, load: Load, left: list[int]) -> None:
        self._load = load
        self._left = left
        self._buffer = b""
        self.num_bytes = self.num_events = self.num_failed = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        body = load.body.encode()
        head = f"POST {load.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self._request = head.encode() + b"\r\n\r\n" + body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, not a subclass
        self._send()

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._buffer += data
        if self._is_complete():
            self.num_events += self._buffer.count(_EVENT)
            self.num_failed += not self._buffer.startswith(b"HTTP/1.1 200")
            self._buffer = b""
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _send(self) -> None:
        if self._left[0] == 0:
            self._transport.close()
            return
        self._left[0] -= 1
        self._transport.write(self._request)

    def _is_complete(self) -> bool:
        if self._load.stream:
            return self._buffer.endswith(_CHUNKED_END)
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        return bool(found) and len(body) >= _content_length(head)


def _content_length(head: bytes) -> int:
    _, _, behind = head.lower().partition(b"content-length:")
    return int(behind.split(b"\r\n", 1)[0])


async def run(load: Load) -> Result:
    """Send a load and wait for all answers."""
    started = time.perf_counter()
    left = [load.num_requests]
    callers = [_Caller(load, left) for _ in range(min(load.concurrency, load.num_requests))]
    await asyncio.gather(*(_connect(caller, load.port) for caller in callers))
    await asyncio.gather(*(caller.ended for caller in callers))
    return Result(
        num_bytes=sum(caller.num_bytes for caller in callers),
        num_events=sum(caller.num_events for caller in callers),
        num_failed=sum(caller.num_failed for caller in callers),
        wall_s=time.perf_counter() - started,
    )


async def _connect(caller: _Caller, port: int) -> None:
    await asyncio.get_running_loop().create_connection(lambda: caller, "127.0.0.1", port)


def main() -> None:
    """Serve loads until standard input ends."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            print(json.dumps(asdict(runner.run(run(Load(**json.loads(line)))))), flush=True)


if __name__ == "__main__":
    main()
