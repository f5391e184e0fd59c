"""``shoal serve`` on a Ray of its own: the same life as on local processes, and nothing of Ray left behind."""

import os
import signal

import psutil
import pytest

from tests.integration.serving import chat, deployment, eventually, rank_is, ranks_of

SIM = ("--engine", "sim", "--data-parallel-size", "2")

pytestmark = pytest.mark.ray


def actor_of(pid: int) -> psutil.Process:
    """Return the actor process that an engine runs under."""
    parent = psutil.Process(pid).parent()
    assert parent is not None
    return parent


def test_every_rank_runs_under_an_actor_of_its_own_and_a_lost_actor_is_a_dead_rank() -> None:
    with deployment(*SIM, "--max-restarts", "0") as served:
        url = served.wait_ready()
        assert chat(url) == "length"
        shells = {rank: actor_of(row["pid"]) for rank, row in ranks_of(url).items()}
        assert len({actor.pid for actor in shells.values()}) == 2
        assert all(actor.name().startswith("ray::") for actor in shells.values()), shells
        assert set(served.listening()) == {"127.0.0.1"}, "nothing of Ray's either is open to other hosts"
        core = psutil.Process(ranks_of(url)[1]["pid"])

        shells[1].kill()
        dead = eventually(lambda: (row := ranks_of(url).get(1)) and row["state"] == "dead" and row)
        assert "worker process has died" in dead["reason"]
        eventually(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE, 10)
        assert [chat(url) for _ in range(4)] == ["length"] * 4

        served.end()


def test_the_seat_of_a_lost_engine_is_filled_in_its_shell_and_that_of_a_lost_shell_in_a_new_one() -> None:
    with deployment(*SIM) as served:
        url = served.wait_ready()
        actor = actor_of(ranks_of(url)[1]["pid"])

        os.kill(ranks_of(url)[1]["pid"], signal.SIGKILL)
        eventually(lambda: rank_is(url, 1, "1.2"))
        assert actor_of(ranks_of(url)[1]["pid"]).pid == actor.pid

        actor.kill()
        eventually(lambda: rank_is(url, 1, "1.3"))
        assert actor_of(ranks_of(url)[1]["pid"]).pid != actor.pid
        assert chat(url, data_parallel_rank=1) == "length"

        served.end()


def test_ctrl_c_reaches_ray_too_and_still_stops_in_order() -> None:
    home = os.path.expanduser("~/.ray")
    had_home = os.path.exists(home)
    with deployment(*SIM) as served:
        url = served.wait_ready()
        assert chat(url) == "length"
        served.signal_group(signal.SIGINT)
        assert served.wait_exit() == 0, served.stderr
        assert "every process ended by itself" in served.stderr
        served.assert_nothing_left()
    assert os.path.exists(home) == had_home


def test_no_engine_outlives_a_killed_supervisor() -> None:
    with deployment(*SIM) as served:
        url = served.wait_ready()
        engines = [psutil.Process(row["pid"]) for row in ranks_of(url).values()]
        served.send_signal(signal.SIGKILL)
        served.wait_exit()
        _, alive = psutil.wait_procs(engines, 10)
        assert not alive
        for module in ("engine.main", "lb.coordinator", "orchestrator.api"):
            assert not served.processes(module)


def test_too_many_gpus_for_the_machine_are_named() -> None:
    with deployment("--model", "smollm2-135m", "--device", "cuda", "--data-parallel-size", "64") as served:
        assert served.wait_exit() == 1
        line = served.stderr.splitlines()[-1]
        assert line.startswith("shoal: error: needs 64 GPUs, the Ray cluster has ")
        served.assert_nothing_left()
