"""Cost of idle ranks to a busy one: steps of a stream in a lockstep group, compared with those in a group of one.

An idle rank is not at rest: it takes every step, and computes the experts it holds for the busy rank's tokens. So the
busy rank has fewer of them to compute itself, and waits for the others' parts. What is left of its step outside the
collectives is therefore less than the step of a rank alone, and so is the whole step where cores are left for the idle
ranks. Where a rank has no core to itself, each exchange also waits for the scheduler of the system, some 2 ms: there
the whole step has a bar only when it is so long (100 ms) that this is nothing. Rounds on all groups are interleaved.
"""

import asyncio
import itertools
import os
import re
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx

from bench.rank_kills import pinned_request
from bench.report import Row, in_ms
from bench.served import Served, served, short_folder
from bench.streams import TimedStream

NUM_ROUNDS = 5
GROUP_SIZES = (2, 4)

_LONG_STEP_MS = 100.0
_SKIPPED_TOKENS = 3  # of a stream: prefill, and the wave's start
_REST_S = 0.4  # until the last report has come


@dataclass(frozen=True, slots=True)
class Stream:
    """Seconds. gaps: between its tokens, without its beginning. collective: of its rank in a step, mean."""

    gaps: list[float]
    collective: float

    @property
    def step(self) -> float:
        """Return the mean time of a step."""
        return statistics.mean(self.gaps)


def beside_rows(name: str, num_tokens: int, *options: str) -> list[Row]:
    """Return the rows of one kind of ranks. num_tokens: of a stream. options: of the deployments."""
    with ExitStack() as stack:
        groups = {size: stack.enter_context(_group(size, *options)) for size in (1, *GROUP_SIZES)}
        streams: dict[int, list[Stream]] = {size: [] for size in groups}
        for _ in range(NUM_ROUNDS):
            for size, group in groups.items():
                streams[size].append(take_stream(group.url, num_tokens))
    return [row for size in GROUP_SIZES for row in _rows(name, size - 1, streams[size], streams[1])]


def take_stream(url: str, num_tokens: int) -> Stream:
    """Take a stream on rank 0, and rest."""
    before = _steps(url)
    gaps = asyncio.run(_gaps_of_one(url, num_tokens))
    num_steps, collective_s = (now - was for now, was in zip(_steps(url), before, strict=True))
    return Stream(gaps, collective_s / num_steps)


def _rows(name: str, num_idle: int, beside: list[Stream], alone: list[Stream]) -> Iterator[Row]:
    """Yield the whole step, and its parts inside and outside of the collectives."""
    label = f"beside {num_idle} idle, {name}"
    whole, whole_alone = in_ms([statistics.median(_all_gaps(beside)), statistics.median(_all_gaps(alone))])
    has_cores = num_idle < (os.cpu_count() or 1) or whole_alone >= _LONG_STEP_MS
    yield Row(f"step {label}", "ms", whole, whole_alone, "alone", bar=1.25 if has_cores else None)
    outside, step_alone, collective = in_ms(
        [
            statistics.median(stream.step - stream.collective for stream in beside),
            statistics.median(stream.step for stream in alone),
            statistics.median(stream.collective for stream in beside),
        ]
    )
    yield Row(f"its collectives {label}", "ms", collective)
    yield Row(f"step without them {label}", "ms", outside, step_alone, "alone", bar=1.1)


def _all_gaps(streams: list[Stream]) -> list[float]:
    return list(itertools.chain.from_iterable(stream.gaps for stream in streams))


@contextmanager
def _group(num_ranks: int, *options: str) -> Iterator[Served]:
    with short_folder() as folder, served(folder, *options, f"--data-parallel-size={num_ranks}") as deployment:
        yield deployment


async def _gaps_of_one(url: str, num_tokens: int) -> list[float]:
    path, body = pinned_request(0, 0)
    stream = TimedStream(path, {**body, "max_tokens": num_tokens, "temperature": 0})
    await stream.open(url)
    await stream.ended
    stream.close()
    await asyncio.sleep(_REST_S)
    return [later - earlier for earlier, later in itertools.pairwise(stream.times[_SKIPPED_TOKENS:])]


def _steps(url: str) -> tuple[float, float]:
    """Return how many steps rank 0 has taken with tokens of its own, and the seconds it has spent in collectives."""
    text = httpx.get(f"{url}/metrics", timeout=10.0, trust_env=False).text

    def counter(name: str) -> float:
        (value,) = re.findall(rf'^shoal_engine_{name}_total{{engine="0"}} (\S+)$', text, re.MULTILINE)
        return float(value)

    return counter("steps"), counter("collective_seconds")
