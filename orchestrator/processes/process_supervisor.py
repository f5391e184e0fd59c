"""The supervisor of one child process: restarts it whenever it ends, as soon and as often as a rule allows."""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.wire.errors import ShoalError, StartupError
from orchestrator.processes.child_process import ChildProcess, LineSink, start_child
from orchestrator.processes.exits import ProcessExit
from orchestrator.processes.restarts import RestartRule, Restarts

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """Which process is kept running, and how.

    name: for people. module: run with ``python -m``. make_spec: returns the spec of an incarnation, counted from 1.
    incarnation_name: what that incarnation is called. stop_s: how long it may take to stop. start_s: how long a
    restarted one may take until its ready line; None: no limit. pass_fds: descriptors that it inherits.
    """

    name: str
    module: str
    make_spec: Callable[[int], Any]
    incarnation_name: Callable[[int], str]
    rule: RestartRule
    stop_s: float
    start_s: float | None = None
    pass_fds: Sequence[int] = ()


class ProcessSupervisor:
    """Starts a process and restarts it until ``stop``.

    on_end: called with the number of an incarnation as soon as that has ended, before the next one starts; not once
    ``stop`` has begun. on_give_up: called when there will be no other.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        on_line: LineSink,
        on_end: Callable[[int], None],
        on_give_up: Callable[[ShoalError], None],
    ) -> None:
        self._spec = spec
        self._on_line = on_line
        self._on_end = on_end
        self._on_give_up = on_give_up
        self._restarts = Restarts(spec.rule)
        self._incarnation = 1
        self._child: ChildProcess | None = None
        self._supervising: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id of the incarnation that runs now."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> bytes:
        """Start the first incarnation and return its ready line.

        Raises:
            StartupError: it ended before; with its last line.
        """
        self._child, line = await self._start_one(None)  # the start of the deployment has a deadline of its own
        self._supervising = asyncio.create_task(self._supervise(self._child), name=f"supervise {self._spec.name}")
        return line

    async def stop(self, force_stop: "asyncio.Future[Any]") -> list[str]:
        """End the process for good; return a line when it had to be killed.

        force_stop: once it is done, nobody is waited for any more.
        """
        # The supervising task goes first, or it would restart the child that is being stopped.
        if self._supervising is not None:
            self._supervising.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervising
        child, self._child = self._child, None
        has_ended = child is None or await child.stop(self._spec.stop_s, force_stop)
        return [] if has_ended else [f"{self._spec.name} did not stop and was killed"]

    async def _start_one(self, start_s: float | None) -> tuple[ChildProcess, bytes]:
        spec = self._spec
        try:
            self._child = await start_child(
                spec.module, spec.make_spec(self._incarnation), self._on_line, spec.pass_fds
            )
        except OSError as error:  # no process, no memory, no descriptors left: later there may be
            raise StartupError(f"{spec.name} cannot be started: {error}") from error
        try:
            line = await asyncio.wait_for(self._child.ready_line(), start_s)
        except TimeoutError:
            self._child.send_signal(signal.SIGKILL)
            raise StartupError(f"{spec.name} is not ready within {start_s:g} s (--start-timeout): killed") from None
        # Counted from the ready line: a process that ends while it starts has not served.
        self._restarts.on_serving(asyncio.get_running_loop().time())
        return self._child, line

    async def _supervise(self, child: ChildProcess) -> None:
        while True:
            # Shielded: the future belongs to the child, and a stop that cancels this task still waits for it.
            end = await asyncio.shield(child.exited)
            # Before the successor starts: what the old incarnation left behind is to be freed first.
            self._on_end(self._incarnation)
            pause_s = self._restarts.on_end(asyncio.get_running_loop().time())
            if pause_s is None:
                count = self._restarts.num_in_row + 1
                reason = f"{self._spec.name} died {count} times in a row: {end.reason}"
                self._on_give_up(StartupError(reason))
                return
            child = await self._replace(end, pause_s)

    async def _replace(self, end: ProcessExit, pause_s: float) -> ChildProcess:
        self._incarnation += 1
        spec = self._spec
        _LOG.warning("%s is gone (%s); starting %s", spec.name, end.reason, spec.incarnation_name(self._incarnation))
        await asyncio.sleep(pause_s)
        try:
            await self._start_one(spec.start_s)
        except StartupError as error:  # its end is seen by the next turn of the loop, and counted
            _LOG.warning("%s", error)
        assert self._child is not None
        return self._child
