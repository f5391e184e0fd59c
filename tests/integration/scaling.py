"""Scale operations through the API of a running deployment."""

import time
from typing import Any

import httpx

from tests.integration.serving import DEADLINE_S, START_S, eventually

ENDED = ("done", "failed", "cancelled")


def begin(http: httpx.Client, **request: Any) -> dict[str, Any]:
    """Begin an operation and return it."""
    answer = http.post("/v1/cluster/scale", json=request)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/cluster/operations/{answer.json()['id']}"
    return dict(answer.json())


def look(http: httpx.Client, operation: dict[str, Any]) -> dict[str, Any]:
    """Return an operation as it is now."""
    return dict(http.get(f"/v1/cluster/operations/{operation['id']}").raise_for_status().json())


def finish(http: httpx.Client, operation: dict[str, Any]) -> dict[str, Any]:
    """Return an operation once it is over; a rank that joins has to start first."""
    return dict(eventually(lambda: (seen := look(http, operation))["status"] in ENDED and seen, START_S))


def scale(http: httpx.Client, **request: Any) -> dict[str, Any]:
    """Scale and return the operation, which must come to its end."""
    operation = finish(http, begin(http, **request))
    assert operation["status"] == "done", operation
    return operation


def wait_phase(http: httpx.Client, operation: dict[str, Any], *phases: str) -> dict[str, Any]:
    """Wait until an operation is in one of these phases."""
    deadline = time.monotonic() + DEADLINE_S
    while (seen := look(http, operation))["phase"] not in phases:
        assert seen["status"] == "running", seen
        assert time.monotonic() < deadline
    return seen


def ready_ranks(http: httpx.Client) -> list[int]:
    """Return the ranks that are shown, each of which must be ready, or suspect for a moment on a busy machine."""
    ranks = http.get("/v1/cluster").json()["ranks"]
    assert {rank["state"] for rank in ranks} <= {"ready", "suspect"}, ranks
    return [rank["rank"] for rank in ranks]


def series(http: httpx.Client, rank: int) -> list[str]:
    """Return the metric lines of a rank."""
    return [line for line in http.get("/metrics").text.splitlines() if f'engine="{rank}"' in line]
