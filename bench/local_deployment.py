"""Coordinator, sim engines and API processes as plain local processes, without supervisor or Ray."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from client.config import ClientConfig
from engine.config.engine_config import EngineConfig, EngineKind, SimConfig
from engine.config.engine_spec import EngineSpec
from engine.wire.build import build_id, config_hash
from engine.wire.endpoints import ipc_endpoint
from engine.wire.ids import ClientId, EngineId
from engine.wire.process import child_environment
from lb.coordinator.config import CoordinatorSpec
from metrics.shared_status import StatsMemory
from orchestrator.api.server.config import ApiSpec

MODEL_NAME = "sim"

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.05


class LocalDeployment:
    """Started processes and where they answer. ``close`` ends them all and removes the folder of their sockets.

    url: of the API processes. coordinator: process; engines, apis: by rank and by index; api: the first of these.
    """

    def __init__(
        self,
        num_ranks: int,
        sim: SimConfig | None = None,
        *,
        num_apis: int = 1,
        log_level: str = "WARNING",
        **api: Any,
    ) -> None:
        """Start everything; returns before the engines are ready.

        sim: the engines' timing. api: fields of ``ApiSpec`` that differ from their defaults.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-"))
        self._log_level = log_level
        engine = EngineConfig(kind=EngineKind.SIM, sim=sim or SimConfig())
        self._names: dict[str, Any] = {"build_id": build_id(), "config_hash": config_hash(engine)}
        self._endpoints: dict[str, Any] = {
            "report_endpoint": ipc_endpoint(self._folder, "report"),
            "state_endpoint": ipc_endpoint(self._folder, "state"),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stats = StatsMemory.make(num_apis)
        try:
            self.coordinator = self._start_coordinator()
            self.engines = [self._start_engine(EngineId(rank, 1), engine) for rank in range(num_ranks)]
            self.apis = self._start_apis(num_apis, api)
            self.api = self.apis[0]
        except BaseException:
            self.close()
            raise

    def wait_ready(self, num_ranks: int) -> None:
        """Wait until every API process reaches that many ranks.

        Raises:
            TimeoutError: with their last answer.
            ChildProcessError: one ended.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        seen: Any = None
        while time.monotonic() < deadline:
            for api in self.apis:
                if api.poll() is not None:
                    raise ChildProcessError(f"an API process ended with exit status {api.returncode}")
            with contextlib.suppress(OSError):
                seen = self.get_json("/v1/cluster")["api_servers"]
                if all(server["ready_ranks"] >= num_ranks for server in seen):
                    return
            time.sleep(_POLL_S)
        raise TimeoutError(f"not ready after {_START_TIMEOUT_S:g} s: {seen}")

    def get_json(self, path: str) -> Any:
        """Return the JSON a path answers with, whatever its status."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=_START_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error)

    def close(self) -> None:
        """Stop the API processes first, then what they need."""
        for process in reversed(self._processes):
            _stop(process)
        self._stats.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_coordinator(self) -> "subprocess.Popen[bytes]":
        spec = CoordinatorSpec(generation=1, log_level=self._log_level, **self._endpoints)
        return self._start("lb.coordinator", spec)

    def _start_engine(self, engine_id: EngineId, engine: EngineConfig) -> "subprocess.Popen[bytes]":
        spec = EngineSpec(
            engine_id=engine_id,
            engine=engine,
            node="local",
            log_level=self._log_level,
            **self._endpoints,
            **self._names,
        )
        return self._start("engine.main", spec)

    def _start_apis(self, num_apis: int, overrides: dict[str, Any]) -> "list[subprocess.Popen[bytes]]":
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            host, port = listener.getsockname()
            self.url = f"http://{host}:{port}"
            fields: dict[str, Any] = {
                "listen_fd": listener.fileno(), "host": host, "port": port, "stats": self._stats,
                "served_model_name": MODEL_NAME, "log_level": self._log_level, **overrides,
            }  # fmt: skip
            return [self._start_api(index, fields) for index in range(num_apis)]

    def _start_api(self, index: int, fields: dict[str, Any]) -> "subprocess.Popen[bytes]":
        client = ClientConfig(
            client_id=ClientId(index, 1),
            request_bind=ipc_endpoint(self._folder, f"requests-{index}"),
            output_bind=ipc_endpoint(self._folder, f"outputs-{index}"),
            **self._endpoints,
            **self._names,
        )
        spec = ApiSpec(client=client, **fields)
        return self._start("orchestrator.api", spec, pass_fds=[spec.listen_fd, *self._stats.fds])

    def _start(self, module: str, spec: Any, pass_fds: Sequence[int] = ()) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=child_environment(),
            pass_fds=tuple(pass_fds),
        )
        self._processes.append(process)
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(msgspec.json.encode(spec))
        return process


@contextlib.contextmanager
def local_deployment(num_ranks: int, sim: SimConfig | None = None, **options: Any) -> Iterator[LocalDeployment]:
    """Start a deployment, wait until all ranks are ready, and stop it in the end."""
    deployment = LocalDeployment(num_ranks, sim, **options)
    try:
        deployment.wait_ready(num_ranks)
        yield deployment
    finally:
        deployment.close()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
