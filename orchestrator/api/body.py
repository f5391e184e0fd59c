"""The bodies of generation requests, read before the door counts them: bounded one by one, together and in time."""

import asyncio

from orchestrator.api.errors import ApiError
from orchestrator.api.stream_writer import Receive

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_UNREAD_BYTES = 256 * 1024 * 1024
BODY_TIMEOUT_S = 30.0


class CallerGoneError(Exception):
    """The caller hung up before its request was complete."""


class BodyReader:
    """Reads bodies on one event loop.

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
        self._unread_bytes = 0

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
            self._unread_bytes -= size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")
        if self._unread_bytes > self._max_unread_bytes:
            raise ApiError(503, "too many large requests are on their way", "overloaded_error", retry_after_s=1)
