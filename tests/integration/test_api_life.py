"""The life of an API process: before its engines, when it is full, and at its end."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from bench.local_deployment import MODEL_NAME, LocalDeployment, local_deployment
from engine.config.engine_config import SimConfig

DEADLINE_S = 30.0
CHAT_PATH = "/v1/chat/completions"
SIM = SimConfig(step_s=0.01)


def chat(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    } | fields


class Caller:
    """One request in a thread of its own; ``started`` once its first line is there."""

    def __init__(self, deployment: LocalDeployment, body: dict[str, Any]) -> None:
        self._url = deployment.url + CHAT_PATH
        self._body = body
        self.started = threading.Event()
        self.status = 0
        self.text = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with (
            httpx.Client(timeout=DEADLINE_S, trust_env=False) as client,
            client.stream("POST", self._url, json=self._body) as answer,
        ):
            self.status = answer.status_code
            for line in answer.iter_lines():
                self.text += line + "\n"
                self.started.set()

    def join(self) -> str:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.text


@contextmanager
def callers(deployment: LocalDeployment, count: int, max_tokens: int) -> Iterator[list[Caller]]:
    started = [Caller(deployment, chat(max_tokens, stream=True)) for _ in range(count)]
    for caller in started:
        assert caller.started.wait(DEADLINE_S)
    yield started
    for caller in started:
        caller.join()


@pytest.fixture
def api() -> Iterator[LocalDeployment]:
    with local_deployment(1, SIM, shutdown_timeout_s=0.3) as running:
        yield running


def test_streams_end_by_themselves_within_the_shutdown_timeout() -> None:
    with local_deployment(1, SIM, shutdown_timeout_s=DEADLINE_S) as deployment:
        with callers(deployment, 3, 60) as open_callers:
            deployment.api.send_signal(signal.SIGTERM)
        assert deployment.api.wait(DEADLINE_S) == 0
    assert all('"finish_reason":"length"' in caller.text for caller in open_callers)
    assert all(caller.text.rstrip().endswith("data: [DONE]") for caller in open_callers)


def test_what_does_not_end_in_time_gets_its_last_message(api: LocalDeployment) -> None:
    whole = Caller(api, chat(8000))
    with callers(api, 20, 8000) as open_callers:
        api.api.send_signal(signal.SIGTERM)
    assert api.api.wait(DEADLINE_S) == 0
    for caller in open_callers:
        assert '"finish_reason":"abort"' in caller.text
        assert caller.text.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"abort"' in whole.join()


def test_a_second_signal_does_not_wait() -> None:
    with local_deployment(1, SIM, shutdown_timeout_s=1000.0) as deployment:
        with callers(deployment, 2, 8000) as open_callers:
            deployment.api.send_signal(signal.SIGTERM)
            with httpx.Client(timeout=DEADLINE_S, trust_env=False) as client:
                wait_refused(client, deployment.url)
            deployment.api.send_signal(signal.SIGTERM)
        assert deployment.api.wait(DEADLINE_S) == 0
    assert all('"finish_reason":"abort"' in caller.text for caller in open_callers)


def wait_refused(client: httpx.Client, url: str) -> None:
    """Return once the listening socket is closed."""
    with contextlib.suppress(httpx.TransportError):
        while True:
            client.get(f"{url}/health", headers={"connection": "close"})


def test_an_open_connection_is_told_to_come_back_later_while_draining() -> None:
    with (
        local_deployment(1, SIM, shutdown_timeout_s=1000.0) as deployment,
        httpx.Client(base_url=deployment.url, timeout=DEADLINE_S, trust_env=False) as kept,
        httpx.Client(timeout=DEADLINE_S, trust_env=False) as probe,
    ):
        assert kept.get("/health").status_code == 200
        with callers(deployment, 1, 8000):
            deployment.api.send_signal(signal.SIGTERM)
            wait_refused(probe, deployment.url)
            assert kept.get("/ready").status_code == 503
            answer = kept.post(CHAT_PATH, json=chat(1))
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["code"] == "overloaded"
            deployment.api.send_signal(signal.SIGTERM)


def test_a_full_server_refuses_with_retry_after() -> None:
    with (
        local_deployment(1, SIM, max_pending_requests=2, shutdown_timeout_s=0.0) as deployment,
        callers(deployment, 2, 8000),
        httpx.Client(timeout=DEADLINE_S, trust_env=False) as client,
    ):
        answer = client.post(deployment.url + CHAT_PATH, json=chat(1))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert "2 requests" in answer.json()["error"]["message"]
        deployment.api.send_signal(signal.SIGTERM)


def test_without_engines_it_is_alive_not_ready_and_obeys() -> None:
    with local_deployment(0) as deployment, httpx.Client(base_url=deployment.url, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        answer = client.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["missing"] == ["no engine is ready"]
        refused = client.post(CHAT_PATH, json=chat(1))
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        deployment.api.send_signal(signal.SIGTERM)
        assert deployment.api.wait(DEADLINE_S) == 0


def test_a_caller_that_never_finishes_its_request_does_not_hold_the_exit(api: LocalDeployment) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"POST {CHAT_PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode())
        with httpx.Client(timeout=DEADLINE_S, trust_env=False) as client:
            # half a request is no request yet: it takes nobody's place
            assert client.get(f"{api.url}/v1/cluster").json()["pending_requests"] == 0
        api.api.send_signal(signal.SIGTERM)
        assert api.api.wait(DEADLINE_S) == 0


def test_it_gives_up_when_no_engine_comes() -> None:
    deployment = LocalDeployment(0, start_timeout_s=0.2, log_level="CRITICAL")
    try:
        assert deployment.api.wait(DEADLINE_S) == 1
    finally:
        deployment.close()


def test_importing_it_loads_neither_torch_nor_ray_nor_transformers() -> None:
    code = (
        "import orchestrator.api.__main__, sys; "
        "sys.exit(', '.join({'torch', 'ray', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
