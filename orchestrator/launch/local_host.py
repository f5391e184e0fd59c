"""The local host: engines as plain child processes of the supervisor, for tests and benchmarks on one machine."""

import asyncio
import os
import signal
import socket
from typing import Any

import msgspec

from engine.config.engine_spec import EngineSpec
from engine.wire.ids import EngineId
from orchestrator.launch.host import Capacity, EngineHandle, Site
from orchestrator.processes.child_process import ChildProcess, LineSink, start_child

ENGINE_MODULE = "engine.main"


async def open_local_host(_num_ranks: int, device: str, *, advertise_host: str | None, on_line: LineSink) -> Site:
    """Return the host of engines on this machine; nothing is reserved, and the device is taken as it was asked for."""
    return Site(LocalHost(on_line), device=device, address=advertise_host)


class LocalHost:
    """An ``EngineHost`` on this machine. Its engines die with the supervisor."""

    def __init__(self, on_line: LineSink) -> None:
        self._on_line = on_line
        self._children: dict[EngineId, ChildProcess] = {}

    def capacity(self) -> Capacity:
        """Return the number of cores; nobody counts who uses them."""
        num_cores = os.cpu_count() or 1
        return Capacity(None, f"{num_cores} CPU cores, shared by all ranks", {"CPU": float(num_cores)})

    async def reserve(self, rank: int) -> None:
        """Reserve nothing: processes share this machine as they can."""

    async def release(self, rank: int) -> None:
        """Give nothing up, as nothing was reserved."""

    async def start(self, spec: EngineSpec) -> EngineHandle:
        """Start one engine process."""
        child = await start_child(
            ENGINE_MODULE, msgspec.structs.replace(spec, node=socket.gethostname()), self._on_line
        )
        self._children[spec.engine_id] = child
        child.exited.add_done_callback(lambda _: self._children.pop(spec.engine_id, None))
        return EngineHandle(spec.engine_id, child.exited)

    def kill(self, engine_id: EngineId) -> None:
        """SIGKILL an engine's process."""
        if engine_id in self._children:
            self._children[engine_id].send_signal(signal.SIGKILL)

    async def stop(self, _force_stop: "asyncio.Future[Any]") -> list[str]:
        """Kill what is left and wait until it is gone."""
        for engine_id in self._children:
            self.kill(engine_id)
        if self._children:
            await asyncio.wait([child.exited for child in self._children.values()])
        return []
