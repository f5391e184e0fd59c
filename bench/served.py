"""One ``shoal serve`` on this machine for the time of a benchmark."""

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from orchestrator.supervisor.run_dir import live_runs

_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    """A deployment that is ready. process: of the supervisor. url: of the API. log: file of its standard error."""

    process: psutil.Process
    url: str
    log: Path


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Make a folder with a path short enough for the sockets in it, and remove it."""
    folder = Path(tempfile.mkdtemp(prefix="st", dir="/tmp"))  # Ray's socket paths leave no room for a long one
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[Served]:
    """Start a deployment with its run folder in ``folder``, wait until it is ready, and stop it in the end."""
    shoal, log = Path(sys.executable).with_name("shoal"), folder / "log"
    command = [str(shoal), "serve", "--port=0", f"--run-dir={folder}", *options]
    with (
        log.open("w") as lines,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=lines) as process,
    ):
        try:
            yield Served(psutil.Process(process.pid), _wait_url(process, folder, log), log)
        finally:
            process.send_signal(signal.SIGTERM)


def _wait_url(process: "subprocess.Popen[bytes]", folder: Path, log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while not (runs := list(live_runs(folder))):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the deployment did not start:\n{log.read_text()}")
        time.sleep(0.1)
    return runs[0].url
