"""Deaths and stops of ranks under 64 open streams, again and again: no stream is lost and no answer changes."""

import asyncio
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from tests.chaos.rounds import Fault, kill_actor, kill_engine, run_rounds, stop_engine
from tests.chaos.streams import (
    NUM_STREAMS,
    Answer,
    Request,
    differences,
    differences_within_margin,
    mixed_requests,
    send_all,
)
from tests.integration.serving import deployment, eventually, rank_is, ranks_of
from tests.integration.test_sampling import MODEL, SCHEMA, save_model

SIM = ("--engine", "sim", "--data-parallel-size", "4", "--sim-step-ms", "10", "--stall-timeout", "3")
LOCAL = (*SIM, "--executor", "local")
MAX_TOKENS = 150

chaos = pytest.mark.chaos


def test_a_killed_rank_changes_no_answer() -> None:
    """The one round that every test run makes; the others follow with ``make chaos``."""
    with deployment(*LOCAL) as served:
        run_rounds(served, mixed_requests(NUM_STREAMS, MAX_TOKENS), [kill_engine], seed=0)
        served.end()


@chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", [kill_engine, stop_engine], ids=["kill", "stop"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_thirty_rounds_of_local_ranks(fault: Fault, seed: int) -> None:
    with deployment(*LOCAL, "--max-restarts", "100") as served:
        run_rounds(served, mixed_requests(NUM_STREAMS, MAX_TOKENS), [fault] * 10, seed=seed)
        served.end()


@chaos
@pytest.mark.timeout(600)
def test_three_of_four_ranks_killed_in_the_same_moment_end_no_stream_that_had_no_token_yet() -> None:
    requests = mixed_requests(NUM_STREAMS, 20)
    with deployment(*LOCAL, "--max-restarts", "100", "--max-num-seqs", "2") as served:
        url = served.wait_ready()
        unbroken = asyncio.run(send_all(url, requests))
        for incarnation in range(2, 12):
            wrong = differences(requests, unbroken, asyncio.run(_kill_while_most_wait(url, requests)))
            assert not wrong, f"round {incarnation - 1}, {len(wrong)} differ:\n" + "\n".join(wrong[:5])
            for rank in range(3):
                eventually(partial(rank_is, url, rank, f"{rank}.{incarnation}"))
        served.end()


async def _kill_while_most_wait(url: str, requests: Sequence[Request]) -> list[Answer]:
    pids = [ranks_of(url)[rank]["pid"] for rank in range(3)]
    sending = asyncio.create_task(send_all(url, requests))
    await asyncio.to_thread(eventually, lambda: all(row["waiting"] for row in ranks_of(url).values()))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return await sending


@chaos
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_thirty_rounds_of_ranks_on_ray(seed: int) -> None:
    with deployment(*SIM, "--max-restarts", "100") as served:
        run_rounds(served, mixed_requests(NUM_STREAMS, MAX_TOKENS), [kill_engine, kill_actor] * 5, seed=seed)
        served.end()


@chaos
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [4, 5, 6])
def test_thirty_rounds_of_real_models_on_ray(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    save_model(tmp_path / MODEL, poisoned=False)
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    extra: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0.8, "response_format": schema, "ignore_eos": False},
    ]
    model = ("--model", str(tmp_path / MODEL), "--dtype", "float32", "--data-parallel-size", "4")
    with deployment(*model, "--max-restarts", "100") as served:
        run_rounds(
            served,
            mixed_requests(NUM_STREAMS, 300, MODEL, extra),
            [kill_engine, kill_actor] * 5,
            seed=seed,
            longest_wait_s=0.5,
            compare=differences_within_margin,
        )
        served.end()
