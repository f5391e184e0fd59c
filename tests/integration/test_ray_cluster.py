"""``shoal serve --ray-address``: a cluster that somebody else runs is used, and left as it was."""

import ipaddress
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.scaling import ready_ranks, scale
from tests.integration.serving import Deployment, chat, deployment, eventually, ranks_of, wire_mechanism

pytestmark = pytest.mark.ray

SIM = ("--engine", "sim", "--data-parallel-size", "2")


class Head:
    """A Ray head with two CPUs in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.token = folder / "ray-token"
        command = [sys.executable, "-m", "tests.integration.ray_head", str(folder), "2"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._read()

    def left(self) -> dict[str, int]:
        """Return what drivers hold on it now."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._read()))

    def close(self) -> None:
        """Stop it."""
        self._process.communicate(timeout=60)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="st", dir="/tmp"))
    started = Head(folder)
    yield started
    started.close()
    shutil.rmtree(folder)


@pytest.fixture
def joining(head: Head, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Return the arguments of a deployment on that cluster."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(head.token))
    return (*SIM, "--ray-address", head.address)


def test_two_deployments_on_a_running_cluster_serve_beside_each_other_and_give_everything_back(
    head: Head, joining: tuple[str, ...]
) -> None:
    before = head.left()
    assert before["placement_groups"] == 1, "a foreign one, which stays"
    alone = (*joining, "--data-parallel-size", "1")
    with deployment(*alone) as first, deployment(*alone) as second:
        for served in (first, second):
            url = served.wait_ready()
            assert chat(url) == "length"
            assert len(ranks_of(url)) == 1
            _assert_lines_have_keys(served)
        assert head.left() == {name: number + 2 for name, number in before.items()}
        first.end()
        assert chat(second.wait_ready()) == "length"
        eventually(lambda: head.left() == {name: number + 1 for name, number in before.items()}, 10)
        second.end()
    eventually(lambda: head.left() == before, 10)


def _assert_lines_have_keys(served: Deployment) -> None:
    """Engines may be on other hosts, so the lines are TCP, and CURVE without being told."""
    ((address, ports),) = served.listening("lb.coordinator").items()
    assert not ipaddress.ip_address(address).is_unspecified
    assert [wire_mechanism(address, port) for port in ports] == ["CURVE", "CURVE"]


def test_ranks_come_and_go_with_their_places_and_what_does_not_fit_is_named(
    head: Head, joining: tuple[str, ...]
) -> None:
    before = head.left()
    with deployment(*joining, "--data-parallel-size", "1") as served:
        with httpx.Client(base_url=served.wait_ready(), timeout=60.0, trust_env=False) as http:
            scale(http, size=2)
            assert ready_ranks(http) == [0, 1]
            assert head.left() == {name: number + 2 for name, number in before.items()}
            refused = http.post("/v1/cluster/scale", json={"size": 3})
            assert refused.status_code == 409
            assert "1 more ranks do not fit, 0 would: each rank needs 1 CPU" in refused.json()["error"]["message"]
            assert http.get("/v1/cluster/capacity").json()["can_add"] == 0
            scale(http, remove=[0])
            assert ready_ranks(http) == [1]
            eventually(lambda: head.left() == {name: number + 1 for name, number in before.items()}, 10)
            eventually(lambda: http.get("/v1/cluster/capacity").json()["can_add"] == 1)
        served.end()
    eventually(lambda: head.left() == before, 10)


def test_too_few_cpus_in_the_cluster_are_named_at_once(joining: tuple[str, ...]) -> None:
    with deployment(*joining, "--data-parallel-size", "5") as served:
        assert served.wait_exit() == 1
        assert served.stderr.splitlines()[-1] == (
            "shoal: error: needs 5 CPUs (5 ranks x 1 threads), the Ray cluster has 2 (1 node)"
        )
        served.assert_nothing_left()


def test_an_address_where_nothing_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    with deployment(*SIM, "--ray-address", address) as served:
        assert served.wait_exit() == 1
        assert f"the Ray cluster at {address} (--ray-address) is unreachable: " in served.stderr.splitlines()[-1]
        served.assert_nothing_left()


def test_an_address_where_something_else_listens_is_named_within_the_start_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with deployment(*SIM, "--ray-address", address, "--start-timeout", "12") as served:
            assert served.wait_exit(40) == 1
            assert served.stderr.splitlines()[-1] == (
                "shoal: error: not ready within 12 s (--start-timeout): reserving places for 2 rank(s)"
            )
            served.assert_nothing_left()
