"""Every test runs leak-checked; ``async def`` tests run on their own event loop."""

import asyncio
import gc
import inspect
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

_LEAK_PATIENCE_S = 5.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests in a fresh loop, and fail them when they leave a task behind."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with asyncio.Runner() as runner:
        runner.run(_leaving_no_task(pyfuncitem.obj, arguments))
    return True


async def _leaving_no_task(test: Callable[..., Coroutine[Any, Any, None]], arguments: dict[str, Any]) -> None:
    await test(**arguments)
    gc.collect()
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]
    assert not left, f"tasks left behind: {left}"


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a thread, a child process or a socket behind.

    Session-wide fixtures (a Ray head, a deployment) must be set up before the check begins: a test lists them as
    arguments and carries the marker ``ray``, which limits the check to what the test itself started.
    """
    for name in request.fixturenames:
        if name != "leak_check" and request._arg2fixturedefs.get(name, [None])[-1] is not None:
            definition = request._arg2fixturedefs[name][-1]
            if definition.scope in ("session", "module"):
                request.getfixturevalue(name)
    before = _held()
    yield
    deadline = time.monotonic() + _LEAK_PATIENCE_S
    while (leaked := _held() - before) and time.monotonic() < deadline:
        gc.collect()
        threading.Event().wait(0.02)
    assert not leaked, f"left behind: {sorted(leaked)}"


def _held() -> set[str]:
    threads = {f"thread {t.name} {t.ident}" for t in threading.enumerate()}
    children = {f"process {p.pid} {p.name()}" for p in _children()}
    sockets = {f"descriptor {fd} {target}" for fd, target in _descriptors() if target.startswith("socket:")}
    return threads | children | sockets


def _children() -> list[psutil.Process]:
    alive = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                process.name()
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    return alive


def _descriptors() -> Iterator[tuple[str, str]]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            yield entry.name, os.readlink(entry)
        except OSError:
            continue
