"""Admin calls on a real deployment of three sim ranks, as an operator makes them."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.integration.serving import CHAT, Deployment, chat, deployment, eventually, ranks_of

SIM = (
    "--engine",
    "sim",
    "--executor",
    "local",
    "--data-parallel-size",
    "3",
    "--api-server-count",
    "2",
    "--sim-step-ms",
    "5",
)
LONG = CHAT | {"stream": True, "max_tokens": 4000}


@pytest.fixture(scope="module")
def shared() -> Iterator[Deployment]:
    with deployment(*SIM) as served:
        served.wait_ready()
        yield served


@pytest.fixture
def http(shared: Deployment) -> Iterator[httpx.Client]:
    """Talk to the deployment, and leave it running whatever the test did."""
    with httpx.Client(base_url=shared.wait_ready(), timeout=60.0, trust_env=False) as client:
        yield client
        client.post("/abort_requests", json={"all": True})
        client.post("/wake_up").raise_for_status()
        client.post("/resume").raise_for_status()
        for rank in range(3):
            client.post(f"/v1/cluster/ranks/{rank}/uncordon").raise_for_status()
        eventually(lambda: not loads(client)["server_load"])


def loads(http: httpx.Client) -> dict[str, Any]:
    return dict(http.get("/load").json())


def num_steps(http: httpx.Client) -> int:
    return sum(rank["num_steps"] for rank in loads(http)["ranks"])


class Stream:
    """One open stream, read by a thread of its own."""

    def __init__(self, url: httpx.URL, **changes: Any) -> None:
        self.headers: httpx.Headers | None = None
        self.lines: list[str] = []
        self.ended = threading.Event()
        self._url = url.join("/v1/chat/completions")
        self._request = LONG | changes
        self._name = changes.pop("name", None)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def num_chunks(self) -> int:
        return len(self.lines)

    @property
    def finish_reason(self) -> str | None:
        chunks = [json.loads(line.removeprefix("data: ")) for line in self.lines if line != "data: [DONE]"]
        return next((c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]), None)

    @property
    def response_id(self) -> str:
        return str(json.loads(self.lines[0].removeprefix("data: "))["id"])

    def join(self) -> None:
        self._thread.join(60)
        assert self.ended.is_set()

    def _read(self) -> None:
        body = {key: value for key, value in self._request.items() if key != "name"}
        headers = {} if self._name is None else {"x-request-id": self._name}
        with httpx.stream("POST", self._url, json=body, headers=headers, timeout=60, trust_env=False) as answer:
            self.headers = answer.headers
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line)
        self.ended.set()


@contextmanager
def streams(http: httpx.Client, count: int, **changes: Any) -> Iterator[list[Stream]]:
    """Open streams of which each has its first text; they must end within the block."""
    opened = [Stream(http.base_url, **changes) for _ in range(count)]
    try:
        eventually(lambda: all(stream.num_chunks > 2 for stream in opened))
        yield opened
    finally:
        for stream in opened:
            stream.join()


def test_keep_freezes_every_stream_and_resume_lets_them_finish(http: httpx.Client) -> None:
    with streams(http, 6, max_tokens=300) as opened:
        assert http.post("/pause", params={"mode": "keep"}).json()["status"] == "paused"
        before = num_steps(http)
        assert http.get("/is_paused").json() == {
            "is_paused": True,
            "mode": "keep",
            "in_force": True,
            "ranks_behind": [],
        }
        late = Stream(http.base_url, max_tokens=3)
        eventually(lambda: loads(http)["server_load"] == 7)
        assert num_steps(http) == before
        assert not any(stream.ended.is_set() for stream in [*opened, late])
        assert http.post("/resume").json()["status"] == "resumed"
        late.join()
    assert [stream.finish_reason for stream in [*opened, late]] == ["length"] * 7
    assert http.get("/is_paused").json()["is_paused"] is False


def test_abort_ends_every_stream_with_its_last_message(http: httpx.Client) -> None:
    with streams(http, 6) as opened:
        http.post("/pause", params={"mode": "abort"}).raise_for_status()
    assert [stream.finish_reason for stream in opened] == ["abort"] * 6
    assert all(stream.lines[-1] == "data: [DONE]" for stream in opened)
    http.post("/resume").raise_for_status()
    assert chat(str(http.base_url)) == "length"


def test_wait_returns_when_every_stream_has_finished(http: httpx.Client) -> None:
    with streams(http, 6, max_tokens=100) as opened:
        http.post("/pause", params={"mode": "wait"}).raise_for_status()
        assert loads(http)["server_load"] == 0
    assert [stream.finish_reason for stream in opened] == ["length"] * 6


def test_a_wait_that_does_not_end_in_time_names_the_ranks_and_another_call_supersedes_it(http: httpx.Client) -> None:
    with streams(http, 1, data_parallel_rank=1) as opened:
        late = http.post("/pause", params={"mode": "wait", "timeout": 0.3})
        assert late.status_code == httpx.codes.GATEWAY_TIMEOUT
        assert late.json()["ranks_behind"] == [1]
        assert "rank 1" in late.json()["error"]["message"]
        http.post("/resume").raise_for_status()
        answers: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: answers.append(httpx.post(http.base_url.join("/pause?mode=wait"), timeout=60))
        )
        waiting.start()
        eventually(lambda: http.get("/is_paused").json()["mode"] == "wait")
        http.post("/pause", params={"mode": "keep"}).raise_for_status()
        waiting.join()
        assert answers[0].status_code == httpx.codes.CONFLICT
        http.post("/abort_requests", json={"all": True}).raise_for_status()
    assert opened[0].finish_reason == "abort"


def test_sleep_and_wake_up_lose_no_stream(http: httpx.Client) -> None:
    with streams(http, 3, max_tokens=200) as opened:
        assert http.post("/sleep", params={"level": 2}).json()["level"] == 2
        assert http.get("/is_sleeping").json()["is_sleeping"] is True
        assert all(rank["is_sleeping"] and rank["kv_usage"] == 0 for rank in loads(http)["ranks"])
        http.post("/wake_up").raise_for_status()
    assert [stream.finish_reason for stream in opened] == ["length"] * 3
    assert http.get("/is_sleeping").json()["is_sleeping"] is False


def test_a_cordoned_rank_gets_nothing_new_and_drain_waits_for_what_it_has(http: httpx.Client) -> None:
    with streams(http, 2, data_parallel_rank=2, max_tokens=150) as opened:
        assert http.post("/v1/cluster/ranks/2/cordon").json()["cordoned"] == [2]
        picks = ranks_of(str(http.base_url))[2]["running"]
        assert all(chat(str(http.base_url)) == "length" for _ in range(6))
        assert ranks_of(str(http.base_url))[2]["running"] <= picks
        progress = http.post("/v1/cluster/ranks/2/drain").json()
        assert (progress["rank"], progress["sequences_left"]) == (2, 0)
    assert [stream.finish_reason for stream in opened] == ["length"] * 2
    http.post("/v1/cluster/ranks/2/uncordon").raise_for_status()
    assert chat(str(http.base_url), data_parallel_rank=2) == "length"


def test_a_drain_that_does_not_end_in_time_says_what_is_left(http: httpx.Client) -> None:
    with streams(http, 1, data_parallel_rank=0):
        late = http.post("/v1/cluster/ranks/0/drain", params={"timeout": 0.3})
        assert late.status_code == httpx.codes.GATEWAY_TIMEOUT
        assert (late.json()["rank"], late.json()["sequences_left"]) == (0, 1)
        http.post("/abort_requests", json={"all": True}).raise_for_status()


def test_an_unknown_rank_is_404_with_the_valid_ones(http: httpx.Client) -> None:
    for verb in ("cordon", "uncordon", "drain"):
        answer = http.post(f"/v1/cluster/ranks/9/{verb}")
        assert answer.status_code == httpx.codes.NOT_FOUND
        assert "valid: 0, 1, 2" in answer.json()["error"]["message"]


def test_requests_are_aborted_by_either_name(http: httpx.Client) -> None:
    with streams(http, 1, name="mine") as (mine,), streams(http, 1) as (other,):
        assert mine.headers is not None
        assert mine.headers["x-request-id"] == "mine"
        answer = http.post("/abort_requests", json={"request_ids": ["mine", other.response_id, "nobody"]}).json()
        assert answer == {"aborted": sorted(["mine", other.response_id]), "not_found": ["nobody"], "failures": {}}
    assert (mine.finish_reason, other.finish_reason) == ("abort", "abort")


def test_a_method_runs_on_every_rank_and_an_unknown_one_says_what_there_is(http: httpx.Client) -> None:
    def rpc(**body: Any) -> httpx.Response:
        return http.post("/collective_rpc", json=body)

    assert rpc(method="echo", args=[7]).json() == {"results": {"0": 7, "1": 7, "2": 7}}
    assert rpc(method="echo", kwargs={"value": 7}).json() == {"results": {"0": 7, "1": 7, "2": 7}}
    assert set(rpc(method="statistics").json()["results"]["1"]) >= {"num_running", "num_kv_tokens"}
    unknown = rpc(method="shutdown")
    assert unknown.status_code == httpx.codes.BAD_REQUEST
    assert "echo, get_load, reset_prefix_cache" in unknown.json()["error"]["message"]
    failed = rpc(method="echo", args=[1, 2])
    assert failed.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    assert set(failed.json()["failures"]) == {"0", "1", "2"}
    assert http.post("/reset_prefix_cache").json()["success"] is True


def test_a_rank_that_does_not_answer_is_named_beside_the_others_results(http: httpx.Client) -> None:
    pid = ranks_of(str(http.base_url))[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = http.post("/collective_rpc", json={"method": "echo", "args": [1], "timeout": 0.3})
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.status_code == httpx.codes.GATEWAY_TIMEOUT
    assert answer.json()["results"] == {"0": 1, "2": 1}
    assert list(answer.json()["failures"]) == ["1"]
    assert "rank 1" in answer.json()["error"]["message"]


def test_a_supervisor_that_does_not_answer_is_503(shared: Deployment, http: httpx.Client) -> None:
    shared.process.send_signal(signal.SIGSTOP)
    try:
        answer = http.post("/pause", params={"mode": "keep", "timeout": 0.3})
    finally:
        shared.process.send_signal(signal.SIGCONT)
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert "the supervisor did not answer" in answer.json()["error"]["message"]


def test_server_info_says_what_runs(http: httpx.Client) -> None:
    info = http.get("/server_info").json()
    assert (info["model"], info["config"]["data_parallel_size"], len(info["engines"])) == ("sim", 3, 3)
    assert info["version"] in info["engines"][0]["build_id"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause?mode=never", None, "mode"),
        ("/pause?timeout=0", None, "timeout"),
        ("/sleep?level=3", None, "level"),
        ("/v1/cluster/ranks/x/cordon", None, "rank"),
        ("/abort_requests", {}, None),
        ("/abort_requests", {"request_ids": ["a"], "all": True}, None),
        ("/collective_rpc", {"method": "echo", "argv": []}, "argv"),
        ("/collective_rpc", {"method": "echo", "args": [2**64]}, "args"),
    ],
)
def test_what_makes_no_sense_is_400_and_named(http: httpx.Client, path: str, body: Any, param: str | None) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["param"] == param


def test_a_rank_refilled_during_a_pause_serves_nobody_before_its_end_and_no_stream_is_lost() -> None:
    with (
        deployment(*SIM) as served,
        httpx.Client(base_url=served.wait_ready(), timeout=60.0) as http,
        streams(http, 6, max_tokens=200) as opened,
    ):
        http.post("/pause", params={"mode": "keep"}).raise_for_status()
        before = num_steps(http)
        os.kill(ranks_of(str(http.base_url))[1]["pid"], signal.SIGKILL)
        eventually(lambda: ranks_of(str(http.base_url))[1]["engine_id"] == "1.2")
        eventually(lambda: ranks_of(str(http.base_url))[1]["state"] == "ready")
        eventually(lambda: len({rank["settings_seq"] for rank in loads(http)["ranks"]}) == 1)
        new_stream = Stream(http.base_url, max_tokens=3, data_parallel_rank=1)
        eventually(lambda: loads(http)["server_load"] == 7)
        assert num_steps(http) <= before  # those of the dead rank are gone, and nobody makes new ones
        assert new_stream.num_chunks == 0
        http.post("/resume").raise_for_status()
        new_stream.join()
    assert [stream.finish_reason for stream in [*opened, new_stream]] == ["length"] * 7
