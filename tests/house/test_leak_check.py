"""The leak check and the runner of coroutine tests see what a careless test leaves behind, and nothing else."""

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

from tests.conftest import leaving_no_task
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


_loops: list[asyncio.AbstractEventLoop] = []


@pytest.mark.parametrize("number", [1, 2])
async def test_each_coroutine_test_runs_on_a_loop_of_its_own(number: int) -> None:
    assert all(loop.is_closed() for loop in _loops)
    _loops.append(asyncio.get_running_loop())


async def test_a_coroutine_test_that_leaves_a_task_behind_fails() -> None:
    left = []

    async def careless(name: str) -> None:
        left.append(asyncio.create_task(asyncio.Event().wait(), name=name))

    with pytest.raises(AssertionError, match=r"tasks left behind.*forgotten"):
        await leaving_no_task(careless, {"name": "forgotten"})
    left[0].cancel()
    await asyncio.wait(left)
