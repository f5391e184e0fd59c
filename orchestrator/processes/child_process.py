"""A child process: started by exec, spec on standard input, ready line on standard output, last lines kept.

Shared by the local host, the actor of the Ray host and the supervisor's own children. Start it from the main thread:
the child asks the kernel to die with the *thread* that started it.
"""

import asyncio
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import msgspec

from engine.wire.errors import StartupError
from engine.wire.process import child_environment
from orchestrator.processes.exits import ProcessExit, describe_exit
from orchestrator.processes.waits import wait_all

LineSink = Callable[[str], None]
"""Takes one line of a child's standard error, without its line end."""

NUM_LAST_LINES = 20

_STDOUT, _STDERR = 1, 2
_MAX_LINE_BYTES = 16 * 1024
_LAST_LINES_S = 1.0  # for what is left in the pipes of a process that has ended


async def start_child(
    module: str,
    spec: Any,
    on_line: LineSink,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> "ChildProcess":
    """Start ``python -m module`` with ``spec`` as JSON on its standard input.

    on_line: gets each line of its standard error. pass_fds: descriptors it inherits under the same numbers. variables:
    added to its environment.
    """
    # -P: the current directory must not win over the installed packages.
    transport, child = await asyncio.get_running_loop().subprocess_exec(
        lambda: ChildProcess(module, on_line),
        *(sys.executable, "-P", "-m", module),
        env={**child_environment(), **variables},
        pass_fds=tuple(pass_fds),
    )
    # Casts, not checks: transports of uvloop, which Ray gives its workers, do not inherit from these classes.
    stdin = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
    stdin.write(msgspec.json.encode(spec))
    stdin.close()  # after what was written; a child that ends without reading is seen by its exit
    return child


class ChildProcess(asyncio.SubprocessProtocol):
    """A running child.

    exited: resolved once, after the last line of its standard error, so that an end is known with its last lines.
    A stream class on top of ``asyncio.create_subprocess_exec`` was rejected: its ``wait()`` also waits for every
    process that inherited a pipe.
    """

    def __init__(self, module: str, on_line: LineSink) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[ProcessExit] = loop.create_future()
        self._module = module
        self._on_line = on_line
        self._ready_line: asyncio.Future[bytes] = loop.create_future()
        self._stdout = b""
        self._stderr = b""
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._transport: asyncio.SubprocessTransport | None = None
        self._give_up: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """Return the process id."""
        assert self._transport is not None
        return self._transport.get_pid()

    async def ready_line(self) -> bytes:
        """Wait for the line the child writes to standard output.

        Raises:
            StartupError: the child ended without it; with its exit and last line.
        """
        waited: list[asyncio.Future[Any]] = [self._ready_line, self.exited]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        # Both can be done: a child that was ready and ended at once has been ready.
        if self._ready_line.done():
            return self._ready_line.result()
        raise StartupError(f"{self._module} did not start: {self.exited.result().reason}")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; no effect on a child that has ended."""
        if self._transport is not None and self._transport.get_returncode() is None:
            self._transport.send_signal(number)

    async def stop(self, timeout_s: float, *force_stop: "asyncio.Future[Any]") -> bool:
        """Send SIGTERM, wait ``timeout_s`` or until any of ``force_stop`` is done, send SIGKILL.

        Returns whether it ended by itself.
        """
        self.send_signal(signal.SIGTERM)
        has_ended = await wait_all([self.exited], timeout_s, *force_stop)
        if not has_ended:
            self.send_signal(signal.SIGKILL)
            await asyncio.wait([self.exited])
        return has_ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take bytes of standard output or standard error."""
        if fd == _STDERR:
            self._take_stderr(data)
        # What follows the ready line on standard output has no reader, and is not kept.
        elif not self._ready_line.done():
            self._stdout += data
            line, newline, _ = self._stdout.partition(b"\n")
            if newline:
                self._ready_line.set_result(line)

    def process_exited(self) -> None:
        """Wait for what is left in the pipes, but not for long: another process may hold them open for ever."""
        self._give_up = asyncio.get_running_loop().call_later(_LAST_LINES_S, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        """See the end of the process and of its pipes."""
        self._end()

    def _take_stderr(self, data: bytes) -> None:
        *lines, self._stderr = (self._stderr + data).split(b"\n")
        # An endless line is cut: a child must not fill the memory of its parent.
        if len(self._stderr) > _MAX_LINE_BYTES:
            lines, self._stderr = [*lines, self._stderr], b""
        for line in lines:
            self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self._last_lines.append(text)
        self._on_line(text)

    def _end(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()
        # Called twice as a rule: by the end of the pipes and, should another process hold them, by the timer.
        if self.exited.done():
            return
        if self._stderr:
            self._take_line(self._stderr)
        assert self._transport is not None
        returncode = self._transport.get_returncode()
        assert returncode is not None
        lines = tuple(self._last_lines)
        self.exited.set_result(ProcessExit(returncode, describe_exit(returncode, lines), lines))
        self._transport.close()
