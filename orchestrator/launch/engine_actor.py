"""The engine on its own node: the Ray actor around its process, and the Ray task that ends what is left of one.

Imports no ray, so that both run in any test.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.config.engine_spec import EngineSpec
from engine.wire.process import die_with_parent
from orchestrator.launch.local_host import ENGINE_MODULE
from orchestrator.processes.child_process import start_child
from orchestrator.processes.module_guard import check_packages

MARK_VARIABLE = "SHOAL_ENGINE"

_REAP_POLL_S = 0.005

ActorResult = tuple[int, str, tuple[str, ...]]
"""Return code, reason and last lines: builtins only, so that the driver unpickles nothing of ours."""


class EngineActor:
    """One engine process under an actor's main thread.

    A plain actor with this single method, on purpose: a threaded or async actor polls at 1 % of a core when idle, and a
    child started from another thread would die with that thread. The pending ``run`` is the death notice; everything
    else travels on the wire. The engine process dies with the actor.
    """

    def run(self, spec_json: bytes) -> ActorResult:
        """Run one engine to its end and return how it ended."""
        # Ray's own check, whether the parent is process 1, misses a dead node manager below any child subreaper.
        die_with_parent()
        check_packages()
        spec = msgspec.json.decode(spec_json, type=EngineSpec)
        return asyncio.run(_run(msgspec.structs.replace(spec, node=socket.gethostname())))


async def _run(spec: EngineSpec) -> ActorResult:
    child = await start_child(
        ENGINE_MODULE,
        spec,
        lambda line: print(line, file=sys.stderr),  # noqa: T201 - Ray's log
        variables={MARK_VARIABLE: engine_mark(spec)},
    )
    end = await child.exited
    assert end.returncode is not None
    return end.returncode, end.reason, end.last_lines


def engine_mark(spec: EngineSpec) -> str:
    """Return the mark of one incarnation of one replica of one deployment in its environment, see ``reap``."""
    return f"{spec.report_endpoint} {spec.engine_id}"


def reap(mark: str, timeout_s: float) -> bool:
    """SIGKILL every process of this host that carries ``mark``; return whether none is left within ``timeout_s``.

    Ray calls an actor dead as soon as it has asked for its end; a process that is stopped lives for seconds after that,
    and holds its device. So Ray's word is not taken for it: processes are found by a mark in their environment, which
    no reused process id can carry.
    """
    deadline = time.monotonic() + timeout_s
    while pids := list(_find(mark)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(_REAP_POLL_S)
    return True


def _find(mark: str) -> Iterator[int]:
    """Yield the processes with the mark. One that has ended has no environment, also while nobody has waited for it."""
    entry = f"{MARK_VARIABLE}={mark}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if entry in environment.read_bytes().split(b"\0"):
                yield int(environment.parent.name)
