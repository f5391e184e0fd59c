"""Footprint of an idle deployment: CPU of Shoal's own processes, memory of its light ones.

Four sim ranks on Ray stand idle. An actor's process is Ray's for the most part, so the actors are counted above empty
ones of a bare Ray that stands idle at the same time, and the supervisor, which is a Ray driver, above its driver.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.report import Row, finish, parse_arguments
from bench.served import served, short_folder

NUM_RANKS = 4

_SETTLE_S = 3.0  # the rest of the start is not idling
_MIB = 1024 * 1024

# kind of process -> what its command line holds. Ray's own daemons and spare workers are in no kind.
_SHOAL_KINDS = {
    "supervisor": "bin/shoal",
    "coordinator": "lb.coordinator",
    "API process": "orchestrator.api",
    "engines": "engine.main",
    "actors": "ray::EngineActor",
}
_BARE_KINDS = {"supervisor": "bench.empty_actors", "actors": "ray::Empty"}


@dataclass(frozen=True, slots=True)
class Usage:
    """cpu: share of one core. rss_mib: resident memory of all processes of the kind together."""

    cpu: float
    rss_mib: float


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to look (default: 20)")
    options = parse_arguments(__doc__ or "", parser)
    with (
        short_folder() as first,
        short_folder() as second,
        _bare_ray(first) as bare,
        served(second, "--engine=sim", f"--data-parallel-size={NUM_RANKS}", "--log-level=warning") as ours_served,
    ):
        shoal = ours_served.process
        time.sleep(_SETTLE_S)
        before = _cpu_seconds(shoal, _SHOAL_KINDS), _cpu_seconds(bare, _BARE_KINDS)
        started_at = time.monotonic()
        time.sleep(options.seconds)
        measured_s = time.monotonic() - started_at
        ours = _usage(shoal, _SHOAL_KINDS, before[0], measured_s)
        reference = _usage(bare, _BARE_KINDS, before[1], measured_s)
    return finish(f"Idle deployment, {NUM_RANKS} sim ranks on Ray", _rows(ours, reference), options)


def _rows(ours: dict[str, Usage], reference: dict[str, Usage]) -> list[Row]:
    rows = []
    for kind, usage in ours.items():
        bare = reference.get(kind)
        name = "" if bare is None else "bare Ray"
        rows.append(Row(f"CPU, {kind}", "% core", usage.cpu * 100, None if bare is None else bare.cpu * 100, name))
    own = sum(usage.cpu for usage in ours.values()) - sum(usage.cpu for usage in reference.values())
    rows.append(Row("CPU, all above bare Ray", "% core", own * 100, bar=3.0, bar_on="value"))
    rows.append(Row("memory, API process", "MiB", ours["API process"].rss_mib, bar=400.0, bar_on="value"))
    rows.append(Row("memory, coordinator", "MiB", ours["coordinator"].rss_mib, bar=80.0, bar_on="value"))
    rows.append(Row("memory, supervisor", "MiB", ours["supervisor"].rss_mib))
    return rows


@contextlib.contextmanager
def _bare_ray(folder: Path) -> Iterator[psutil.Process]:
    command = [sys.executable, "-m", "bench.empty_actors", str(folder), str(NUM_RANKS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("the bare Ray did not start")
        yield psutil.Process(process.pid)
        process.communicate()


def _by_kind(top: psutil.Process, kinds: dict[str, str]) -> dict[str, list[psutil.Process]]:
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    for process in [top, *top.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            for kind, mark in kinds.items():
                if mark in line:
                    found[kind].append(process)
    return found


def _cpu_seconds(top: psutil.Process, kinds: dict[str, str]) -> dict[str, float]:
    return {
        kind: sum(sum(process.cpu_times()[:2]) for process in processes)
        for kind, processes in _by_kind(top, kinds).items()
    }


def _usage(top: psutil.Process, kinds: dict[str, str], before: dict[str, float], measured_s: float) -> dict[str, Usage]:
    processes = _by_kind(top, kinds)
    return {
        kind: Usage((seconds - before[kind]) / measured_s, sum(p.memory_info().rss for p in processes[kind]) / _MIB)
        for kind, seconds in _cpu_seconds(top, kinds).items()
    }


if __name__ == "__main__":
    sys.exit(main())
