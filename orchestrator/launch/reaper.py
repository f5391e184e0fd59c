"""Ends an engine's process on the host it runs on, and says that it is gone. Runs there as a Ray task; imports no ray.

Ray calls an actor dead as soon as it has asked for its end; a process that is stopped lives for seconds after that, and
holds its device. So nobody is taken at their word: processes are found by a mark in their environment, which no reused
process id can carry.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "SHOAL_ENGINE"

_POLL_S = 0.005


def reap(mark: str, timeout_s: float) -> bool:
    """SIGKILL every process of this host that carries ``mark``; return whether none is left within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while pids := list(_find(mark)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _find(mark: str) -> Iterator[int]:
    """Yield the processes with the mark. One that has ended has no environment, also while nobody has waited for it."""
    entry = f"{MARK_VARIABLE}={mark}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # gone meanwhile, or somebody else's
            if entry in environment.read_bytes().split(b"\0"):
                yield int(environment.parent.name)
