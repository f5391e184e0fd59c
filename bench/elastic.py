"""Duration of scale operations, phase by phase, and the pauses that streams see meanwhile.

A deployment serves a steady load of streams while it grows and shrinks: 2-4-2, either the lowest or the highest ranks
leaving. Its ranks share out a tiny real mixture-of-experts model, or are sim ranks, in lockstep or independent. A
stream's pause is its longest gap between two tokens less a normal step: during a whole scale, and, where ranks are in
lockstep, while the group goes from one membership to the next. On a machine with hardly more cores than ranks a real
new rank takes them from those that serve while it loads: of real ranks only the second figure has a bar.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.moe_model import save_tiny_moe_model
from bench.report import Row, finish, p99, parse_arguments
from bench.served import served, short_folder
from bench.streams import SteadyLoad, steady_load

SMALL, LARGE = 2, 4

_REQUESTS_PER_S = 20.0
_MAX_TOKENS = 40
_POLL_S = 0.02
_CALM_S = 3.0
_DRAIN_S = 0.2
_LAST_S = 0.2  # the gap of the last migrated stream shows with its next token
_PAUSE_BAR_MS = 100.0
_LAG_BAR_MS = 50.0
_SWITCHING = ("prepare", "commit", "switch", "publish")


@dataclass(slots=True)
class Figures:
    """Seconds. phases: durations by direction and phase. whole: of operations by direction.

    pauses: longest gaps during one operation. switches: the same while its group changed. calm: longest gaps without
    an operation. steps: normal gaps. lags: worst delay of an API process's event loop, by its own metric after each
    operation.
    """

    phases: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    whole: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    pauses: list[float] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_failed: int = 0


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=10, help="times up and down (default: 10)")
    parser.add_argument("--model", choices=("moe", "sim"), default="moe", help="moe: a tiny real one, in lockstep")
    parser.add_argument("--executor", choices=("ray", "local"), default="ray", help="host of the ranks (default: ray)")
    parser.add_argument("--lockstep", action="store_true", help="sim ranks that step together")
    parser.add_argument("--step-ms", type=float, default=20.0, help="duration of one step of a sim rank (default: 20)")
    options = parse_arguments(__doc__ or "", parser)
    options.lockstep = options.lockstep or options.model == "moe"
    with short_folder() as folder, served(folder, *_deployed(options, folder)) as deployment:
        figures = asyncio.run(_measure(deployment.url, options.cycles))
    ranks = f"{options.model} ranks{' in lockstep' if options.lockstep else ''} ({options.executor})"
    title = f"{options.cycles} x {SMALL}-{LARGE}-{SMALL} {ranks} under {_REQUESTS_PER_S:g} requests/s"
    return finish(title, _rows(figures, _PAUSE_BAR_MS if options.model == "sim" else None), options)


def _deployed(options: argparse.Namespace, folder: Path) -> list[str]:
    group = [
        f"--executor={options.executor}",
        f"--data-parallel-size={SMALL}",
        f"--max-data-parallel-size={LARGE}",
        f"--enable-expert-parallel={'true' if options.lockstep else 'false'}",
    ]
    if options.model == "sim":
        return [*group, "--engine=sim", f"--sim-step-ms={options.step_ms}"]
    save_tiny_moe_model(folder / "moe")
    model = [f"--model={folder / 'moe'}", "--served-model-name=sim", "--dtype=float32", "--device=cpu"]
    return [*group, *model, "--kv-cache-memory=64MiB"]


def _rows(figures: Figures, whole_bar_ms: float | None) -> list[Row]:
    step_s = statistics.median(figures.steps)
    whole = [Row(f"{way}: whole", "ms", _median_ms(durations)) for way, durations in figures.whole.items()]
    phases = [Row(f"{way}: {phase}", "ms", _median_ms(durations)) for (way, phase), durations in figures.phases.items()]
    return [
        *sorted([*whole, *phases], key=lambda row: row.name.split(":")[0]),
        Row("a normal step", "ms", step_s * 1000),
        *_pause_rows("longest token gap less a step", figures.pauses, step_s, whole_bar_ms),
        *_pause_rows("the same while the group changes", figures.switches, step_s, _PAUSE_BAR_MS),
        Row("the same without a scale, p99", "ms", (p99(figures.calm) - step_s) * 1000),
        Row(
            "event loop of the API process, worst lag", "ms", max(figures.lags) * 1000, bar=_LAG_BAR_MS, bar_on="value"
        ),
        Row("requests", "requests", figures.num_requests),
        Row("requests that failed", "requests", figures.num_failed, bar=0.0, bar_on="value"),
    ]


def _pause_rows(name: str, gaps: Sequence[float], step_s: float, bar_ms: float | None) -> list[Row]:
    if not gaps:  # independent ranks have no group that changes
        return []
    return [
        Row(f"{name}, p50", "ms", (statistics.median(gaps) - step_s) * 1000),
        Row(f"{name}, p99", "ms", (p99(gaps) - step_s) * 1000, bar=bar_ms, bar_on="value"),
    ]


async def _measure(url: str, num_cycles: int) -> Figures:
    figures = Figures()
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60.0) as client,
        steady_load(url, _REQUESTS_PER_S, max_tokens=_MAX_TOKENS) as load,
    ):
        for number in range(num_cycles):
            await _wait_calm(load, figures)
            await _scale(client, load, figures, "grow", size=LARGE)
            await _wait_calm(load, figures)
            ranks = [rank["rank"] for rank in (await client.get("/v1/cluster")).json()["ranks"]]
            remove = ranks[: LARGE - SMALL] if number % 2 else ranks[SMALL:]
            await _scale(client, load, figures, "shrink", remove=remove, drain_timeout=_DRAIN_S)
    figures.num_requests, figures.num_failed = len(load.streams), load.num_failed
    return figures


async def _wait_calm(load: SteadyLoad, figures: Figures) -> None:
    began_at = time.monotonic()
    await asyncio.sleep(_CALM_S)
    window = began_at + _CALM_S / 2, time.monotonic()
    figures.calm.append(load.longest_gap_s(*window))
    figures.steps.append(load.normal_gap_s(*window))


async def _scale(client: httpx.AsyncClient, load: SteadyLoad, figures: Figures, way: str, **request: Any) -> None:
    operation = (await client.post("/v1/cluster/scale", json=request)).raise_for_status().json()
    began_at = time.monotonic() - operation["elapsed_s"]
    while operation["status"] == "running":
        await asyncio.sleep(_POLL_S)
        operation = (await client.get(f"/v1/cluster/operations/{operation['id']}")).json()
    if operation["status"] != "done":
        raise SystemExit(f"a scale failed: {operation['error']}")
    await asyncio.sleep(_LAST_S)
    figures.pauses.append(load.longest_gap_s(began_at, time.monotonic()))
    figures.whole[way].append(operation["elapsed_s"])
    history = operation["history"][:-1]
    for record in history:
        figures.phases[way, record["phase"]].append(record["duration_s"])
    switching = [began_at + record["since_s"] for record in history if record["phase"] in _SWITCHING]
    if switching:
        until = began_at + operation["elapsed_s"] + _LAST_S
        figures.switches.append(load.longest_gap_s(min(switching), until))
    figures.lags.append(_read_lag((await client.get("/metrics")).text))


def _read_lag(metrics: str) -> float:
    lines = (line for line in metrics.splitlines() if line.startswith("shoal_event_loop_lag_seconds"))
    return max((float(line.rpartition(" ")[2]) for line in lines), default=0.0)


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1000


if __name__ == "__main__":
    sys.exit(main())
