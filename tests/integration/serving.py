"""The real command ``shoal`` as a process of a test, and checks of what it leaves behind."""

import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from orchestrator.supervisor.run_dir import live_runs

DEADLINE_S = 90.0
START_S = 240.0
"""A rank with a real model imports torch and transformers first: a minute beside other heavy work."""

_GREETING_BYTES = 64
SHOAL = Path(sys.executable).with_name("shoal")
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}

# One client for all looks at a deployment: making one, certificates included, costs the CPU more than the request does,
# and a test that polls would take that from the ranks it waits for. No connection outlives its request.
HTTP = httpx.Client(verify=False, timeout=DEADLINE_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def eventually(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Return the condition's value as soon as it is true."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s"
        time.sleep(0.02)
    return value


def run_shoal(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run one command of ``shoal`` to its end."""
    return subprocess.run(
        [SHOAL, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


class Deployment:
    """One running ``shoal serve`` in a process group of its own, as a terminal would start it."""

    def __init__(self, *arguments: str, parent: Path) -> None:
        self.parent = parent
        self._stdout = (parent / "stdout").open("w")
        self._stderr = (parent / "stderr").open("w")
        self.process = subprocess.Popen(
            [SHOAL, "serve", "--port", "0", "--run-dir", str(parent), *arguments],
            stdout=self._stdout,
            stderr=self._stderr,
            env={**os.environ, "TMPDIR": str(parent)},
            start_new_session=True,
        )

    @property
    def stdout(self) -> str:
        """Return what it has printed so far."""
        return (self.parent / "stdout").read_text()

    @property
    def stderr(self) -> str:
        """Return what it has logged so far."""
        return (self.parent / "stderr").read_text()

    def has_logged(self, text: str) -> bool:
        """Tell whether it has logged this."""
        return text in self.stderr

    def wait_ready(self) -> str:
        """Wait until it serves; return its base URL."""

        def url() -> str | None:
            assert self.process.poll() is None, self.stderr
            return next((run.url for run in live_runs(self.parent)), None)

        return str(eventually(url, START_S))

    def wait_exit(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for its end; return its exit status."""
        return self.process.wait(deadline_s)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor alone."""
        self.process.send_signal(number)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group it was started in, as Ctrl-C and ``timeout`` do."""
        os.killpg(self.process.pid, number)

    def processes(self, module: str = "") -> list[psutil.Process]:
        """Return the living processes of its session, also orphans; only those that run ``python -m module``."""
        ours = [
            process for process in psutil.Process().children(recursive=True) if _session(process) == self.process.pid
        ]
        return [process for process in ours if module in (line := _command_line(process)) and line]

    def listening(self, module: str = "") -> dict[str, set[int]]:
        """Return the addresses that its processes listen on, with their ports; only those of ``python -m module``."""
        found: dict[str, set[int]] = {}
        for process in self.processes(module):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(_plain(connection.laddr.ip), set()).add(connection.laddr.port)
        return found

    def run_folders(self) -> list[Path]:
        """Return the run folders that exist."""
        return sorted(self.parent.glob("shoal-*"))

    def end(self) -> None:
        """Stop it in order, and check that it leaves nothing behind."""
        self.send_signal(signal.SIGTERM)
        assert self.wait_exit() == 0, self.stderr
        self.assert_nothing_left()

    def close(self) -> None:
        """End it if it has not ended, files included."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._stdout.close()
        self._stderr.close()

    def assert_nothing_left(self) -> None:
        """Check that no process of its session lives and that it left no file of any kind."""
        eventually(lambda: not self.processes(), 10)
        assert {path.name for path in self.parent.iterdir()} == {"stdout", "stderr"}


@contextmanager
def deployment(*arguments: str) -> Iterator[Deployment]:
    """Start one ``shoal serve`` on any free port, with a short folder of its own for its run folder."""
    parent = Path(tempfile.mkdtemp(prefix="st", dir="/tmp"))
    served = Deployment(*arguments, parent=parent)
    try:
        yield served
    except BaseException:
        sys.stderr.write(served.stderr)
        raise
    finally:
        served.close()
        shutil.rmtree(parent)


def ranks_of(url: str) -> dict[int, dict[str, Any]]:
    """Return the ranks of ``/v1/cluster``."""
    return {rank["rank"]: rank for rank in HTTP.get(f"{url}/v1/cluster").json()["ranks"]}


def rank_is(url: str, rank: int, engine_id: str) -> bool:
    """Tell whether this engine serves a rank now and is ready."""
    row = ranks_of(url).get(rank)
    return row is not None and (row["engine_id"], row["state"]) == (engine_id, "ready")


def chat(url: str, **changes: Any) -> str:
    """Send one chat request; return the answer's finish reason."""
    answer = HTTP.post(f"{url}/v1/chat/completions", json=CHAT | changes)
    assert answer.status_code == httpx.codes.OK, answer.text
    return str(answer.json()["choices"][0]["finish_reason"])


def wire_mechanism(address: str, port: int) -> str:
    """Return the security mechanism of a ZeroMQ socket, from its greeting: ``NULL`` or ``CURVE``."""
    with socket.create_connection((address, port), DEADLINE_S) as connection:
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(55, b"\x00"))
        greeting = b""
        while len(greeting) < _GREETING_BYTES and (received := connection.recv(_GREETING_BYTES)):
            greeting += received
    return greeting[12:32].rstrip(b"\x00").decode()


def _plain(address: str) -> str:
    mapped = getattr(ipaddress.ip_address(address), "ipv4_mapped", None)
    return str(mapped or address)


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return -1


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.NoSuchProcess:
        return ""
