"""An engine's process is found by its mark, ended, and seen to be gone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.launch.engine_actor import MARK_VARIABLE, reap


@contextmanager
def marked(mark: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process with a mark, and return once it carries it."""
    command = [sys.executable, "-c", "import os, signal; os.close(1); signal.pause()"]
    process = subprocess.Popen(command, env={**os.environ, MARK_VARIABLE: mark}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_marked_process_is_gone_also_when_it_was_stopped_and_nobody_has_waited_for_it() -> None:
    with marked("tcp://a:1 3.1") as process:
        process.send_signal(signal.SIGSTOP)
        assert reap("tcp://a:1 3.1", 10.0)
        assert os.waitpid(process.pid, os.WNOHANG) == (process.pid, signal.SIGKILL)
        process.returncode = -signal.SIGKILL


def test_other_lives_ranks_and_deployments_are_left_alone() -> None:
    with marked("tcp://a:1 3.12") as process:
        for mark in ("tcp://a:1 3.1", "tcp://a:1 3.2", "tcp://a:11 3.12", ""):
            assert reap(mark, 10.0)
        assert process.poll() is None


def test_nothing_to_end_is_nothing_left() -> None:
    assert reap("nobody", 0.0)
