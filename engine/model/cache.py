"""The user's cache folder: folders made once out of a model, each there whole or not at all. Imports no torch."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine.model.names import ResolvedModel

_FORMAT = 1
"""To be raised when what is kept in the folders changes; older folders are then never looked at again."""


def default_cache_dir() -> Path:
    """Return Shoal's folder below the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


def cached_name(model: ResolvedModel, *variant: str) -> str:
    """Return the folder name for something made out of a model.

    A changed model gets another name, so a folder that exists is fresh. A hub name counts as unchanged for as long as
    its folder is there.
    """
    digest = hashlib.sha256(repr((_FORMAT, model.path, _stamps(model), variant)).encode()).hexdigest()[:16]
    # Not the display name: one process may name the model by its known name, and another one by its path.
    title = Path(model.gguf_file).stem if model.gguf_file else Path(model.path).name
    readable = "".join(c if c.isalnum() or c in ".-_" else "-" for c in title)
    return "-".join([readable, *variant, digest])


@contextlib.contextmanager
def making_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``folder`` when the body succeeds, and vanishes when it fails.

    When another process finished the same folder meanwhile, its folder stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield made
        made.chmod(0o755)
        made.rename(folder)
    except OSError:  # a rename onto a folder that is not empty is one
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a lock on ``folder`` against other processes of this machine."""
    # A lock of the kernel on an open file ends with its holder, however that ends; a lock file would stay.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stamps(model: ResolvedModel) -> list[tuple[str, int, int]]:
    if not model.is_local:
        return [(model.gguf_file or "", 0, 0)]
    folder = Path(model.path)
    files = [folder / model.gguf_file] if model.gguf_file else sorted([*folder.glob("*.json"), *folder.glob("*.model")])
    return [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
