"""The private folder of one run: Unix sockets, Ray's session and ``run.json``, by which ``shoal status`` finds it.

A lock on a file inside shows that the run is alive: the kernel drops it with the process, however that ends, and no
reused process id can be mistaken for it. Folders whose lock is free are swept at the next start. A folder gets its name
only once its lock is held, so a folder in sight with a free lock is always a dead run's.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.wire.errors import StartupError

PREFIX = "shoal-"

# Ray's longest socket path below its session folder takes about 70 of the 107 bytes of a Unix socket address.
MAX_PATH_BYTES = 32

_UNNAMED_PREFIX = ".shoal-new-"
_LOCK = "lock"
_RUN_FILE = "run.json"
_REMOVE_TRIES = 20
_REMOVE_PAUSE_S = 0.1


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``run.json``. url: base URL of the HTTP port."""

    pid: int
    url: str


class RunDir:
    """The folder of this run; made in the constructor, gone after ``remove``.

    Raises:
        StartupError: the folder cannot be made, or its path is too long for Unix sockets in it.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        try:
            unnamed = Path(tempfile.mkdtemp(prefix=_UNNAMED_PREFIX, dir=parent))
            self._lock = _take_lock(unnamed)
            # The name comes after the lock, so that no sweep of another start takes this folder for a dead run's.
            self.path = unnamed.rename(parent / (PREFIX + unnamed.name.removeprefix(_UNNAMED_PREFIX)))
        except OSError as error:
            raise StartupError(f"cannot make the run folder in {parent} (--run-dir): {error.strerror}") from error
        if len(os.fsencode(self.path)) > MAX_PATH_BYTES:
            self.remove()
            raise StartupError(
                f"the run folder {self.path} has a path of more than {MAX_PATH_BYTES} bytes, too long for the Unix "
                "sockets in it; choose a shorter --run-dir, e.g. /tmp"
            )

    def write_run_file(self, url: str) -> None:
        """Publish where this deployment answers. Written whole: a reader never sees half a file."""
        content = msgspec.json.encode(RunFile(pid=os.getpid(), url=url))
        temporary = self.path / (_RUN_FILE + ".new")
        temporary.write_bytes(content)
        temporary.rename(self.path / _RUN_FILE)

    def remove(self) -> bool:
        """Remove the folder and tell whether it is gone. Ray's last processes may write while they end: try again."""
        for attempt in range(_REMOVE_TRIES):
            if attempt:
                time.sleep(_REMOVE_PAUSE_S)
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
        # After the files: as long as any is left, the lock keeps a sweep from removing them at the same time.
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        return not self.path.exists()


def live_runs(parent: Path | None = None) -> Iterator[RunFile]:
    """Yield the deployments of this user that are alive in the folder ``parent`` and ready."""
    for folder in _folders(parent):
        # A run without its file is starting, or has just been removed.
        if _is_alive(folder):
            with suppress(OSError, msgspec.MsgspecError):
                yield msgspec.json.decode((folder / _RUN_FILE).read_bytes(), type=RunFile)


def sweep(parent: Path | None = None) -> list[Path]:
    """Remove the folders of runs that were killed, and return them."""
    stale = [folder for folder in _folders(parent) if not _is_alive(folder)]
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
    return stale


def _folders(parent: Path | None) -> list[Path]:
    parent = parent or Path(tempfile.gettempdir())
    return sorted(path for path in parent.glob(PREFIX + "*") if _is_ours(path))


def _is_ours(folder: Path) -> bool:
    # A folder without the lock file only happens to be called like ours.
    with suppress(OSError):
        return (folder / _LOCK).is_file() and folder.stat().st_uid == os.getuid()
    return False


def _take_lock(folder: Path) -> int:
    # Not inherited by children: an orphan that held the lock would make a dead run look alive.
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_alive(folder: Path) -> bool:
    try:
        descriptor = _take_lock(folder)
    except OSError:
        return True
    os.close(descriptor)
    return False
