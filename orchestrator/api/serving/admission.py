"""Admission control of generation requests: bodies bounded in bytes and time, open requests bounded in number."""

import asyncio
from collections.abc import Iterable, Sequence

from engine.wire.errors import OverloadedError
from metrics.shared_status import StatusRow
from orchestrator.api.base.asgi import Receive
from orchestrator.api.base.errors import ApiError
from orchestrator.llm.stream import RequestStream

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_UNREAD_BYTES = 256 * 1024 * 1024
BODY_TIMEOUT_S = 30.0

_RETRY_WHEN_FULL_S = 1.0
_RETRY_WHEN_DRAINING_S = 5.0  # until then this process has ended, or another one takes the connection


class CallerGoneError(Exception):
    """The caller hung up before its request was complete."""


class BodyReader:
    """Reads bodies on one event loop, before requests are counted.

    max_bytes: of one body. max_unread_bytes: of all bodies that are not complete yet. timeout_s: for one body.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BODY_BYTES,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_unread_bytes = max_unread_bytes
        self._timeout_s = timeout_s
        self._unread_bytes = 0  # of all bodies that are being read

    async def read(self, receive: Receive) -> bytes:
        """Return one whole body.

        Raises:
            ApiError: 413 too large, 408 too slow, 503 too much is on its way at once.
            CallerGoneError: the caller went away first.
        """
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise CallerGoneError
                    part = bytes(message.get("body", b""))
                    parts.append(part)
                    size += len(part)
                    self._unread_bytes += len(part)
                    self._check(size)
                    more = message.get("more_body", False)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {self._timeout_s:g} s", code="timeout") from error
        finally:
            self._unread_bytes -= size  # complete or given up: admission counts it from here on
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")
        if self._unread_bytes > self._max_unread_bytes:
            raise ApiError(503, "too many large requests are on their way", "overloaded_error", retry_after_s=1)


class Admission:
    """Counts open generation requests of this process, on one event loop, and knows how many the siblings have.

    Two processes may admit the last one at the same moment: the limit is exceeded by less than their number.
    """

    def __init__(self, max_pending: int, row: StatusRow, siblings: Sequence[StatusRow] = ()) -> None:
        """Admit from now on.

        max_pending: open requests of all processes at most. row: where this one shows its number.
        """
        self._max_pending = max_pending
        self._row = row
        self._siblings = siblings
        self._num_open = 0
        self._draining = False
        self._empty = asyncio.Event()  # set while nothing is open
        self._empty.set()

    @property
    def num_open(self) -> int:
        """Return how many requests of this process are open."""
        return self._num_open

    @property
    def draining(self) -> bool:
        """Tell whether new requests are refused for good."""
        return self._draining

    def ensure_room(self) -> None:
        """Check that a request would be admitted now.

        Raises:
            OverloadedError: full, or draining; with the time after which a retry is sensible.
        """
        if self._draining:
            raise OverloadedError("the server is shutting down", _RETRY_WHEN_DRAINING_S)
        num_open = self._num_open + sum(int(row.num_open) for row in self._siblings)
        if num_open >= self._max_pending:
            raise OverloadedError(
                f"the server already has {num_open} requests, its limit (--max-pending-requests)", _RETRY_WHEN_FULL_S
            )

    def enter(self) -> None:
        """Admit one request, which calls ``leave`` in the end. Raises as ``ensure_room`` does."""
        self.ensure_room()
        self._num_open += 1
        self._row.num_open = self._num_open
        self._empty.clear()

    def leave(self) -> None:
        """Take out one request that had entered."""
        self._num_open -= 1
        self._row.num_open = self._num_open
        if self._num_open == 0:
            self._empty.set()

    def drain(self) -> None:
        """Refuse new requests from now on; open ones may end."""
        self._draining = True

    async def wait_empty(self) -> None:
        """Wait until no request is open."""
        await self._empty.wait()


class OpenRequests:
    """The streams that are being answered, by the names their callers know.

    Callers may use one x-request-id for many requests; a response id names one.
    """

    def __init__(self) -> None:
        self._by_request_id: dict[str, dict[RequestStream, None]] = {}
        self._by_response_id: dict[str, RequestStream] = {}

    def add(self, request_id: str, response_id: str, stream: RequestStream) -> None:
        """Add a request. response_id: drawn by this process, and unique."""
        self._by_request_id.setdefault(request_id, {})[stream] = None
        self._by_response_id[response_id] = stream

    def remove(self, request_id: str, response_id: str, stream: RequestStream) -> None:
        """Forget a request that was added."""
        streams = self._by_request_id[request_id]
        del streams[stream]
        if not streams:
            del self._by_request_id[request_id]
        del self._by_response_id[response_id]

    def find(self, names: Iterable[str] | None) -> dict[str, list[RequestStream]]:
        """Return the streams of each of these names that is known; None means every request, by its response id."""
        if names is None:
            return {response_id: [stream] for response_id, stream in self._by_response_id.items()}
        return {name: streams for name in names if (streams := self._of(name))}

    def _of(self, name: str) -> list[RequestStream]:
        stream = self._by_response_id.get(name)
        return list(self._by_request_id.get(name, ())) if stream is None else [stream]
