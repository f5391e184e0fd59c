"""Rules for every test: a leak check, an event loop of its own for ``async def``, and hypothesis derandomised."""

import asyncio
import gc
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import hypothesis
import pytest
from zmq.utils import garbage

from tests.leaks import adopt_orphans, held, wait_given_back

_NUM_ZMQ_THREADS = 2  # of one context

# Derandomised, so that a failure can be repeated; no deadline, because the load of the machine is not the code's.
hypothesis.settings.register_profile("shoal", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("shoal")


def pytest_collection_finish() -> None:
    """Exclude the objects of all imports from garbage collection: half a million, 0.2 s for every collection.

    Each coroutine test collects.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests in a fresh loop, and fail them when they leave a task behind."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with asyncio.Runner() as runner:
        runner.run(leaving_no_task(pyfuncitem.obj, arguments))
    return True


async def leaving_no_task(test: Callable[..., Coroutine[Any, Any, None]], arguments: dict[str, Any]) -> None:
    """Run a coroutine test in the running loop.

    Raises:
        AssertionError: the test has ended and left a task that is not done.
    """
    await test(**arguments)
    gc.collect()
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]
    assert not left, f"tasks left behind: {left}"


@pytest.fixture(scope="session", autouse=True)
def orphans_are_ours() -> None:
    """Let the leak check see processes that outlive the process that started them."""
    adopt_orphans()


@pytest.fixture(scope="session", autouse=True)
def pyzmq_is_started() -> None:
    """Start the one thread with which pyzmq lets go of shared frames, and ZeroMQ's own: they live as long as we do."""
    garbage.gc.start()
    while sum("ZMQbg" in line for line in held()) < _NUM_ZMQ_THREADS:  # they name themselves a moment after their start
        threading.Event().wait(0.001)


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a thread, a process or a socket behind.

    Fixtures of a wider scope are set up before this one, so what they hold is not the test's. A test that uses Ray
    carries the marker ``ray``: what Ray itself starts, and keeps for a while after a kill, is then left out.
    """
    ignore_ray = request.node.get_closest_marker("ray") is not None
    before = held(ignore_ray=ignore_ray)
    yield
    leaked = wait_given_back(before, ignore_ray=ignore_ray)
    assert not leaked, "left behind:\n" + "\n".join(sorted(leaked))
