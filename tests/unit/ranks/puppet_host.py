"""A group of engines without processes: they end when the test says so, and what is published goes nowhere."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.config.engine_config import EngineConfig, EngineKind
from engine.config.engine_spec import EngineSpec
from engine.wire.errors import StartupError
from engine.wire.ids import EngineId
from orchestrator.launch.host import Capacity, EngineHandle
from orchestrator.processes.exits import ProcessExit
from orchestrator.processes.restarts import RestartRule
from orchestrator.ranks.engine_group import EngineGroup
from orchestrator.ranks.progress import LineProgress
from orchestrator.ranks.replica_table import Replica, ReplicaTable

GONE = ProcessExit(-9, "killed by SIGKILL")


@dataclass
class PuppetHost:
    """An ``EngineHost`` without processes.

    refusals: errors that the next starts end with. num_free: places it says it has. reserved: ranks with a place beside
    those of the start. may_reserve: set when asking for a place shall succeed, or fail with ``refusal``.
    """

    handles: dict[EngineId, EngineHandle] = field(default_factory=dict)
    killed: list[EngineId] = field(default_factory=list)
    refusals: list[Exception] = field(default_factory=list)
    num_starts: int = 0
    num_free: int | None = None
    reserved: set[int] = field(default_factory=set)
    may_reserve: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""

    def capacity(self) -> Capacity:
        return Capacity(self.num_free, "each rank needs 1 CPU", {})

    async def reserve(self, rank: int) -> None:
        await self.may_reserve.wait()
        if self.refusal:
            raise StartupError(self.refusal)
        self.reserved.add(rank)

    async def release(self, rank: int) -> None:
        self.reserved.discard(rank)

    async def start(self, spec: EngineSpec) -> EngineHandle:
        self.num_starts += 1
        if self.refusals:
            raise self.refusals.pop(0)
        handle = EngineHandle(spec.engine_id, asyncio.get_running_loop().create_future())
        self.handles[spec.engine_id] = handle
        return handle

    def kill(self, engine_id: EngineId) -> None:
        self.killed.append(engine_id)
        self.end(engine_id)

    def end(self, engine_id: EngineId, end: ProcessExit = GONE) -> None:
        self.handles[engine_id].exited.set_result(end)

    async def stop(self, _force_stop: Any) -> list[str]:
        return []


class SilentChannel:
    """A channel to no coordinator."""

    def __init__(self, *_handlers: Any) -> None:
        self.num_published = 0
        self.is_listening = True
        self.is_closed = False

    def publish(self) -> None:
        assert not self.is_closed
        self.num_published += 1

    def listen(self, wanted: bool) -> None:
        self.is_listening = wanted

    def close(self) -> None:
        self.is_closed = True


def make_group(
    host: PuppetHost,
    num_ranks: int,
    rule: RestartRule,
    on_death: Callable[[Replica], None] = lambda _: None,
    load_timeout_s: float | None = None,
) -> EngineGroup:
    """Return the real group on a host of puppets; nothing is started."""
    table = ReplicaTable([EngineId(rank, 1) for rank in range(num_ranks)], rule)
    return EngineGroup(table, host, make_spec, SilentChannel, LineProgress(), on_death, load_timeout_s)


def make_spec(replica: Replica) -> EngineSpec:
    return EngineSpec(
        engine_id=replica.engine_id,
        engine=EngineConfig(kind=EngineKind.SIM),
        report_endpoint="",
        state_endpoint="",
        build_id="",
        config_hash="",
    )
