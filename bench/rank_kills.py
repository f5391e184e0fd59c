"""Kills of ranks under open streams, the gaps that the streams see, and the state channel that shows the rest."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import zmq

from bench.streams import TimedStream
from engine.wire.codec import state_decoder
from engine.wire.endpoints import ipc_endpoint
from engine.wire.ids import EngineId
from engine.wire.messages import GROUP_TOPIC, GroupState
from engine.wire.sockets import AsyncReceiver, connect, make_socket
from engine.wire.tensors import Frames

_ECHO_S = 0.02  # outputs that the killed rank had sent may still arrive
_REPLACEMENT_S = 60.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Kill:
    """A rank's engine that was killed under open streams. streams: by rank. killed_at: monotonic seconds."""

    victim: EngineId
    killed_at: float
    streams: Mapping[int, Sequence[TimedStream]]

    @property
    def everybody(self) -> list[TimedStream]:
        """Return the streams of all ranks."""
        return [stream for streams in self.streams.values() for stream in streams]

    @property
    def survivors(self) -> list[TimedStream]:
        """Return the streams of the ranks that live."""
        return [stream for rank, streams in self.streams.items() if rank != self.victim.rank for stream in streams]

    @property
    def num_failed(self) -> int:
        """Return how many streams broke."""
        return sum(stream.failed for stream in self.everybody)


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRound:
    """How ranks are killed. calm_s: from the last stream's first token to the kill. look_s: from there to the end."""

    num_ranks: int
    streams_per_rank: int
    calm_s: float
    look_s: float

    async def run(self, client: httpx.AsyncClient, url: str, rank: int) -> Kill:
        """Kill a rank under open streams, hang up when it was looked at long enough, and wait for the replacement."""
        victim = (await ranks_of(client))[rank]
        streams = {each: self._streams_of(each) for each in range(self.num_ranks)}
        everybody = [stream for of_rank in streams.values() for stream in of_rank]
        await asyncio.gather(*(stream.open(url) for stream in everybody))
        await asyncio.gather(*(stream.has_begun.wait() for stream in everybody))
        await asyncio.sleep(self.calm_s)
        killed_at = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        await asyncio.sleep(self.look_s)
        for stream in everybody:
            stream.close()
        await _wait_replaced(client, rank, victim["incarnation"] + 1)
        return Kill(EngineId(rank, victim["incarnation"]), killed_at, streams)

    def _streams_of(self, rank: int) -> list[TimedStream]:
        return [TimedStream(*pinned_request(rank, number)) for number in range(self.streams_per_rank)]


class StateChannel:
    """Receives every GroupState of a deployment on this machine."""

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


async def _wait_replaced(client: httpx.AsyncClient, rank: int, incarnation: int) -> None:
    """Wait until a rank is served by that incarnation or a later one, and ready."""
    async with asyncio.timeout(_REPLACEMENT_S):
        while True:
            row = (await ranks_of(client))[rank]
            if row["incarnation"] >= incarnation and row["state"] == "ready":
                return
            await asyncio.sleep(_POLL_S)
