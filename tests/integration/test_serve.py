"""``shoal serve`` on local processes, from start to stop."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial

import httpx
import psutil
import pytest

from tests.integration.serving import (
    CHAT,
    Deployment,
    chat,
    deployment,
    eventually,
    rank_is,
    ranks_of,
    run_shoal,
)

SIM = ("--engine", "sim", "--executor", "local", "--data-parallel-size", "2")
SLOW = (*SIM, "--sim-step-ms", "50")


@pytest.fixture(scope="module")
def shared() -> Iterator[Deployment]:
    with deployment(*SIM) as served:
        served.wait_ready()
        yield served


@pytest.fixture
def url(shared: Deployment) -> str:
    return shared.wait_ready()


def test_a_chat_request_is_answered_and_a_stream_ends_with_its_last_message(url: str) -> None:
    assert chat(url) == "length"
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_the_banner_shows_the_url_and_an_example_that_can_be_copied(shared: Deployment, url: str) -> None:
    assert "sim on 2 ranks" in shared.stdout
    assert f"curl -N {url}/v1/chat/completions" in shared.stdout
    assert f"kill {shared.process.pid}" in shared.stdout


def test_status_finds_the_deployment_of_this_machine_and_shows_its_ranks(shared: Deployment, url: str) -> None:
    shown = run_shoal("status", "--run-dir", str(shared.parent))
    assert shown.returncode == 0, shown.stderr
    pids = {str(rank["pid"]) for rank in ranks_of(url).values()}
    assert len(pids) == 2
    assert all(pid in shown.stdout for pid in pids)
    assert shown.stdout.count("ready") == 2


def test_status_as_json_is_the_answer_of_the_cluster_route(url: str) -> None:
    shown = json.loads(run_shoal("status", "--json", "--url", url).stdout)
    assert [rank["engine_id"] for rank in shown["ranks"]] == ["0.1", "1.1"]


def test_sigterm_lets_streams_finish_and_leaves_nothing_behind() -> None:
    with deployment(*SLOW) as served:
        url = served.wait_ready()
        request = CHAT | {"stream": True, "max_tokens": 20}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=request, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.send_signal(signal.SIGTERM)
            text = "".join(lines)
        assert '"finish_reason":"length"' in text
        assert text.endswith("data: [DONE]")
        assert served.wait_exit() == 0, served.stderr
        served.assert_nothing_left()


def test_streams_that_do_not_finish_in_time_get_their_last_message() -> None:
    with deployment(*SLOW, "--shutdown-timeout", "0.2") as served:
        url = served.wait_ready()
        request = CHAT | {"stream": True, "max_tokens": 4000}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=request, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.send_signal(signal.SIGTERM)
            text = "".join(lines)
        assert '"finish_reason":"abort"' in text
        assert text.endswith("data: [DONE]")
        assert served.wait_exit() == 0, served.stderr
        served.assert_nothing_left()


def _stops_at_once(served: Deployment) -> bool:
    """Send SIGTERM once more: what comes too soon after the first belongs to that one."""
    served.send_signal(signal.SIGTERM)
    return "stopping at once" in served.stderr


def test_a_second_sigterm_stops_at_once() -> None:
    with deployment(*SLOW, "--shutdown-timeout", "60") as served:
        url = served.wait_ready()
        request = CHAT | {"stream": True, "max_tokens": 4000}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=request, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.send_signal(signal.SIGTERM)
            eventually(lambda: "once more stops at once" in served.stderr)
            eventually(lambda: _stops_at_once(served))
            assert served.wait_exit(10) == 1, served.stderr
        served.assert_nothing_left()


def test_ctrl_c_stops_in_order_although_the_whole_group_gets_it() -> None:
    with deployment(*SIM) as served:
        served.wait_ready()
        served.signal_group(signal.SIGINT)
        assert served.wait_exit() == 0, served.stderr
        assert "every process ended by itself" in served.stderr
        served.assert_nothing_left()


def test_sigterm_to_the_whole_process_group_drains_like_one_to_the_supervisor() -> None:
    with deployment(*SLOW) as served:
        url = served.wait_ready()
        request = CHAT | {"stream": True, "max_tokens": 20}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=request, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.send_signal(signal.SIGTERM)
            served.signal_group(signal.SIGTERM)
            text = "".join(lines)
        assert '"finish_reason":"length"' in text
        assert served.wait_exit() == 0, served.stderr
        assert "every process ended by itself" in served.stderr
        served.assert_nothing_left()


def test_a_stop_while_starting_is_an_ordered_stop() -> None:
    with deployment(*SIM, "--sim-load-s", "60") as served:
        eventually(lambda: "rank 1: loading" in served.stderr)
        served.send_signal(signal.SIGTERM)
        assert served.wait_exit(20) == 0, served.stderr
        served.assert_nothing_left()


def test_no_process_outlives_a_killed_supervisor_and_the_next_start_sweeps_its_folder() -> None:
    with deployment(*SIM) as served:
        served.wait_ready()
        served.send_signal(signal.SIGKILL)
        served.wait_exit()
        eventually(lambda: not served.processes(), 10)
        (stale,) = served.run_folders()
        successor = Deployment(*SIM, parent=served.parent)
        try:
            successor.wait_ready()
            assert stale not in successor.run_folders()
            successor.send_signal(signal.SIGTERM)
            assert successor.wait_exit() == 0
        finally:
            successor.close()
        served.assert_nothing_left()


def test_no_engine_that_loads_outlives_a_killed_supervisor() -> None:
    with deployment(*SIM, "--sim-load-s", "60") as served:
        eventually(lambda: "rank 1: loading" in served.stderr)
        assert len(served.processes("engine.main")) == 2
        served.send_signal(signal.SIGKILL)
        served.wait_exit()
        eventually(lambda: not served.processes(), 10)
        shutil.rmtree(served.run_folders()[0])  # nobody was left to
        served.assert_nothing_left()


def test_a_rank_without_restarts_left_stays_dead_with_its_reason_and_the_others_go_on() -> None:
    with deployment(*SIM, "--max-restarts", "0") as served:
        url = served.wait_ready()
        victim = ranks_of(url)[1]
        os.kill(victim["pid"], signal.SIGKILL)
        dead = eventually(lambda: (rank := ranks_of(url).get(1)) and rank["state"] == "dead" and rank, 2)
        assert httpx.get(f"{url}/ready").json()["ready_ranks"] == 1
        assert dead["reason"] == "killed by SIGKILL"
        assert "rank 1 (engine 1.1) is dead: killed by SIGKILL; it stays so" in served.stderr
        assert [chat(url) for _ in range(4)] == ["length"] * 4
        served.send_signal(signal.SIGTERM)
        assert served.wait_exit() == 0, served.stderr


def test_the_replica_of_a_killed_rank_is_replaced_and_serves() -> None:
    with deployment(*SIM) as served:
        url = served.wait_ready()
        for incarnation in (2, 3):
            os.kill(ranks_of(url)[1]["pid"], signal.SIGKILL)
            eventually(partial(rank_is, url, 1, f"1.{incarnation}"))
        assert "rank 1 (engine 1.1) is dead: killed by SIGKILL; starting it again now (restart 1 of 5" in served.stderr
        assert "rank 1 (engine 1.2) is dead: killed by SIGKILL; starting it again in 1 s (restart 2" in served.stderr
        assert {chat(url, data_parallel_rank=1) for _ in range(4)} == {"length"}
        assert [(row["restarts"], row["last_end"]) for row in ranks_of(url).values()] == [
            (0, ""),
            (2, "killed by SIGKILL"),
        ]
        metrics = httpx.get(f"{url}/metrics").text
        assert 'shoal_engine_restarts_total{engine="1",reason="signal"} 2.0' in metrics
        served.end()


def test_a_stopped_rank_is_named_killed_and_replaced() -> None:
    with deployment(*SIM, "--stall-timeout", "3") as served:
        url = served.wait_ready()
        victim = psutil.Process(ranks_of(url)[1]["pid"])
        victim.suspend()
        eventually(lambda: "gets no new requests: silent for 1." in served.stderr)
        assert [chat(url, data_parallel_rank=0) for _ in range(4)] == ["length"] * 4
        eventually(partial(rank_is, url, 1, "1.2"))
        assert not victim.is_running()
        assert f"rank 1 (engine 1.1, pid {victim.pid} on" in served.stderr
        assert "is hung: silent for 3." in served.stderr
        assert "is dead: hung: silent for 3." in served.stderr
        assert chat(url, data_parallel_rank=1) == "length"


def test_a_step_that_never_ends_is_named_killed_and_its_rank_refilled() -> None:
    with deployment(*SIM, "--stall-timeout", "3", "--sim-hang-on-token", str(ord("#"))) as served:
        url = served.wait_ready()
        body = CHAT | {"messages": [{"role": "user", "content": "#"}], "data_parallel_rank": 1, "stream": True}
        with pytest.raises(httpx.ReadTimeout):  # who waited on would have it tried once more, on the other rank
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=0.5)
        eventually(lambda: "is dead: hung: no step for 3." in served.stderr)
        eventually(partial(rank_is, url, 1, "1.2"))
        assert "rank 0 (engine" not in served.stderr


def test_the_death_of_every_rank_ends_the_deployment_with_their_reasons() -> None:
    with deployment(*SIM, "--max-restarts", "0") as served:
        url = served.wait_ready()
        for rank in ranks_of(url).values():
            os.kill(rank["pid"], signal.SIGKILL)
        assert served.wait_exit() == 1
        last = served.stderr.splitlines()[-1]
        assert last.startswith("shoal: error: every engine is dead: rank 0: dead: killed by SIGKILL; rank 1: dead: ")
        served.assert_nothing_left()


def test_a_dead_coordinator_is_replaced_with_a_higher_generation_while_requests_go_on() -> None:
    with deployment(*SIM) as served:
        url = served.wait_ready()
        (first,) = served.processes("lb.coordinator")
        first.kill()
        eventually(lambda: "starting generation 2" in served.stderr)
        eventually(lambda: any(child.pid != first.pid for child in served.processes("lb.coordinator")))
        assert [chat(url) for _ in range(4)] == ["length"] * 4
        eventually(lambda: {rank["state"] for rank in ranks_of(url).values()} == {"ready"})
        served.end()


def test_a_killed_api_process_is_back_on_its_port_and_the_engines_have_freed_its_requests() -> None:
    with deployment(*SLOW) as served:
        url = served.wait_ready()
        (api,) = served.processes("orchestrator.api")
        request = CHAT | {"stream": True, "max_tokens": 4000}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=request, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            api.kill()
            with pytest.raises(httpx.HTTPError):
                list(lines)
        ranks = eventually(lambda: len(ranks := ranks_of(url)) == 2 and ranks)  # the port's queue holds the caller
        assert [rank["running"] for rank in ranks.values()] == [0, 0]
        assert "the API process 0 is gone (killed by SIGKILL); starting client 0.2" in served.stderr
        eventually(lambda: httpx.get(f"{url}/ready").json()["ready_ranks"] == 2)
        assert [chat(url) for _ in range(4)] == ["length"] * 4
        picks = [rank["picks"] for rank in ranks_of(url).values()]
        assert picks == [3, 2]  # the broken stream's is among them: what the dead process counted stays
        served.end()


def test_an_api_process_without_restarts_left_ends_the_deployment_with_a_clear_error() -> None:
    with deployment(*SIM, "--max-restarts", "0") as served:
        served.wait_ready()
        (api,) = served.processes("orchestrator.api")
        api.kill()
        assert served.wait_exit() == 1
        line = served.stderr.splitlines()[-1]
        assert line == "shoal: error: the API process 0 died 1 times in a row: killed by SIGKILL"
        served.assert_nothing_left()
