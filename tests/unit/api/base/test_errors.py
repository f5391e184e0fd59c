"""Every error in OpenAI's shape."""

import json

import pytest

from engine.wire.errors import EngineDeadError, EngineError, InvalidRequestError, OverloadedError
from orchestrator.api.base.errors import ApiError, to_api_error


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry"),
    [
        (InvalidRequestError("too long", "prompt"), 400, "invalid_request_error", None),
        (OverloadedError("full", 1.2), 503, "overloaded_error", "2"),
        (OverloadedError("full", 0.0), 503, "overloaded_error", "1"),
        (EngineDeadError("gone"), 503, "server_error", "1"),
        (EngineError("broken"), 500, "server_error", None),
        (RuntimeError("secret"), 500, "server_error", None),
        (ApiError(404, "no", param="model"), 404, "invalid_request_error", None),
    ],
)
def test_every_error_has_a_status_and_openais_shape(
    error: Exception, status: int, kind: str, retry: str | None
) -> None:
    answer = to_api_error(error)
    body = json.loads(answer.body())["error"]
    assert answer.status == status
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == kind
    assert answer.headers().get("retry-after") == retry


def test_the_field_at_fault_is_named() -> None:
    assert to_api_error(InvalidRequestError("too long", "prompt")).param == "prompt"


def test_the_unforeseen_tells_the_caller_no_details() -> None:
    assert "secret" not in to_api_error(RuntimeError("secret")).message


def test_a_405_says_what_is_allowed() -> None:
    assert ApiError(405, "no", allow="POST").headers() == {"allow": "POST"}
