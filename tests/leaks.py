"""The threads, processes and sockets that this process holds, and that a finished test must have given back."""

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_DEADLINE_S = 20.0  # only a leak takes as long
_POLL_S = 0.02

# Daemons of a Ray head and its pre-started workers come and go while a head lives. An actor (`ray::Name`) does not.
_RAY_MARKS = (
    "raylet",
    "gcs_server",
    "ray::IDLE",
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
    "/ray/dashboard/",
    "/ray/_private/",
    "/ray/autoscaler/",
)


def adopt_orphans() -> None:
    """Make every orphan below this process its child, so that a process that outlives its parent is seen."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _identity(line: str) -> str:
    """Return what stays the same while it lives: a child's name and command line change when it execs."""
    return " ".join(line.split()[:2]) if line.startswith("process ") else line


def held(*, ignore_ray: bool = False) -> set[str]:
    """Return one line for each thread, ZeroMQ context thread, live process below and socket of this process.

    ignore_ray: leave out what Ray starts by itself and, where this process has imported it, what it opens in here.
    """
    if not ignore_ray:
        return {*_processes(), *_threads(), *_sockets()}
    processes = {line for line in _processes() if not any(mark in line for mark in _RAY_MARKS)}
    threads = {line for line in _threads() if not line.startswith("thread ray_")}
    return processes | threads | (set() if "ray" in sys.modules else set(_sockets()))


def wait_given_back(before: set[str], *, ignore_ray: bool = False) -> set[str]:
    """Wait until nothing is held that was not held before; return what still is after some seconds."""
    deadline = time.monotonic() + _DEADLINE_S
    known = {_identity(line) for line in before}

    def leaked_now() -> set[str]:
        return {line for line in held(ignore_ray=ignore_ray) if _identity(line) not in known}

    while (leaked := leaked_now()) and time.monotonic() < deadline:
        gc.collect()
        threading.Event().wait(_POLL_S)
    return leaked


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        yield f"thread {thread.name} {thread.ident}"
    for task in Path("/proc/self/task").iterdir():
        name = _read(task / "comm")
        if name.startswith("ZMQbg"):  # an open zmq.Context
            yield f"thread {name} {task.name}"


def _processes() -> Iterator[str]:
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield f"process {process.pid} {process.name()} {' '.join(process.cmdline()).strip()}"
        except psutil.NoSuchProcess:
            continue


def _sockets() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # closed since the listing
            continue
        if target.startswith("socket:"):
            yield f"descriptor {entry.name} {target}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the thread has ended since the listing
        return ""
