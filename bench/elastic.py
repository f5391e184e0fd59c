"""How long a scale takes, phase by phase, and whether any stream feels it.

A deployment of sim ranks serves a steady load of streams while it grows and shrinks: 2-4-2, either the lowest or the
highest ranks leaving. A stream's pause is its longest gap between two tokens during a scale, less a normal step.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.report import Row, finish, parse_arguments
from bench.served import served, short_folder
from bench.steady_load import SteadyLoad, steady_load

SMALL, LARGE = 2, 4

_REQUESTS_PER_S = 20.0
_MAX_TOKENS = 40
_POLL_S = 0.02
_CALM_S = 3.0
_DRAIN_S = 0.2
_PAUSE_BAR_MS = 100.0
_LAG_BAR_MS = 50.0


@dataclass(slots=True)
class Figures:
    """Seconds. phases: durations by direction and phase. whole: of operations by direction.

    pauses: longest gaps during one operation. calm: longest gaps without one. lags: worst delay of an API process's
    event loop, as it says itself after each operation.
    """

    phases: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    whole: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    pauses: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_failed: int = 0


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=6, help="times up and down (default: 6)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="duration of one step (default: 20)")
    parser.add_argument("--executor", choices=("local", "ray"), default="local", help="host of the ranks")
    parser.add_argument("--lockstep", action="store_true", help="ranks that step together (--enable-expert-parallel)")
    options = parse_arguments(__doc__ or "", parser)
    deployed = (
        "--engine=sim",
        f"--executor={options.executor}",
        f"--data-parallel-size={SMALL}",
        f"--max-data-parallel-size={LARGE}",
        f"--sim-step-ms={options.step_ms}",
        f"--enable-expert-parallel={'true' if options.lockstep else 'false'}",
    )
    with short_folder() as folder, served(folder, *deployed) as deployment:
        figures = asyncio.run(_measure(deployment.url, options.cycles))
    sizes = f"{options.cycles} x {SMALL}-{LARGE}-{SMALL} sim ranks{' in lockstep' if options.lockstep else ''}"
    title = f"{sizes} ({options.executor}) under {_REQUESTS_PER_S:g} requests/s"
    return finish(title, _rows(figures, options.step_ms / 1000), options)


def _rows(figures: Figures, step_s: float) -> list[Row]:
    whole = [Row(f"{way}: whole", "ms", _median_ms(durations)) for way, durations in figures.whole.items()]
    phases = [Row(f"{way}: {phase}", "ms", _median_ms(durations)) for (way, phase), durations in figures.phases.items()]
    pauses = [gap - step_s for gap in figures.pauses]
    return [
        *sorted([*whole, *phases], key=lambda row: row.name.split(":")[0]),
        Row("longest token gap less a step, p50", "ms", _median_ms(pauses)),
        Row("longest token gap less a step, p99", "ms", _p99(pauses) * 1000, bar=_PAUSE_BAR_MS, bar_on="value"),
        Row("the same without a scale, p99", "ms", (_p99(figures.calm) - step_s) * 1000),
        Row(
            "event loop of the API process, worst lag", "ms", max(figures.lags) * 1000, bar=_LAG_BAR_MS, bar_on="value"
        ),
        Row("requests", "requests", figures.num_requests),
        Row("requests that failed", "requests", figures.num_failed, bar=0.0, bar_on="value"),
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
    figures.calm.append(load.longest_gap_s(began_at + _CALM_S / 2, time.monotonic()))


async def _scale(client: httpx.AsyncClient, load: SteadyLoad, figures: Figures, way: str, **wish: Any) -> None:
    began_at = time.monotonic()
    operation = (await client.post("/v1/cluster/scale", json=wish)).raise_for_status().json()
    while operation["status"] == "running":
        await asyncio.sleep(_POLL_S)
        operation = (await client.get(f"/v1/cluster/operations/{operation['id']}")).json()
    if operation["status"] != "done":
        raise SystemExit(f"a scale failed: {operation['error']}")
    await asyncio.sleep(0.2)  # what was moved last shows its gap with its next token
    figures.pauses.append(load.longest_gap_s(began_at, time.monotonic()))
    figures.whole[way].append(operation["elapsed_s"])
    for record in operation["history"][:-1]:
        figures.phases[way, record["phase"]].append(record["duration_s"])
    figures.lags.append(_read_lag((await client.get("/metrics")).text))


def _read_lag(metrics: str) -> float:
    lines = (line for line in metrics.splitlines() if line.startswith("shoal_event_loop_lag_seconds"))
    return max((float(line.rpartition(" ")[2]) for line in lines), default=0.0)


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1000


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[max(0, round(len(values) * 0.99) - 1)]


if __name__ == "__main__":
    sys.exit(main())
