"""The leak check sees what a careless test leaves behind, and nothing else."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from tests.leaks import held, wait_given_back


@contextlib.contextmanager
def open_socket() -> Iterator[None]:
    with socket.socket():
        yield


@contextlib.contextmanager
def running_thread() -> Iterator[None]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield
    done.set()
    thread.join()


@contextlib.contextmanager
def zmq_context() -> Iterator[None]:
    with zmq.Context() as context, context.socket(zmq.PULL):
        yield


@contextlib.contextmanager
def child_process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE):
        yield


@contextlib.contextmanager
def orphaned_process() -> Iterator[None]:
    # The child that starts it has ended; standard output must not be inherited, or `run` would wait for its end.
    script = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    orphan = int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=30).stdout)
    yield
    os.kill(orphan, signal.SIGKILL)
    os.waitpid(orphan, 0)


@pytest.mark.parametrize("leak", [open_socket, running_thread, zmq_context, child_process, orphaned_process])
def test_what_is_left_open_is_seen_and_what_is_closed_is_not(
    leak: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    before = held()
    with leak():
        assert held() - before
    assert not wait_given_back(before)


async def test_coroutine_tests_run_on_a_loop_of_their_own() -> None:
    assert asyncio.get_running_loop().is_running()
