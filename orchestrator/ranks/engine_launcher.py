"""The launcher of the engines: starts them on their host, replaces them after a pause, kills those that must end."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from client.tasks import log_failure
from engine.config.engine_spec import EngineSpec
from engine.wire.ids import EngineId
from orchestrator.launch.host import EngineHandle, EngineHost
from orchestrator.processes.exits import ProcessExit
from orchestrator.processes.waits import wait_all
from orchestrator.ranks.replica_table import Replica

_LEAVE_S = 5.0  # dismissed engines get this long to end by themselves
_KILLED_S = 5.0  # a killed process is gone by then, or its host is

MakeSpec = Callable[[Replica], EngineSpec]


class EngineLauncher:
    """Runs one engine per rank on one host, and owns every task and future that this takes.

    The next engine of a rank starts only after the host confirmed the end of the one before: one device holds one
    engine.

    make_spec: returns what the engine of a replica is started with, at the time of the call.
    next_replica: puts the next engine of a rank into the table and returns its replica; called once its pause is over.
    on_end: called once per engine, when its process has ended or could not be started.
    on_out_of_reach: called when the host of an engine's process answers no more, which is no end.
    on_hung: called with a replica and the reason when a replacement does not load within ``load_timeout_s`` from when
    its process was ordered; None: no limit.
    """

    def __init__(
        self,
        host: EngineHost,
        make_spec: MakeSpec,
        *,
        next_replica: Callable[[int], Replica],
        on_end: Callable[[EngineId, ProcessExit], None],
        on_out_of_reach: Callable[[Replica], None],
        on_hung: Callable[[Replica, str], None],
        load_timeout_s: float | None,
    ) -> None:
        self._host = host
        self._make_spec = make_spec
        self._next_replica = next_replica
        self._on_end = on_end
        self._on_out_of_reach = on_out_of_reach
        self._on_hung = on_hung
        self._load_timeout_s = load_timeout_s
        self._handles: dict[int, EngineHandle] = {}  # by rank: the engine that was started last, also after its end
        self._starts: dict[int, asyncio.Task[None]] = {}  # by rank: the newest start in the background
        self._loads: dict[int, asyncio.Future[None]] = {}  # by rank, of replacements: done once loaded or ended

    async def start(self, replica: Replica) -> None:
        """Start the engine of a replica.

        Raises:
            Exception: whatever the host raises.
        """
        handle = await self._host.start(self._make_spec(replica))
        self._handles[replica.engine_id.rank] = handle
        handle.exited.add_done_callback(lambda exited: self._end(replica.engine_id, exited.result()))
        handle.out_of_reach.add_done_callback(lambda _: self._on_out_of_reach(replica))

    def start_soon(self, replica: Replica) -> None:
        """Start the engine of a replica in the background; a failure is its end."""
        self._begin(replica.engine_id.rank, self._start_or_end(replica))

    def replace_later(self, rank: int, pause_s: float) -> None:
        """Start the next engine of a rank after a pause."""
        self._begin(rank, self._replace(rank, pause_s))

    def cancel_start(self, rank: int) -> None:
        """Give up a start in the background, or the pause before it."""
        self._starts[rank].cancel()

    def on_loaded(self, rank: int) -> None:
        """Take note that the engine of a rank has loaded: its deadline is off."""
        load = self._loads.pop(rank, None)
        if load is not None:
            load.set_result(None)

    def kill(self, replica: Replica) -> None:
        """End the engine of a replica at once, also while it is being started."""
        if self._handle_of(replica) is not None:
            self._host.kill(replica.engine_id)
        elif replica.exit is None:
            self.cancel_start(replica.engine_id.rank)
            self._end(replica.engine_id, ProcessExit(None, "given up while it was started"))

    def is_out_of_reach(self, replica: Replica) -> bool:
        """Tell whether the host of a replica's engine answers no more."""
        handle = self._handle_of(replica)
        return handle is not None and handle.out_of_reach.done()

    def forget(self, rank: int) -> None:
        """Forget a rank whose engine has ended and will not be replaced."""
        self._handles.pop(rank, None)
        self._starts.pop(rank, None)

    async def stop_starting(self) -> None:
        """Give up every start in the background."""
        # Also the pauses before a restart, which are the first part of these tasks.
        tasks = list(self._starts.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self, loaded: Collection[EngineId], force_stop: "asyncio.Future[Any]") -> list[str]:
        """Wait until the engines end, which have been dismissed; kill those that do not, return a line for each.

        loaded: those to wait for: one that is still loading has no sequences, so there is nothing to wait for.
        force_stop: once it is done, none is waited for any more.
        """
        ends = [handle.exited for handle in self._handles.values() if handle.engine_id in loaded]
        await wait_all(ends, _LEAVE_S, force_stop)
        rest = [handle for handle in self._handles.values() if not handle.exited.done()]
        for handle in rest:
            self._host.kill(handle.engine_id)
        await wait_all([handle.exited for handle in rest], _KILLED_S)
        return [
            f"rank {handle.engine_id.rank} {'was' if handle.exited.done() else 'could not be'} killed"
            for handle in rest
        ]

    def _handle_of(self, replica: Replica) -> EngineHandle | None:
        handle = self._handles.get(replica.engine_id.rank)
        # The handle may be the predecessor's: the next engine has none until its host has started it.
        return handle if handle is not None and handle.engine_id == replica.engine_id else None

    def _begin(self, rank: int, start: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(start, name=f"start the engine of rank {rank}")
        self._starts[rank] = task
        task.add_done_callback(log_failure)

    async def _replace(self, rank: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        replica = self._next_replica(rank)
        # Made before the engine is ordered: a start that fails ends the load at once.
        load = self._loads[rank] = asyncio.get_running_loop().create_future()
        await self._start_or_end(replica)
        await asyncio.wait([load], timeout=self._load_timeout_s)
        if not load.done():
            self._on_hung(replica, f"not loaded within {self._load_timeout_s:g} s (--start-timeout)")

    async def _start_or_end(self, replica: Replica) -> None:
        try:
            await self.start(replica)
        except Exception as error:  # noqa: BLE001 - whatever a host raises, it is the reason why there is no engine
            self._end(replica.engine_id, ProcessExit(None, f"could not be started: {error}"))

    def _end(self, engine_id: EngineId, end: ProcessExit) -> None:
        self.on_loaded(engine_id.rank)
        self._on_end(engine_id, end)
