"""Error responses, all in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``.

``to_api_error`` is the one place where an exception gets its status.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from engine.wire.errors import EngineDeadError, EngineError, InvalidRequestError, OverloadedError
from orchestrator.control.errors import ControlRefusedError, ControlUnavailableError
from orchestrator.control.messages import Fault

_REFUSALS = {"invalid": 400, "not_found": 404, "conflict": 409, "no_capacity": 409, "not_now": 503}
"""The status for what the supervisor refuses, by its code."""

logger = logging.getLogger(__name__)

_MAX_TEXT = 1_000  # characters of a message or a field's name: callers' own text may be part of either


class ApiError(Exception):
    """One error response.

    kind: ``invalid_request_error``, ``overloaded_error`` or ``server_error``. param: the field at fault.
    retry_after_s: whole seconds for the Retry-After header, None for none. allow: methods of a 405.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow

    def content(self) -> dict[str, Any]:
        """Return the body as plain data; what a caller sent is not sent back at any length."""
        message, param = _shorten(self.message), self.param and _shorten(self.param)
        return {"error": {"message": message, "type": self.kind, "param": param, "code": self.code}}

    def body(self) -> bytes:
        """Return the body as JSON."""
        return msgspec.json.encode(self.content())

    def headers(self) -> dict[str, str]:
        """Return the headers the status calls for."""
        retry = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        allow = {} if self.allow is None else {"allow": self.allow}
        return retry | allow | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


class AdminError(ApiError):
    """An error response with what did work. facts: more fields of the body, beside ``error``."""

    def __init__(self, status: int, message: str, facts: Mapping[str, Any], code: str) -> None:
        super().__init__(status, message, "server_error", code=code)
        self.facts = dict(facts)

    def content(self) -> dict[str, Any]:
        """Return the body as plain data."""
        return super().content() | self.facts


def to_api_error(error: Exception) -> ApiError:
    """Return the response an exception gets. An unforeseen one is logged and gets 500 without details."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return _from_validation(error)
        case RequestValidationError():
            return _from_request_validation(error)
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.field)
        case OverloadedError():
            retry_after_s = max(1, math.ceil(error.retry_after_s))
            return ApiError(503, str(error), "overloaded_error", code="overloaded", retry_after_s=retry_after_s)
        case ControlRefusedError():
            return _from_fault(error.fault)
        case ControlUnavailableError():
            return ApiError(503, str(error), "server_error", code="control_unavailable", retry_after_s=1)
        case EngineDeadError():
            return ApiError(503, str(error), "server_error", code="engine_dead", retry_after_s=1)
        case EngineError():
            return ApiError(500, str(error), "server_error", code="engine_error")
    logger.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "the server failed to process this request; its log says why", "server_error")


def _from_fault(fault: Fault) -> ApiError:
    """Return the response to what the supervisor refused."""
    if not fault.is_callers:
        return ApiError(500, fault.message, "server_error", code="control_failed")
    status = _REFUSALS.get(fault.code, 404 if fault.subject == "rank" else 400)
    retry_after_s = 1 if status == 503 else None
    code = fault.code or None
    return ApiError(status, fault.message, param=fault.subject or None, code=code, retry_after_s=retry_after_s)


def _from_validation(error: ValidationError) -> ApiError:
    """Return the response to the first of pydantic's findings."""
    # Input and context are left out: they may be megabytes, and are the caller's own.
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {text.removeprefix('Invalid JSON: ')}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        text = "is not a field this server knows"
    message = f"{param}: {text}" if param else text
    return ApiError(400, message, param=param or None, code=first["type"])


def _from_request_validation(error: RequestValidationError) -> ApiError:
    """Return the response to the first thing wrong with a query, a path or a body that FastAPI has read."""
    first = error.errors()[0]
    # The first step says where a value stood, which callers know; what follows is the field.
    where = [step for step in first["loc"] if step not in ("query", "body", "path")]
    param = _path(where)
    text = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {text}" if param else text, param=param or None, code=first["type"])


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _path(location: Sequence[int | str]) -> str:
    """Return ``messages[0].content`` for ``("messages", 0, "content")``."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
