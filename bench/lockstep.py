"""Cost of stepping together: an idle group, a busy rank beside idle ones, and the pause when a rank is killed.

Idle: CPU of each rank of a sim group from 1 s after its last request. Busy beside idle: see ``beside_idle``; for sim
ranks and for a random mixture-of-experts model on the CPU. Healing: ``kill -9`` of one of four sim ranks under 32 open
streams; the survivors' streams pause until the kill is seen (detection), the others have formed the next group and hold
the dead rank's experts (regroup), and the step is run again (retry).
"""

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.beside_idle import beside_rows, take_stream
from bench.moe_model import save_moe_model
from bench.rank_kills import Kill, KillRound, StateChannel, longest_gap
from bench.report import Row, finish, in_ms, p99, parse_arguments
from bench.served import Served, served, short_folder
from engine.wire.messages import GroupState

GROUP = ("--executor=local", "--enable-expert-parallel", "--log-level=warning", "--max-restarts=1000")
SIM = (*GROUP, "--engine=sim")
TORCH = (*GROUP, "--dtype=float32", "--device=cpu", "--kv-cache-memory=256MiB", "--served-model-name=sim")

NUM_HEALING, STREAMS_PER_RANK, HEALING_STEP_MS = 4, 8, 20.0

_IDLE_AFTER_S = 1.0
_LOOK_S = 3.0  # after the kill
_REST_S = 0.3

ROUND = KillRound(num_ranks=NUM_HEALING, streams_per_rank=STREAMS_PER_RANK, calm_s=_REST_S, look_s=_LOOK_S)


@dataclass(slots=True)
class Healing:
    """Seconds, of all rounds. pauses: longest gaps of the survivors' streams.

    detection: from the kill to the proposal of the survivors' group. regroup: from there to its commit. retry: from
    there to the first token. num_failed: streams that broke.
    """

    pauses: list[float] = field(default_factory=list)
    detection: list[float] = field(default_factory=list)
    regroup: list[float] = field(default_factory=list)
    retry: list[float] = field(default_factory=list)
    num_failed: int = 0


class DirectWatch:
    """Records when a direct proposal is first published, and when it is in force. epoch -> monotonic seconds."""

    def __init__(self) -> None:
        self.proposed: dict[int, float] = {}
        self.committed: dict[int, float] = {}

    def on_state(self, state: GroupState) -> None:
        """Look at one state."""
        now = time.monotonic()
        if state.direct and state.proposal is not None:
            self.proposed.setdefault(state.proposal.epoch, now)
        self.committed.setdefault(state.committed.epoch, now)

    def parts_since(self, killed_at: float) -> tuple[float, float] | None:
        """Return when the survivors' group was proposed first and was in force, after a kill; None: not seen."""
        proposed = {epoch: at for epoch, at in self.proposed.items() if at > killed_at}
        committed = [self.committed[epoch] for epoch in proposed if epoch in self.committed]
        return (min(proposed.values()), min(committed)) if committed else None


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8, help="kills (default: 8)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of a stream beside idle ranks (default: 40)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to look at the idle group (default: 10)")
    options = parse_arguments(__doc__ or "", parser)
    rows = [
        *_idle_rows(options.seconds),
        *beside_rows("sim, 100 ms", options.tokens, *SIM, "--sim-step-ms=100"),
        *_beside_torch_rows(options.tokens),
        *_healing_rows(options.rounds),
    ]
    return finish("Lockstep groups", rows, options)


def _beside_torch_rows(num_tokens: int) -> list[Row]:
    with short_folder() as folder:
        save_moe_model(folder)
        return beside_rows("4 MoE layers on the CPU", num_tokens, *TORCH, f"--model={folder}")


# --- idle -----------------------------------------------------------------------------------------------------------


def _idle_rows(seconds: float) -> list[Row]:
    with short_folder() as folder, served(folder, *SIM, "--data-parallel-size=3") as deployment:
        take_stream(deployment.url, 5)
        time.sleep(_IDLE_AFTER_S)
        processes = [psutil.Process(row["pid"]) for row in _rows_of(deployment.url)]
        before, began_at = [_cpu_s(process) for process in processes], time.monotonic()
        time.sleep(seconds)
        elapsed_s = time.monotonic() - began_at
        shares = [(_cpu_s(process) - was) / elapsed_s for process, was in zip(processes, before, strict=True)]
    return [
        Row("idle group of 3: CPU of the busiest rank", "% core", max(shares) * 100, bar=1.0, bar_on="value"),
        Row("idle group of 3: CPU of a rank, mean", "% core", statistics.mean(shares) * 100),
    ]


def _cpu_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def _rows_of(url: str) -> list[dict[str, Any]]:
    return list(httpx.get(f"{url}/v1/cluster", timeout=10.0, trust_env=False).json()["ranks"])


# --- healing --------------------------------------------------------------------------------------------------------


def _healing_rows(num_rounds: int) -> list[Row]:
    options = (*SIM, f"--data-parallel-size={NUM_HEALING}", f"--sim-step-ms={HEALING_STEP_MS}", "--sim-num-experts=64")
    with short_folder() as folder, served(folder, *options) as deployment:
        figures = asyncio.run(_heal(deployment, folder, num_rounds))
    pauses = in_ms(figures.pauses)
    rows = [
        Row("kill of 1 of 4: pause of the survivors' streams, p50", "ms", statistics.median(pauses)),
        Row("kill of 1 of 4: pause of the survivors' streams, p99", "ms", p99(pauses), bar=1500.0, bar_on="value"),
    ]
    for name, values in (
        ("detection: kill to proposal", figures.detection),
        ("regroup with the experts: proposal to commit", figures.regroup),
        ("retry: commit to token", figures.retry),
    ):
        rows.append(Row(f"of which {name}, p50", "ms", statistics.median(in_ms(values))))
        rows.append(Row(f"of which {name}, worst", "ms", max(in_ms(values))))
    return [*rows, Row("streams that broke", "streams", figures.num_failed, bar=0.0, bar_on="value")]


async def _heal(deployment: Served, folder: Path, num_rounds: int) -> Healing:
    figures, watch = Healing(), DirectWatch()
    channel = StateChannel(folder, watch.on_state)
    try:
        async with httpx.AsyncClient(base_url=deployment.url, trust_env=False) as client:
            for number in range(num_rounds):
                _note(figures, await ROUND.run(client, deployment.url, number % NUM_HEALING), watch)
    finally:
        channel.close()
    return figures


def _note(figures: Healing, kill: Kill, watch: DirectWatch) -> None:
    killed_at = kill.killed_at
    figures.pauses += [longest_gap(stream.times, killed_at, killed_at + _LOOK_S) for stream in kill.survivors]
    figures.num_failed += kill.num_failed
    parts = watch.parts_since(killed_at)
    if parts is None:
        raise SystemExit(f"the group did not heal within {_LOOK_S:g} s")
    proposed_at, committed_at = parts
    tokens = [at for stream in kill.survivors for at in stream.times if at > committed_at]
    figures.detection.append(proposed_at - killed_at)
    figures.regroup.append(committed_at - proposed_at)
    figures.retry.append(min(tokens, default=committed_at + _LOOK_S) - committed_at)


if __name__ == "__main__":
    sys.exit(main())
