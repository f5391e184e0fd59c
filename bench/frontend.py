"""CPU of the API process: per streamed token beside a bare uvloop server, and per short request.

A real deployment (coordinator, two sim engines with 10 ms steps, API process) serves 64 concurrent streams of 128
tokens over loopback; a bare server writes the same bytes at the same pace. Rounds of both are interleaved, because the
load of the machine changes within minutes, and the medians of the rounds are compared. Several API processes behind one
port, each with as many streams, are compared with one in the same way.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import psutil
from rich.console import Console
from rich.progress import Progress

from bench.floor_server import FloorSpec
from bench.http_load import Load, Result
from bench.local_deployment import MODEL_NAME, LocalDeployment, local_deployment
from bench.report import Row, finish, parse_arguments
from engine.config.engine_config import SimConfig
from orchestrator.api.serving.sse import ChunkFormat

NUM_STREAMS = 64
NUM_TOKENS = 128
STEP_S = 0.010
NUM_SHORT_REQUESTS = 1024
WARM_UP_ROUNDS = 1

_PATH = "/v1/chat/completions"


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7, at least 5 for the bar)")
    parser.add_argument(
        "--api-server-count", type=int, default=2, help="API processes that are compared with one (default 2; 1: none)"
    )
    options = parse_arguments(__doc__.splitlines()[0], parser)
    rows = measure(options.rounds)
    if options.api_server_count > 1:
        rows += compare(options.rounds, options.api_server_count)
    return finish("front end: CPU of the API processes", rows, options)


def measure(num_rounds: int) -> list[Row]:
    """Run all rounds of one process beside the floor and return the rows."""
    floor_us: list[float] = []
    token_us: list[float] = []
    request_ms: list[float] = []
    with (
        local_deployment(2, SimConfig(step_s=STEP_S)) as deployment,
        _floor() as (floor, floor_port),
        _generator() as generator,
    ):
        for _ in _rounds(num_rounds):
            floor_us.append(_stream_round(generator, [floor.pid], floor_port) * 1e6)
            token_us.append(_stream_round(generator, _pids(deployment), _port(deployment)) * 1e6)
            request_ms.append(_request_round(generator, _pids(deployment), _port(deployment)) * 1e3)
        memory_mb = psutil.Process(deployment.api.pid).memory_info().rss / 1e6
    floor_us, token_us, request_ms = (values[WARM_UP_ROUNDS:] for values in (floor_us, token_us, request_ms))
    return [
        Row(
            "CPU per streamed token",
            "us",
            statistics.median(token_us),
            statistics.median(floor_us),
            "bare uvloop",
            bar=2.0,
        ),
        Row("CPU per request of one token", "ms", statistics.median(request_ms), bar=0.8, bar_on="value"),
        Row("lowest ratio of a round", "x", min(t / f for t, f in zip(token_us, floor_us, strict=True))),
        Row("highest ratio of a round", "x", max(t / f for t, f in zip(token_us, floor_us, strict=True))),
        Row("memory (RSS)", "MB", memory_mb, bar=200, bar_on="value"),
    ]


def compare(num_rounds: int, num_apis: int) -> list[Row]:
    """Run rounds of one process and of several, each process with the same number of streams, and return the row."""
    one_us: list[float] = []
    several_us: list[float] = []
    with (
        local_deployment(2, SimConfig(step_s=STEP_S)) as one,
        local_deployment(max(2, num_apis), SimConfig(step_s=STEP_S), num_apis=num_apis) as several,
        _generator() as generator,
    ):
        for _ in _rounds(num_rounds):
            one_us.append(_stream_round(generator, _pids(one), _port(one)) * 1e6)
            several_us.append(_stream_round(generator, _pids(several), _port(several), num_apis * NUM_STREAMS) * 1e6)
    one_us, several_us = one_us[WARM_UP_ROUNDS:], several_us[WARM_UP_ROUNDS:]
    name = f"CPU per streamed token, {num_apis} API processes"
    return [Row(name, "us", statistics.median(several_us), statistics.median(one_us), "one API process", bar=1.1)]


def _rounds(num_rounds: int) -> Iterator[int]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(range(num_rounds + WARM_UP_ROUNDS), description="rounds")


def _pids(deployment: LocalDeployment) -> list[int]:
    return [api.pid for api in deployment.apis]


def _stream_round(
    generator: "subprocess.Popen[str]", pids: Sequence[int], port: int, num_streams: int = NUM_STREAMS
) -> float:
    """Return CPU seconds per token of one round of streams."""
    load = Load(
        port=port, path=_PATH, body=_body(NUM_TOKENS, stream=True), num_requests=num_streams, concurrency=num_streams,
        stream=True,
    )  # fmt: skip
    return _cpu_of_load(generator, pids, load) / (num_streams * NUM_TOKENS)


def _request_round(generator: "subprocess.Popen[str]", pids: Sequence[int], port: int) -> float:
    """Return CPU seconds per whole request of one token."""
    load = Load(
        port=port, path=_PATH, body=_body(1, stream=False), num_requests=NUM_SHORT_REQUESTS, concurrency=NUM_STREAMS,
        stream=False,
    )  # fmt: skip
    return _cpu_of_load(generator, pids, load) / NUM_SHORT_REQUESTS


def _cpu_of_load(generator: "subprocess.Popen[str]", pids: Sequence[int], load: Load) -> float:
    assert generator.stdin is not None
    assert generator.stdout is not None
    before = sum(map(_cpu_s, pids))
    generator.stdin.write(json.dumps(asdict(load)) + "\n")
    generator.stdin.flush()
    result = Result(**json.loads(generator.stdout.readline()))
    if result.num_failed:
        raise RuntimeError(f"{result.num_failed} of {load.num_requests} requests failed")
    return sum(map(_cpu_s, pids)) - before


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of all threads of a process.

    From the process's own CPU clock (the id is made as ``clock_getcpuclockid`` makes it on Linux): the 10 ms ticks of
    ``/proc`` are a tenth of a round.
    """
    return time.clock_gettime((~pid << 3) | 2)


def _body(max_tokens: int, *, stream: bool) -> str:
    message = {"role": "user", "content": "How many fish are in a shoal?"}
    return json.dumps(
        {"model": MODEL_NAME, "messages": [message], "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    )


def _port(deployment: LocalDeployment) -> int:
    return int(deployment.url.rpartition(":")[2])


def _chunk() -> str:
    """Return one framed chunk as the API process writes it."""
    chunks = ChunkFormat("chatcmpl-" + 32 * "0", int(time.time()), MODEL_NAME, chat=True, include_usage=False)
    chunks.open_choice(0)
    text = chunks.text(0, "x").decode()
    return f"{len(text):x}\r\n{text}\r\n"


@contextlib.contextmanager
def _floor() -> "Iterator[tuple[subprocess.Popen[str], int]]":
    spec = FloorSpec(chunk=_chunk(), num_chunks=NUM_TOKENS, interval_s=STEP_S)
    with _child("bench.floor_server") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asdict(spec)) + "\n")
        process.stdin.flush()
        yield process, int(process.stdout.readline())


@contextlib.contextmanager
def _generator() -> "Iterator[subprocess.Popen[str]]":
    with _child("bench.http_load") as process:
        yield process


@contextlib.contextmanager
def _child(module: str) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
