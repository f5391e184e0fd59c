"""What runs inside a Ray actor: a shell around one engine process. Imports no ray, so that any test can run it."""

import asyncio
import socket
import sys

import msgspec

from engine.config.engine_spec import EngineSpec
from engine.wire.process import die_with_parent
from orchestrator.launch.local_host import ENGINE_MODULE
from orchestrator.launch.reaper import MARK_VARIABLE
from orchestrator.processes.child_process import start_child
from orchestrator.processes.module_guard import check_packages

ActorResult = tuple[int, str, tuple[str, ...]]
"""Return code, reason and last lines: builtins only, so that the driver unpickles nothing of ours."""


class EngineActor:
    """One engine process under an actor's main thread.

    A plain actor with this single method, on purpose: a threaded or async actor polls at 1 % of a core when idle, and a
    child started from another thread would die with that thread. The pending ``run`` is the death notice; everything
    else is said over the wire. The engine process dies with the actor.
    """

    def run(self, spec_json: bytes) -> ActorResult:
        """Run one engine to its end and return how it ended."""
        # Ray's own check, whether the parent is process 1, misses a dead node manager below any child subreaper.
        die_with_parent()
        check_packages()
        spec = msgspec.json.decode(spec_json, type=EngineSpec)
        return asyncio.run(_run(msgspec.structs.replace(spec, node=socket.gethostname())))


def engine_mark(spec: EngineSpec) -> str:
    """Return what one life of one replica of one deployment is marked with on its host, see ``reaper``."""
    return f"{spec.report_endpoint} {spec.engine_id}"


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
