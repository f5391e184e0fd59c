"""A deployment with keys: who gets in, and that the keys can be read nowhere."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.integration.serving import Deployment, deployment, run_shoal

API_KEY, OTHER_KEY, ADMIN_KEY = "k-first-key", "k-other-key", "k-admin-key"
KEYS = ("--api-key", API_KEY, "--api-key", OTHER_KEY, f"--admin-api-key={ADMIN_KEY}")
SIM = ("--engine", "sim", "--executor", "local", "--api-server-count", "2", "--sim-step-ms", "2")


@pytest.fixture(scope="module")
def shared() -> Iterator[Deployment]:
    with deployment(*SIM, *KEYS) as served:
        served.wait_ready()
        yield served


@pytest.fixture
def url(shared: Deployment) -> str:
    return shared.wait_ready()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_official_client_gets_in_with_a_key_and_only_with_one(url: str) -> None:
    def ask(key: str) -> str | None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            return client.completions.create(model="sim", prompt="a", max_tokens=4).choices[0].finish_reason

    assert ask(API_KEY) == ask(OTHER_KEY) == ask(ADMIN_KEY) == "length"
    with pytest.raises(openai.AuthenticationError) as refused:
        ask("wrong")
    assert refused.value.code == "invalid_api_key"


def test_an_error_has_the_usual_shape_and_names_the_request(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={}, headers={"x-request-id": "mine"})
    assert answer.status_code == httpx.codes.UNAUTHORIZED
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert (answer.headers["x-request-id"], answer.headers["www-authenticate"]) == ("mine", "Bearer")


def test_admin_calls_need_the_admin_key(url: str) -> None:
    for path in ("/pause?mode=keep", "/resume", "/v1/cluster/ranks/0/cordon", "/collective_rpc", "/abort_requests"):
        assert httpx.post(url + path).status_code == httpx.codes.UNAUTHORIZED
        refused = httpx.post(url + path, headers=bearer(API_KEY))
        assert refused.status_code == httpx.codes.FORBIDDEN
        assert "--admin-api-key" in refused.json()["error"]["message"]
    assert httpx.get(f"{url}/is_paused", headers=bearer(ADMIN_KEY)).json()["is_paused"] is False


def test_probes_and_metrics_stay_open(url: str) -> None:
    assert all(httpx.get(url + path).is_success for path in ("/health", "/ready", "/metrics", "/version"))


def test_commands_take_the_key_from_the_environment(shared: Deployment, url: str) -> None:
    assert "wants a key" in run_shoal("status", "--url", url).stderr
    refused = run_shoal("cordon", "0", "--url", url, SHOAL_API_KEY=API_KEY)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    shown = run_shoal("pause", "--mode", "wait", "--run-dir", str(shared.parent), SHOAL_ADMIN_API_KEY=ADMIN_KEY)
    assert json.loads(shown.stdout)["status"] == "paused", shown.stderr
    for words in (("resume",), ("drain", "0"), ("uncordon", "0"), ("abort", "--all")):
        done = run_shoal(*words, "--url", url, SHOAL_ADMIN_API_KEY=ADMIN_KEY)
        assert done.returncode == 0, done.stderr
    unknown = run_shoal("cordon", "7", "--url", url, "--admin-api-key", ADMIN_KEY)
    assert unknown.stderr == "shoal: error: there is no rank 7; valid: 0\n"


def test_the_keys_can_be_read_nowhere(shared: Deployment, url: str) -> None:
    httpx.get(f"{url}/v1/models", headers=bearer("k-wrong-key"))
    processes = [psutil.Process(shared.process.pid), *shared.processes()]
    shown = [*(" ".join(process.cmdline()) + str(process.environ()) for process in processes)]
    shown += [path.read_text() for path in Path(shared.run_folders()[0]).rglob("*.json")]
    shown += [shared.stdout, shared.stderr, httpx.get(f"{url}/server_info", headers=bearer(ADMIN_KEY)).text]
    shown += [httpx.get(f"{url}/metrics").text, httpx.get(f"{url}/v1/cluster", headers=bearer(API_KEY)).text]
    assert len(processes) > 4
    assert not [text for text in shown for key in (API_KEY, OTHER_KEY, ADMIN_KEY, "k-wrong-key") if key in text]


def test_a_deployment_without_an_admin_key_refuses_admin_calls_by_the_name_of_the_option() -> None:
    with deployment(*SIM, "--api-key", API_KEY) as served:
        url = served.wait_ready()
        for headers in ({}, bearer(API_KEY)):
            refused = httpx.post(f"{url}/pause", headers=headers)
            assert refused.status_code == httpx.codes.FORBIDDEN
            assert "--admin-api-key" in refused.json()["error"]["message"]
        assert httpx.get(f"{url}/v1/models", headers=bearer(API_KEY)).is_success
