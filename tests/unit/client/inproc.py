"""Clients whose sim engines live in the test's own process."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from client.core_thread import Core
from client.inproc_client import InprocClient
from engine.config.engine_config import EngineConfig, EngineKind, SchedulerConfig, SimConfig
from engine.loading import load_rank
from engine.wire.ids import EngineId
from engine.wire.messages import EngineReady

CRASH = 255
FAIL = 254


def sim_ranks(**sim: Any) -> Callable[[EngineId], tuple[EngineReady, Core]]:
    """Return what loads sim engines; ``sim`` are options of ``SimConfig``."""
    options = {"step_s": 0.001, "crash_on_token": CRASH, "fail_on_token": FAIL} | sim
    config = EngineConfig(kind=EngineKind.SIM, scheduler=SchedulerConfig(max_num_seqs=8), sim=SimConfig(**options))
    return lambda engine_id: load_rank(config, engine_id, lambda _doing, _progress: None)


@asynccontextmanager
async def inproc_client(num_engines: int = 1, **sim: Any) -> AsyncIterator[InprocClient]:
    """Yield a client that is closed at the end."""
    client = InprocClient(sim_ranks(**sim), num_engines)
    try:
        yield client
    finally:
        await client.aclose()
