"""Pause of a stream whose rank is killed, and the parts of that pause.

Four sim ranks on local processes serve open streams; ``kill -9`` hits one of them. The pause of a migrated stream lasts
from the kill to its next token: the supervisor sees the process end, the coordinator publishes that, the client
migrates the sequence, its new rank computes it anew and draws a token.
"""

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.rank_kills import Kill, KillRound, StateChannel, longest_gap, pause_after
from bench.report import Row, finish, in_ms, p99, parse_arguments
from bench.served import Served, served, short_folder
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.states import ReplicaState

NUM_RANKS = 4
STREAMS_PER_RANK = 16

_LOOK_S = 2.0  # before the kill and after it; a token that has not come by then counts with this

ROUND = KillRound(num_ranks=NUM_RANKS, streams_per_rank=STREAMS_PER_RANK, calm_s=_LOOK_S, look_s=_LOOK_S)


@dataclass(slots=True)
class Figures:
    """Seconds, of all rounds. pauses: of migrated streams. detection: from the kill until the group state shows it.

    others: longest gaps of the streams on other ranks. calm: the same of all streams before the kill. num_failed:
    streams that broke.
    """

    pauses: list[float] = field(default_factory=list)
    detection: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    num_failed: int = 0


class DeathWatch:
    """Records when the group's state first shows an engine as dead or replaced."""

    def __init__(self) -> None:
        self.deaths: dict[EngineId, float] = {}

    def on_state(self, state: GroupState) -> None:
        """Look at one state."""
        now = time.monotonic()
        for replica in state.replicas:
            ended = replica.engine_id.incarnation - (replica.state is not ReplicaState.DEAD)
            for incarnation in range(1, ended + 1):
                self.deaths.setdefault(EngineId(replica.engine_id.rank, incarnation), now)


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
    pauses, detection = in_ms(figures.pauses), in_ms(figures.detection)
    rest = statistics.median(pauses) - statistics.median(detection)
    return [
        Row("kill to the migrated stream's next token, p50", "ms", statistics.median(pauses)),
        Row("kill to the migrated stream's next token, p99", "ms", p99(pauses), bar=1000.0, bar_on="value"),
        Row("of which until the group state shows it, p50", "ms", statistics.median(detection)),
        Row("of which until the group state shows it, worst", "ms", max(detection)),
        Row("of which migrated, computed anew, drawn, p50", "ms", rest),
        Row("longest gap of streams on other ranks, p50", "steps", statistics.median(figures.others) / step_s),
        Row(
            "longest gap of streams on other ranks, p99",
            "steps",
            p99(figures.others) / step_s,
            bar=3.0,
            bar_on="value",
        ),
        Row("the same 2 s before the kill, p99", "steps", p99(figures.calm) / step_s),
        Row("streams that broke", "streams", figures.num_failed, bar=0.0, bar_on="value"),
    ]


async def _measure(deployment: Served, folder: Path, num_rounds: int) -> Figures:
    figures, watch = Figures(), DeathWatch()
    channel = StateChannel(folder, watch.on_state)
    try:
        async with httpx.AsyncClient(base_url=deployment.url, trust_env=False) as client:
            for number in range(num_rounds):
                _note(figures, await ROUND.run(client, deployment.url, number % NUM_RANKS), watch)
    finally:
        channel.close()
    return figures


def _note(figures: Figures, kill: Kill, watch: DeathWatch) -> None:
    killed_at, migrated = kill.killed_at, kill.streams[kill.victim.rank]
    figures.pauses += [pause_after(stream.times, killed_at, _LOOK_S) for stream in migrated]
    figures.others += [longest_gap(stream.times, killed_at, killed_at + _LOOK_S) for stream in kill.survivors]
    figures.calm += [longest_gap(stream.times, killed_at - _LOOK_S, killed_at) for stream in kill.everybody]
    figures.detection.append(watch.deaths[kill.victim] - killed_at)
    figures.num_failed += kill.num_failed


if __name__ == "__main__":
    sys.exit(main())
