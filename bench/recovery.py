"""How long a stream pauses when its rank is killed, and what the pause consists of.

Four sim ranks on local processes serve open streams; ``kill -9`` hits one of them. A moved stream's pause lasts from
the kill to its next token. On the way: the supervisor sees the process end, the coordinator publishes that, the client
moves the stream, its new rank computes it anew and draws a token.
"""

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import zmq

from bench.report import Row, finish, parse_arguments
from bench.served import Served, served, short_folder
from bench.timed_streams import TimedStream
from engine.wire.codec import state_decoder
from engine.wire.ids import EngineId
from engine.wire.messages import GROUP_TOPIC, GroupState, SeatState
from engine.wire.sockets import AsyncReceiver, Frames, connect, ipc_endpoint, make_socket

NUM_RANKS = 4
STREAMS_PER_RANK = 16

_LOOK_S = 2.0  # behind the kill; what has not come by then counts with this
_ECHO_S = 0.02  # what the killed rank had sent may still arrive
_REFILL_S = 60.0
_POLL_S = 0.1


@dataclass(slots=True)
class Figures:
    """Seconds, of all rounds. pauses: of moved streams. told: from the kill until the group state says it.

    others: longest gaps of the streams on other ranks. calm: the same of all streams before the kill. num_failed:
    streams that broke.
    """

    pauses: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    num_failed: int = 0


class DeathWatch:
    """Notes when the group's state first says that an engine is dead or replaced."""

    def __init__(self, folder: Path) -> None:
        """folder: that holds the run folder of the deployment."""
        (run_dir,) = folder.glob("shoal-*")
        self.deaths: dict[EngineId, float] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._decoder = state_decoder()
        socket = make_socket(self._context, zmq.XSUB, topics=(GROUP_TOPIC,))
        connect(socket, ipc_endpoint(run_dir, "state"))
        self._receiver = AsyncReceiver(socket, self._on_frames)

    def close(self) -> None:
        """Close the socket."""
        self._receiver.close()
        self._context.destroy(linger=0)

    def _on_frames(self, frames: Frames) -> None:
        state = self._decoder.decode(frames[1])
        assert isinstance(state, GroupState)
        now = time.monotonic()
        for seat in state.seats:
            ended = seat.engine_id.incarnation - (seat.state is not SeatState.DEAD)
            for incarnation in range(1, ended + 1):
                self.deaths.setdefault(EngineId(seat.engine_id.rank, incarnation), now)


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8, help="kills (default: 8)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="duration of one step (default: 50)")
    options = parse_arguments(__doc__ or "", parser)
    deployed = ("--engine=sim", "--executor=local", f"--data-parallel-size={NUM_RANKS}", "--max-restarts=1000")
    with short_folder() as folder, served(folder, *deployed, f"--sim-step-ms={options.step_ms}") as deployment:
        figures = asyncio.run(_measure(deployment, folder, options.rounds))
    num_streams = NUM_RANKS * STREAMS_PER_RANK
    title = f"{options.rounds} kills of one of {NUM_RANKS} sim ranks under {num_streams} open streams"
    return finish(title, _rows(figures, options.step_ms / 1000), options)


def _rows(figures: Figures, step_s: float) -> list[Row]:
    pauses, told = _ms(figures.pauses), _ms(figures.told)
    return [
        Row("kill to the moved stream's next token, p50", "ms", statistics.median(pauses)),
        Row("kill to the moved stream's next token, p99", "ms", _p99(pauses), bar=1000.0, bar_on="value"),
        Row("of which until the group state says so, p50", "ms", statistics.median(told)),
        Row("of which until the group state says so, worst", "ms", max(told)),
        Row("of which moved, computed anew, drawn, p50", "ms", statistics.median(pauses) - statistics.median(told)),
        Row("longest gap of streams on other ranks, p50", "steps", statistics.median(figures.others) / step_s),
        Row(
            "longest gap of streams on other ranks, p99",
            "steps",
            _p99(figures.others) / step_s,
            bar=3.0,
            bar_on="value",
        ),
        Row("the same 2 s before the kill, p99", "steps", _p99(figures.calm) / step_s),
        Row("streams that broke", "streams", figures.num_failed, bar=0.0, bar_on="value"),
    ]


async def _measure(deployment: Served, folder: Path, num_rounds: int) -> Figures:
    figures, watch = Figures(), DeathWatch(folder)
    try:
        async with httpx.AsyncClient(base_url=deployment.url, trust_env=False) as client:
            for number in range(num_rounds):
                await _round(client, deployment.url, number % NUM_RANKS, watch, figures)
    finally:
        watch.close()
    return figures


async def _round(client: httpx.AsyncClient, url: str, rank: int, watch: DeathWatch, figures: Figures) -> None:
    victim = (await _ranks(client))[rank]
    streams = {each: [TimedStream(*_request(each, n)) for n in range(STREAMS_PER_RANK)] for each in range(NUM_RANKS)}
    everybody = [stream for group in streams.values() for stream in group]
    await asyncio.gather(*(stream.open(url) for stream in everybody))
    await asyncio.gather(*(stream.has_begun.wait() for stream in everybody))
    await asyncio.sleep(_LOOK_S)
    killed_at = time.monotonic()
    os.kill(victim["pid"], signal.SIGKILL)
    await asyncio.sleep(_LOOK_S)
    for each, group in streams.items():
        for stream in group:
            if each == rank:
                figures.pauses.append(_pause(stream.times, killed_at))
            else:
                figures.others.append(_longest_gap(stream.times, killed_at, killed_at + _LOOK_S))
            figures.calm.append(_longest_gap(stream.times, killed_at - _LOOK_S, killed_at))
    figures.told.append(watch.deaths[EngineId(rank, victim["incarnation"])] - killed_at)
    figures.num_failed += sum(stream.failed for stream in everybody)
    for stream in everybody:
        stream.close()
    await _wait_refilled(client, rank, victim["incarnation"] + 1)


def _request(rank: int, number: int) -> tuple[str, dict[str, Any]]:
    body = {"model": "sim", "prompt": f"stream {number} of rank {rank}", "max_tokens": 4000, "ignore_eos": True}
    return "/v1/completions", {**body, "stream": True, "seed": number, "data_parallel_rank": rank}


def _pause(times: Sequence[float], killed_at: float) -> float:
    """Return how long after the kill the first token came that its old rank had not sent before."""
    return next((at - killed_at for at in times if at > killed_at + _ECHO_S), _LOOK_S)


def _longest_gap(times: Sequence[float], since: float, until: float) -> float:
    seen = [since, *(at for at in times if since < at < until), until]
    return max(later - earlier for earlier, later in itertools.pairwise(seen))


async def _ranks(client: httpx.AsyncClient) -> dict[int, dict[str, Any]]:
    answer = await client.get("/v1/cluster")
    return {rank["rank"]: rank for rank in answer.json()["ranks"]}


async def _wait_refilled(client: httpx.AsyncClient, rank: int, incarnation: int) -> None:
    async with asyncio.timeout(_REFILL_S):
        while True:
            row = (await _ranks(client))[rank]
            if row["incarnation"] >= incarnation and row["state"] == "ready":
                return
            await asyncio.sleep(_POLL_S)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[max(0, round(len(values) * 0.99) - 1)]


def _ms(seconds: Sequence[float]) -> list[float]:
    return [value * 1000 for value in seconds]


if __name__ == "__main__":
    sys.exit(main())
