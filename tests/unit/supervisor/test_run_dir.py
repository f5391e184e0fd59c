"""The run's private folder: found while the run lives, swept when it was killed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.wire.errors import StartupError
from orchestrator.supervisor.run_dir import RunDir, live_runs, sweep

KILLED_RUN = """
import os, sys
from pathlib import Path
from orchestrator.supervisor.run_dir import RunDir
run = RunDir(Path(sys.argv[1]))
run.write_run_file("http://127.0.0.1:1")
print(run.path, flush=True)
sys.stdin.read()
os._exit(1)
"""


@pytest.fixture
def parent() -> Iterator[Path]:
    """Return a folder with a short path: Unix sockets will live below it."""
    folder = Path(tempfile.mkdtemp(prefix="st", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_the_folder_is_private_and_gone_after_remove(parent: Path) -> None:
    run = RunDir(parent)
    assert run.path.parent == parent
    assert run.path.stat().st_mode & 0o777 == 0o700
    (run.path / "session").mkdir()
    assert run.remove()
    assert list(parent.iterdir()) == []
    assert run.remove()


def test_a_living_run_is_found_once_it_says_where_it_answers_and_never_swept(parent: Path) -> None:
    run = RunDir(parent)
    assert list(live_runs(parent)) == []
    run.write_run_file("http://127.0.0.1:8000")
    (found,) = live_runs(parent)
    assert (found.pid, found.url) == (os.getpid(), "http://127.0.0.1:8000")
    assert sweep(parent) == []
    run.remove()


def test_looking_for_runs_leaves_no_descriptor_open(parent: Path) -> None:
    run = RunDir(parent)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        list(live_runs(parent))
        sweep(parent)
    assert len(os.listdir("/proc/self/fd")) == before
    run.remove()


def test_the_folder_of_a_killed_run_is_not_found_and_swept(parent: Path) -> None:
    command = [sys.executable, "-c", KILLED_RUN, str(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert [run.pid for run in live_runs(parent)] == [process.pid]
        assert sweep(parent) == []
        process.kill()
    assert list(live_runs(parent)) == []
    assert sweep(parent) == [folder]
    assert list(parent.iterdir()) == []


def test_a_folder_that_is_only_called_alike_is_left_alone(parent: Path) -> None:
    (parent / "shoal-notes").mkdir()
    assert sweep(parent) == []
    assert (parent / "shoal-notes").is_dir()


def test_a_path_too_long_for_unix_sockets_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 40)
    deep.mkdir()
    with pytest.raises(StartupError, match="choose a shorter --run-dir"):
        RunDir(deep)
    assert list(deep.iterdir()) == []


def test_a_parent_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot make the run folder in .*missing \(--run-dir\): No such file"):
        RunDir(tmp_path / "missing")
