"""The ASGI vocabulary of this package: message types, response starts, whole error responses, request ids."""

import os
import string
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from orchestrator.api.base.errors import to_api_error

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
StartMessage = dict[str, Any]
Headers = list[tuple[bytes, bytes]]

_JSON_TYPE = (b"content-type", b"application/json")

_REQUEST_ID_HEADER = b"x-request-id"
_MAX_REQUEST_ID_LENGTH = 128
# Nothing that could end a header or a log line, or begin an escape sequence in a terminal.
_REQUEST_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/+=")


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the caller's own x-request-id when it is harmless in a header and a log line, else a new one."""
    given = headers.get(_REQUEST_ID_HEADER, b"").decode("latin-1")
    if 0 < len(given) <= _MAX_REQUEST_ID_LENGTH and _REQUEST_ID_CHARACTERS.issuperset(given):
        return given
    return f"req-{random_name()}"


def random_name() -> str:
    """Return 32 hex digits that cannot be guessed: whoever knows the name of a request can abort it."""
    return os.urandom(16).hex()


def start_message(status: int, headers: Headers, request_id: str) -> StartMessage:
    """Return an ASGI response start that echoes the request id."""
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [*headers, (_REQUEST_ID_HEADER, request_id.encode("latin-1"))],
    }


def json_start(status: int, length: int, request_id: str, headers: Headers | None = None) -> StartMessage:
    """Return the start of a response whose body is JSON of that many bytes. headers: further ones."""
    return start_message(status, [_JSON_TYPE, (b"content-length", b"%d" % length), *(headers or [])], request_id)


def error_response(error: Exception, request_id: str) -> tuple[StartMessage, bytes]:
    """Return the start and the body of the response that an exception gets."""
    answer = to_api_error(error)
    body = answer.body()
    headers = [(name.encode(), value.encode()) for name, value in answer.headers().items()]
    return json_start(answer.status, len(body), request_id, headers), body


async def send_error(error: Exception, request_id: str, send: Send) -> None:
    """Send the whole response that an exception gets; nothing may have been sent before."""
    start, body = error_response(error, request_id)
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})
