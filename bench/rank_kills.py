"""What benchmarks that kill ranks share: pinned streams, their gaps, the wait for the refill, and the state line."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import zmq

from engine.wire.codec import state_decoder
from engine.wire.messages import GROUP_TOPIC, GroupState
from engine.wire.sockets import AsyncReceiver, Frames, connect, ipc_endpoint, make_socket

_ECHO_S = 0.02  # what the killed rank had sent may still arrive
_REFILL_S = 60.0
_POLL_S = 0.1


class StateLine:
    """Hears every GroupState of a deployment of this machine."""

    def __init__(self, folder: Path, on_state: Callable[[GroupState], None]) -> None:
        """folder: that holds the run folder of the deployment."""
        (run_dir,) = folder.glob("shoal-*")
        self._on_state = on_state
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
        self._on_state(state)


def pinned_request(rank: int, number: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of a stream that stays on a rank while that lives."""
    body = {"model": "sim", "prompt": f"stream {number} of rank {rank}", "max_tokens": 4000, "ignore_eos": True}
    return "/v1/completions", {**body, "stream": True, "seed": number, "data_parallel_rank": rank}


def pause_after(times: Sequence[float], killed_at: float, otherwise: float) -> float:
    """Return how long after the kill the first token came that its old rank had not sent before."""
    return next((at - killed_at for at in times if at > killed_at + _ECHO_S), otherwise)


def longest_gap(times: Sequence[float], since: float, until: float) -> float:
    """Return the longest time without a token between two moments."""
    seen = [since, *(at for at in times if since < at < until), until]
    return max(later - earlier for earlier, later in itertools.pairwise(seen))


async def ranks_of(client: httpx.AsyncClient) -> dict[int, dict[str, Any]]:
    """Return rank -> its row of ``/v1/cluster``."""
    answer = await client.get("/v1/cluster")
    return {rank["rank"]: rank for rank in answer.json()["ranks"]}


async def wait_refilled(client: httpx.AsyncClient, rank: int, incarnation: int) -> None:
    """Wait until a rank's seat is filled with that incarnation or a later one, and ready."""
    async with asyncio.timeout(_REFILL_S):
        while True:
            row = (await ranks_of(client))[rank]
            if row["incarnation"] >= incarnation and row["state"] == "ready":
                return
            await asyncio.sleep(_POLL_S)


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile of some values."""
    return sorted(values)[max(0, round(len(values) * 0.99) - 1)]


def in_ms(seconds: Sequence[float]) -> list[float]:
    """Return milliseconds."""
    return [value * 1000 for value in seconds]
