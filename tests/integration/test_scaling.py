"""A real deployment of sim ranks and two API processes grows and shrinks while it serves."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bench.steady_load import steady_load
from tests.integration.scaling import begin, finish, ready_ranks, scale, series, wait_phase
from tests.integration.serving import DEADLINE_S, Deployment, deployment, eventually, run_shoal
from tests.leaks import held, wait_given_back

SIM = ("--engine", "sim", "--executor", "local", "--data-parallel-size", "2", "--sim-step-ms", "5")
LONG = {"model": "sim", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[Deployment]:
    with deployment(*SIM, "--sim-load-s", "0.3", "--api-server-count", "2") as served:
        served.wait_ready()
        yield served
        served.end()


@pytest.fixture(autouse=True)
def leak_check(shared: Deployment) -> Iterator[None]:
    """As everywhere, but a rank that came in one test may serve in the next; ``http`` looks at their number instead."""
    before = held()
    yield
    engines = {line for line in held() if "engine.main" in line}
    leaked = wait_given_back(before | engines)
    assert not leaked, "left behind:\n" + "\n".join(sorted(leaked))


@pytest.fixture
def http(shared: Deployment) -> Iterator[httpx.Client]:
    """Talk to a deployment of two ranks, and leave it so."""
    with httpx.Client(base_url=shared.wait_ready(), timeout=DEADLINE_S, trust_env=False) as client:
        yield client
        scale(client, size=2, drain_timeout=0.0)
        assert len(shared.processes("engine.main")) == 2


async def test_two_to_four_to_two_under_a_steady_load_fails_nothing(shared: Deployment, http: httpx.Client) -> None:
    async with steady_load(shared.wait_ready(), 20.0) as load:
        await asyncio.sleep(0.5)
        grown = await asyncio.to_thread(scale, http, size=4)
        assert [record["phase"] for record in grown["history"]] == ["reserve", "spawn", "load", "handshake", "done"]
        assert ready_ranks(http) == [0, 1, 2, 3]
        assert series(http, 2)
        await asyncio.to_thread(eventually, lambda: all(rank["picks"] for rank in _ranks(http)))
        shrunk = await asyncio.to_thread(scale, http, size=2)
        assert ready_ranks(http) == [0, 1]
        assert not series(http, 2)
        assert shrunk["leaving"] == [2, 3]
        await asyncio.sleep(0.3)
    assert len(load.streams) >= 20
    assert load.num_failed == 0


def test_rank_0_leaves_and_what_it_has_goes_on_elsewhere_with_the_same_text(http: httpx.Client) -> None:
    scale(http, size=3)

    def ask(seed: int, **where: Any) -> str:
        body = LONG | {"prompt": f"request {seed}", "seed": seed, **where}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(6) as threads:
        moved = [threads.submit(ask, seed, data_parallel_rank=0) for seed in range(6)]
        eventually(lambda: _running(http, 0) == 6)
        operation = scale(http, remove=[0], drain_timeout=0.1)
        assert not all(future.done() for future in moved)
        texts = [future.result() for future in moved]
        assert ready_ranks(http) == [1, 2]
        assert {record["phase"] for record in operation["history"]} >= {"drain", "move", "stop", "release"}
        assert texts == list(threads.map(ask, range(6)))
    refused = http.post("/v1/completions", json=LONG | {"prompt": "x", "data_parallel_rank": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data_parallel_rank")


def test_one_operation_at_a_time_and_one_for_each_key(http: httpx.Client) -> None:
    first = http.post("/v1/cluster/scale", json={"size": 3}, headers={"Idempotency-Key": "grow"}).json()
    again = http.post("/v1/cluster/scale", json={"size": 3, "idempotency_key": "grow"}).json()
    assert again["id"] == first["id"]
    assert http.post("/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": True}
    competitor = http.post("/scale_elastic_ep", json={"new_data_parallel_size": 4})
    assert competitor.status_code == 409
    assert f"operation {first['id']} is running" in competitor.json()["error"]["message"]
    other = http.post("/v1/cluster/scale", json={"size": 4, "idempotency_key": "grow"})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "idempotency_key")
    assert finish(http, first)["status"] == "done"
    assert http.get("/v1/cluster/operations").json()["operations"][0]["id"] == first["id"]
    assert http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2, "drain_timeout": 1}).json() == {
        "message": "Scaled to 2 data parallel engines"
    }
    assert http.post("/is_scaling_elastic_ep").json() == {"is_scaling_elastic_ep": False}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/scale_elastic_ep", {}, 400, "new_data_parallel_size"),
        ("/scale_elastic_ep", {"new_data_parallel_size": 0}, 400, "new_data_parallel_size"),
        ("/scale_elastic_ep", {"new_data_parallel_size": "4"}, 400, "new_data_parallel_size"),
        ("/scale_elastic_ep", {"new_data_parallel_size": 3, "drain_timeout": -1}, 400, "drain_timeout"),
        ("/scale_elastic_ep", {"new_data_parallel_size": 5000}, 400, "size"),
        ("/v1/cluster/scale", {}, 400, None),
        ("/v1/cluster/scale", {"size": 3, "more": 1}, 400, "more"),
        ("/v1/cluster/scale", {"remove": [7]}, 400, "remove"),
        ("/v1/cluster/scale", {"remove": [0, 1]}, 400, "remove"),
        ("/v1/cluster/operations/scale-999/cancel", {}, 404, "id"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_field(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert ready_ranks(http) != []


@pytest.mark.parametrize("phase", ["load", "drain"])
def test_a_cancelled_operation_leaves_the_ranks_as_they_were(
    shared: Deployment, http: httpx.Client, phase: str
) -> None:
    before = {rank["engine_id"] for rank in _ranks(http)}
    with ThreadPoolExecutor(1) as threads:
        rank = ready_ranks(http)[0]
        running = threads.submit(http.post, "/v1/completions", json=LONG | {"prompt": "x", "data_parallel_rank": rank})
        eventually(lambda: _running(http, rank) == 1)
        operation = begin(http, **({"size": 3} if phase == "load" else {"remove": [rank], "drain_timeout": 60}))
        wait_phase(http, operation, phase)
        assert http.post(f"/v1/cluster/operations/{operation['id']}/cancel").status_code == 202
        assert finish(http, operation)["status"] == "cancelled"
        assert running.result().status_code == 200
    assert {rank["engine_id"] for rank in _ranks(http)} == before
    assert len(shared.processes("engine.main")) == 2
    assert http.post(f"/v1/cluster/operations/{operation['id']}/cancel").status_code == 409
    pinned = LONG | {"prompt": "x", "data_parallel_rank": ready_ranks(http)[0], "max_tokens": 2}
    eventually(lambda: http.post("/v1/completions", json=pinned).status_code == 200)


def test_a_new_rank_that_dies_while_it_loads_fails_the_operation_and_nothing_else(
    shared: Deployment, http: httpx.Client
) -> None:
    before = {process.pid for process in shared.processes("engine.main")}
    operation = begin(http, size=3)
    (new,) = eventually(lambda: {p.pid for p in shared.processes("engine.main")} - before)
    os.kill(new, signal.SIGKILL)
    failed = finish(http, operation)
    assert failed["status"] == "failed"
    assert "new rank" in failed["error"]
    assert "killed by SIGKILL" in failed["error"]
    assert {process.pid for process in shared.processes("engine.main")} == before
    assert len(ready_ranks(http)) == 2


def test_a_rank_that_dies_during_a_scale_is_replaced_and_the_scale_goes_on(http: httpx.Client) -> None:
    victim = _ranks(http)[0]
    operation = begin(http, size=3)
    os.kill(victim["pid"], signal.SIGKILL)
    assert finish(http, operation)["status"] == "done"
    eventually(lambda: all(rank["state"] == "ready" for rank in _ranks(http)))
    reborn = next(rank for rank in _ranks(http) if rank["rank"] == victim["rank"])
    assert reborn["incarnation"] == victim["incarnation"] + 1


def test_events_come_in_order_from_any_process_and_to_late_callers(shared: Deployment, http: httpx.Client) -> None:
    operation = scale(http, size=3)
    seen = []
    with http.stream("GET", "/v1/cluster/events?after=0") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
                if _is_end(seen[-1], operation):
                    break
    assert [event["number"] for event in seen] == sorted(event["number"] for event in seen)
    mine = seen[next(i for i, event in enumerate(seen) if _is_of(event, operation)) :]
    assert [event["kind"] for event in mine if event["kind"] != "scale"] == ["rank_joining", "rank_ready"]
    printed = run_shoal("status", "--run-dir", str(shared.parent))
    assert printed.returncode == 0, printed.stderr


def test_capacity_and_the_command(shared: Deployment, http: httpx.Client) -> None:
    capacity = http.get("/v1/cluster/capacity").json()
    assert (capacity["executor"], capacity["ranks"], capacity["free"]) == (
        "local",
        2,
        {"CPU": float(os.cpu_count() or 1)},
    )
    where = ("--run-dir", str(shared.parent))
    grown = run_shoal("scale", "+1", "--wait", *where)
    assert grown.returncode == 0, grown.stderr
    assert "2 -> 3 ranks" in grown.stdout
    shrunk = run_shoal("scale", "--remove", str(ready_ranks(http)[0]), "--drain-timeout", "0", "--wait", *where)
    assert shrunk.returncode == 0, shrunk.stderr
    refused = run_shoal("scale", "--remove", "99", *where)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "there is no rank 99" in refused.stderr
    assert len(ready_ranks(http)) == 2


def _ranks(http: httpx.Client) -> list[dict[str, Any]]:
    return list(http.get("/v1/cluster").json()["ranks"])


def _running(http: httpx.Client, rank: int) -> int:
    return sum(row["num_sequences"] for row in http.get("/load").json()["ranks"] if row["rank"] == rank)


def _is_of(event: dict[str, Any], operation: dict[str, Any]) -> bool:
    return bool(event["kind"] == "scale" and event["facts"]["operation"]["id"] == operation["id"])


def _is_end(event: dict[str, Any], operation: dict[str, Any]) -> bool:
    return _is_of(event, operation) and event["facts"]["operation"]["status"] == "done"
