"""The ASGI vocabulary of this package: message types, response starts, whole error responses, request ids."""

import os
import string
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from orchestrator.api.errors import to_api_error

StartMessage = dict[str, Any]


Headers = list[tuple[bytes, bytes]]


JSON_TYPE = (b"content-type", b"application/json")


def start_message(status: int, headers: Headers, request_id: str) -> StartMessage:
    """Return an ASGI response start that echoes the request id."""
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [*headers, (b"x-request-id", request_id.encode("latin-1"))],
    }


def error_answer(error: Exception, request_id: str) -> tuple[StartMessage, bytes]:
    """Return the start and the body of the answer that an exception gets."""
    answer = to_api_error(error)
    body = answer.body()
    return start_message(answer.status, _error_headers(answer.headers(), len(body)), request_id), body


def _error_headers(extra: dict[str, str], length: int) -> Headers:
    """Return the headers of an error answer of that many bytes."""
    named = [(name.encode(), value.encode()) for name, value in extra.items()]
    return [JSON_TYPE, (b"content-length", str(length).encode()), *named]


Message = MutableMapping[str, Any]


Receive = Callable[[], Awaitable[Message]]


Send = Callable[[Message], Awaitable[None]]


async def send_error(error: Exception, request_id: str, send: Send) -> None:
    """Send the whole answer that an exception gets; nothing may have been sent before."""
    start, body = error_answer(error, request_id)
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})


_HEADER = b"x-request-id"
_MAX_LENGTH = 128
_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/+=")


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the caller's own id when it is harmless in a header and a log line, else a new one."""
    given = headers.get(_HEADER, b"").decode("latin-1")
    if 0 < len(given) <= _MAX_LENGTH and _CHARACTERS.issuperset(given):
        return given
    return f"req-{random_name()}"


def random_name() -> str:
    """Return 32 hex digits that nobody can guess."""
    return os.urandom(16).hex()
