"""Losses on Ray: an engine, its actor, both stopped, and a whole node. The rank is replaced each time."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.integration.serving import chat, deployment, eventually, rank_is, ranks_of

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.timeout(600)]

SIM = ("--engine", "sim", "--data-parallel-size", "2", "--stall-timeout", "3", "--max-restarts", "20")
NODE_LOSS_S = 4.0


class Cluster:
    """A Ray cluster of two nodes with one CPU each, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.token = folder / "ray-token"
        command = [sys.executable, "-m", "tests.chaos.ray_nodes", str(folder), "2"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._read()

    def execute(self, command: str) -> None:
        """Have a node added or removed."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._read() == "done"

    def close(self) -> None:
        """Stop it."""
        self._process.communicate(timeout=60)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="st", dir="/tmp"))
    started = Cluster(folder)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(started.token))
    yield started
    started.close()
    shutil.rmtree(folder, ignore_errors=True)


def engine_and_actor(url: str, rank: int) -> tuple[psutil.Process, psutil.Process]:
    """Return the processes of a rank."""
    engine = psutil.Process(ranks_of(url)[rank]["pid"])
    actor = engine.parent()
    assert actor is not None
    return engine, actor


def stop_engine(engine: psutil.Process, actor: psutil.Process) -> str:
    engine.suspend()
    return "hung: silent for 3."


def stop_both(engine: psutil.Process, actor: psutil.Process) -> str:
    actor.suspend()
    engine.suspend()
    return "hung: silent for 3."


def kill_engine(engine: psutil.Process, actor: psutil.Process) -> str:
    engine.kill()
    return "killed by SIGKILL"


def kill_actor(engine: psutil.Process, actor: psutil.Process) -> str:
    actor.kill()
    return "The actor is dead because its worker process has died"


def test_engine_and_actor_may_be_stopped_or_killed_and_are_gone_before_the_replacement_starts() -> None:
    with deployment(*SIM) as served:
        url = served.wait_ready()
        for incarnation, end in enumerate((stop_engine, stop_both, kill_engine, kill_actor), start=1):
            engine, actor = engine_and_actor(url, 1)
            reason = end(engine, actor)
            eventually(partial(served.has_logged, f"rank 1 (engine 1.{incarnation}) is dead: {reason}"))
            eventually(partial(rank_is, url, 1, f"1.{incarnation + 1}"))
            assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
            assert chat(url, data_parallel_rank=1) == "length"
        served.end()


def test_a_removed_node_is_found_by_its_silence_and_its_rank_goes_to_the_next_one(cluster: Cluster) -> None:
    with deployment(*SIM, "--ray-address", cluster.address) as served:
        url = served.wait_ready()
        began_at = time.monotonic()
        cluster.execute("remove")
        eventually(lambda: "is dead: on a node that is out of reach" in served.stderr)
        assert time.monotonic() - began_at < NODE_LOSS_S
        (lost,) = [rank for rank, row in ranks_of(url).items() if row["state"] not in ("ready", "suspect")]
        assert [chat(url) for _ in range(4)] == ["length"] * 4
        cluster.execute("add")
        eventually(partial(rank_is, url, lost, f"{lost}.2"))
        assert chat(url, data_parallel_rank=lost) == "length"
        served.end()
