"""A real coordinator and real sim engines in their own processes; the test plays the supervisor."""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import zmq

from client.config import ClientConfig
from client.dplb_async_mp_client import DPLBAsyncMPClient
from engine.config.engine_config import EngineConfig, EngineKind, SimConfig
from engine.config.engine_spec import EngineSpec
from engine.wire.build import build_id, config_hash, config_values
from engine.wire.codec import encode
from engine.wire.curve import draw_keys
from engine.wire.endpoints import ipc_endpoint, tcp_endpoint
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import AddRequest, EngineCoreOutput, SupervisorReport
from engine.wire.process import child_environment
from engine.wire.replicas import ReplicaInfo
from engine.wire.sampling import SamplingParams
from engine.wire.sockets import connect, make_socket
from engine.wire.states import ReplicaState
from lb.coordinator.config import CoordinatorSpec

DEADLINE_S = 30.0


async def eventually(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Return the condition's value as soon as it is true."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s"
        await asyncio.sleep(0.005)
    return value


def make_request(client: Any, prompt: bytes = b"hello", *, sample_index: int = 0, **sampling: Any) -> AddRequest:
    """Return a request of one sample, as the facade builds it."""
    params = SamplingParams(**({"max_tokens": 8, "seed": 7} | sampling))
    return AddRequest(client.client_id, 0, client.request_ids.draw(), sample_index, 0, list(prompt), [], params)


async def finish(client: Any, *requests: AddRequest) -> dict[int, list[EngineCoreOutput]]:
    """Collect outputs until each of these requests has ended; return all outputs by request id."""
    outputs: dict[int, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    open_ids = set(outputs)
    async with asyncio.timeout(DEADLINE_S):
        while open_ids:
            for output in (await client.get_output_async()).outputs:
                outputs.setdefault(output.request_id, []).append(output)
                if output.finish_reason is not None:
                    open_ids.discard(output.request_id)
    return outputs


class Transport(StrEnum):
    """What the lines of a deployment run over."""

    IPC = "ipc"
    TCP = "tcp"
    CURVE = "tcp with curve"


class Deployment:
    """Starts and kills processes, and reports to the coordinator what a supervisor would.

    security: the keys of its lines, with ``Transport.CURVE``.
    """

    def __init__(self, folder: Path, engine: EngineConfig, transport: Transport = Transport.IPC) -> None:
        self._folder = folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._report_seq = 0
        self._num_clients = 0
        self.config = engine
        self.security = draw_keys() if transport is Transport.CURVE else None
        self._transport = transport
        self.report_endpoint = self._bindable("reports")
        self.state_endpoint = self._bindable("state")
        self.engines: dict[EngineId, subprocess.Popen[bytes]] = {}
        self.replicas: dict[int, ReplicaInfo] = {}
        self.coordinator = self.start_coordinator(1)
        self._supervisor = make_socket(self._context, zmq.PUSH, security=self.security)
        connect(self._supervisor, self.report_endpoint)

    def start_coordinator(self, generation: int) -> "subprocess.Popen[bytes]":
        """Start a coordinator and wait for its ready line."""
        spec = CoordinatorSpec(
            generation=generation,
            report_endpoint=self.report_endpoint,
            state_endpoint=self.state_endpoint,
            security=self.security,
        )
        self.coordinator = self._start("lb.coordinator", spec)
        assert self.coordinator.stdout is not None
        ready = json.loads(self.coordinator.stdout.readline())
        self.report_endpoint, self.state_endpoint = ready["report_endpoint"], ready["state_endpoint"]
        return self.coordinator

    def start_engine(self, rank: int, incarnation: int = 1, **changes: Any) -> EngineId:
        """Start an engine and list its replica."""
        engine_id = EngineId(rank, incarnation)
        spec = EngineSpec(
            engine_id=engine_id,
            engine=self.config,
            report_endpoint=self.report_endpoint,
            state_endpoint=self.state_endpoint,
            build_id=build_id(),
            config_hash=config_hash(self.config),
            node="here",
            security=self.security.for_connecting() if self.security is not None else None,
        )
        self.engines[engine_id] = self._start("engine.main", msgspec.structs.replace(spec, **changes))
        self.set_replica(engine_id, ReplicaState.ALIVE)
        return engine_id

    def kill_engine(self, engine_id: EngineId, with_signal: signal.Signals = signal.SIGKILL) -> None:
        """End an engine's process and wait until it has; nobody is told."""
        self.engines[engine_id].send_signal(with_signal)
        self.engines[engine_id].wait(DEADLINE_S)

    def set_replica(self, engine_id: EngineId, state: ReplicaState, reason: str = "") -> None:
        """Change what the supervisor knows of a replica, and report it."""
        self.replicas[engine_id.rank] = ReplicaInfo(engine_id, state, reason, "here")
        self.report()

    def report(self, **changes: Any) -> None:
        """Send a supervisor's report."""
        self._report_seq += 1
        report = SupervisorReport(self._report_seq, list(self.replicas.values()), [], [])
        self._supervisor.send(encode(msgspec.structs.replace(report, **changes)))

    def client_config(self, index: int | None = None, incarnation: int = 1) -> ClientConfig:
        """Return the configuration of the next client."""
        index = self._num_clients if index is None else index
        self._num_clients += 1
        return ClientConfig(
            client_id=ClientId(index, incarnation),
            report_endpoint=self.report_endpoint,
            state_endpoint=self.state_endpoint,
            request_bind=self._bindable(f"requests{index}.{incarnation}"),
            output_bind=self._bindable(f"outputs{index}.{incarnation}"),
            build_id=build_id(),
            config_hash=config_hash(self.config),
            config=config_values(self.config),
            security=self.security,
        )

    @asynccontextmanager
    async def client(self, num_engines: int = 1) -> AsyncIterator[DPLBAsyncMPClient]:
        """Yield a client that has shaken hands with so many engines."""
        client = DPLBAsyncMPClient(self.client_config())
        try:
            await client.wait_ready(DEADLINE_S, num_engines)
            yield client
        finally:
            await client.aclose()

    def close(self) -> None:
        """Kill whatever still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._context.destroy(linger=0)

    def _bindable(self, name: str) -> str:
        is_ipc = self._transport is Transport.IPC
        return ipc_endpoint(self._folder, name) if is_ipc else tcp_endpoint("127.0.0.1")

    def _start(self, module: str, spec: Any) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment()
        )
        self._processes.append(process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec))
        process.stdin.close()
        return process


def sim_engine(**sim: Any) -> EngineConfig:
    """Return a sim engine's configuration; ``sim`` are options of ``SimConfig``."""
    return EngineConfig(kind=EngineKind.SIM, sim=SimConfig(**({"step_s": 0.002} | sim)))


@contextmanager
def started(num_engines: int, engine: EngineConfig, transport: Transport = Transport.IPC) -> Iterator[Deployment]:
    """Yield a deployment whose processes are gone at the end; for fixtures that outlive one event loop."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        group = Deployment(Path(folder), engine, transport)
        try:
            for rank in range(num_engines):
                group.start_engine(rank)
            yield group
        finally:
            group.close()


@asynccontextmanager
async def deployment(
    num_engines: int = 1, *, transport: Transport = Transport.IPC, engine: EngineConfig | None = None, **sim: Any
) -> AsyncIterator[Deployment]:
    """Yield a deployment whose processes are gone at the end; sim engines with these options unless told otherwise."""
    with started(num_engines, engine or sim_engine(**sim), transport) as group:
        yield group
