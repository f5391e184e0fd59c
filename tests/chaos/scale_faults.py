"""Faults that may hit a scale operation under way: in its ranks, in the coordinator, or a cancel by the operator."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil

from tests.integration.scaling import look
from tests.integration.serving import DEADLINE_S, Deployment, eventually

Fault = Callable[[httpx.Client, Deployment, dict[str, Any], random.Random], None]
"""Takes the operation as the API returned it when it began."""


def kill_joining(http: httpx.Client, served: Deployment, operation: dict[str, Any], rng: random.Random) -> None:
    """``kill -9`` the engine of a new rank, whatever it is doing."""
    _signal_joining(http, served, operation, rng, signal.SIGKILL)


def stop_joining(http: httpx.Client, served: Deployment, operation: dict[str, Any], rng: random.Random) -> None:
    """Stop the engine of a new rank with SIGSTOP, and cancel: a stopped process is ended all the same."""
    _signal_joining(http, served, operation, rng, signal.SIGSTOP)
    cancel(http, served, operation, rng)


def kill_leaving(http: httpx.Client, _served: Deployment, operation: dict[str, Any], rng: random.Random) -> None:
    """``kill -9`` a rank that is to leave."""
    _kill_one(http, rng, lambda rank: rank in operation["leaving"])


def kill_old_rank(http: httpx.Client, _served: Deployment, operation: dict[str, Any], rng: random.Random) -> None:
    """``kill -9`` a rank that is neither new nor leaving."""
    _kill_one(http, rng, lambda rank: rank not in {*operation["joining"], *operation["leaving"]})


def kill_coordinator(_http: httpx.Client, served: Deployment, _operation: dict[str, Any], _rng: random.Random) -> None:
    """``kill -9`` the coordinator, through which all processes learn about the group."""
    for coordinator in served.processes("lb.coordinator"):
        coordinator.kill()


def cancel(http: httpx.Client, _served: Deployment, operation: dict[str, Any], _rng: random.Random) -> None:
    """Cancel now; after the commit that is refused."""
    answer = http.post(f"/v1/cluster/operations/{operation['id']}/cancel")
    assert answer.status_code in (httpx.codes.ACCEPTED, httpx.codes.CONFLICT), answer.text


def reach(http: httpx.Client, operation: dict[str, Any], phase: str) -> bool:
    """Wait until an operation is in a phase; False when it passed it between two polls."""
    deadline = time.monotonic() + DEADLINE_S
    while (seen := look(http, operation))["phase"] != phase:
        if seen["status"] != "running":
            return False
        assert time.monotonic() < deadline, seen
    return True


def all_ready(http: httpx.Client) -> bool:
    """Tell whether every rank is ready."""
    return all(row["state"] == "ready" for row in http.get("/v1/cluster").json()["ranks"])


def _signal_joining(
    http: httpx.Client, served: Deployment, operation: dict[str, Any], rng: random.Random, number: signal.Signals
) -> None:
    if operation["joining"]:
        eventually(lambda: look(http, operation)["status"] != "running" or _joining(http, served, operation))
        for process in _joining(http, served, operation)[: rng.randint(1, 2)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # its operation is over
                process.send_signal(number)


def _joining(http: httpx.Client, served: Deployment, operation: dict[str, Any]) -> list[psutil.Process]:
    known = {row["pid"] for row in _rows(http) if row["rank"] not in operation["joining"]}
    return [process for process in served.processes("engine.main") if process.pid not in known]


def _kill_one(http: httpx.Client, rng: random.Random, may_be: Callable[[int], bool]) -> None:
    rows = [row for row in _rows(http) if row["pid"] and may_be(row["rank"])]
    if not rows:
        return
    pid = rng.choice(rows)["pid"]
    with contextlib.suppress(ProcessLookupError):  # a leaving rank that has left
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(row["pid"] == pid and row["state"] == "ready" for row in _rows(http)))


def _rows(http: httpx.Client) -> list[dict[str, Any]]:
    return list(http.get("/v1/cluster").json()["ranks"])
