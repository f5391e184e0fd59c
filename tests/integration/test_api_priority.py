"""What ``priority`` and ``cache_salt`` do over HTTP: an engine that runs one sequence at a time, and its cache."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.integration.serving import CHAT, Deployment, deployment, eventually

CHAT_PATH = "/v1/chat/completions"
TIMEOUT_S = 60.0
PROMPT = "A shoal is a large number of fish that stay together; a school of fish swims in one direction."


@pytest.fixture(scope="module")
def served() -> Iterator[Deployment]:
    options = ("--data-parallel-size=1", "--max-num-seqs=1", "--sim-step-ms=2")
    with deployment("--engine=sim", "--executor=local", *options) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def http(served: Deployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.wait_ready(), timeout=TIMEOUT_S, trust_env=False) as client:
        yield client


def counts(http: httpx.Client) -> tuple[int, int]:
    """Return (running, waiting) of the one rank."""
    (rank,) = http.get("/v1/cluster").json()["ranks"]
    return rank["running"], rank["waiting"]


def has_waiting(http: httpx.Client, num_waiting: int) -> bool:
    return counts(http) == (1, num_waiting)


class Callers:
    """Requests in threads of their own; ``served`` holds their names in the order in which they were answered."""

    def __init__(self, url: str) -> None:
        self.served: list[str] = []
        self._url = url
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def ask(self, name: str, path: str, body: dict[str, Any]) -> None:
        thread = threading.Thread(target=self._ask, args=(name, path, body))
        self._threads.append(thread)
        thread.start()

    def _ask(self, name: str, path: str, body: dict[str, Any]) -> None:
        answer = httpx.post(self._url + path, json=body, headers={"x-request-id": name}, timeout=TIMEOUT_S)
        answer.raise_for_status()
        with self._lock:
            self.served.append(name)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def test_who_waits_is_served_by_priority_lowest_first_and_by_arrival_among_equals(http: httpx.Client) -> None:
    callers = Callers(str(http.base_url))
    # Better than all that come, so that it is not displaced: it keeps the one slot until everybody waits.
    callers.ask("first", CHAT_PATH, CHAT | {"max_tokens": 8000, "priority": -9})
    eventually(partial(has_waiting, http, 0))
    completion = {"model": "sim", "prompt": "hello", "max_tokens": 100, "ignore_eos": True}
    waiting: list[tuple[str, str, dict[str, Any]]] = [
        ("later", CHAT_PATH, CHAT | {"priority": 3, "max_tokens": 100}),
        ("usual", CHAT_PATH, CHAT | {"max_tokens": 100}),
        ("usual-too", "/v1/completions", completion),
        ("soon", "/v1/completions", completion | {"priority": -1}),
        ("sooner", CHAT_PATH, CHAT | {"priority": -2, "max_tokens": 100}),
        ("soonest", "/v1/embeddings", {"model": "sim", "input": "hello", "priority": -3}),
    ]
    for index, (name, path, body) in enumerate(waiting, start=1):
        callers.ask(name, path, body)
        eventually(partial(has_waiting, http, index))
    http.post("/abort_requests", json={"request_ids": ["first"]}).raise_for_status()
    callers.join()
    callers.served.remove("first")
    assert callers.served == ["soonest", "sooner", "soon", "usual", "usual-too", "later"]


def test_a_better_priority_takes_the_slot_of_a_worse_one_which_goes_on_later(http: httpx.Client) -> None:
    callers = Callers(str(http.base_url))
    callers.ask("worse", CHAT_PATH, CHAT | {"max_tokens": 1500, "priority": 1})
    eventually(partial(has_waiting, http, 0))
    callers.ask("better", CHAT_PATH, CHAT | {"max_tokens": 100})
    callers.join()
    assert callers.served == ["better", "worse"]


def cached(http: httpx.Client, **fields: Any) -> int:
    """Return how many tokens of the prompt came from the prefix cache."""
    body = {"model": "sim", "prompt": PROMPT, "max_tokens": 1} | fields
    answer = http.post("/v1/completions", json=body)
    answer.raise_for_status()
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_two_salts_share_no_cached_blocks_and_the_same_one_does(http: httpx.Client) -> None:
    salts: list[dict[str, Any]] = [{"cache_salt": "mine"}, {"cache_salt": "yours"}, {}]
    assert [cached(http, **salt) for salt in salts] == [0, 0, 0]
    assert min(cached(http, **salt) for salt in salts) > len(PROMPT) // 2


def test_a_chat_has_a_salt_too(http: httpx.Client) -> None:
    def cached_in_chat(salt: str) -> int:
        body = {"model": "sim", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, "cache_salt": salt}
        usage = http.post(CHAT_PATH, json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached_in_chat(salt) for salt in ("a", "b")] == [0, 0]
    assert cached_in_chat("a") > 0


@pytest.mark.parametrize("fields", [{"cache_salt": ""}, {"priority": 2**63}, {"priority": "high"}])
def test_what_makes_no_sense_is_400_and_names_the_field(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = http.post(CHAT_PATH, json=CHAT | fields)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["param"] == next(iter(fields))
