"""One child process: its lines, its ready line, its end."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engine.wire.errors import StartupError
from orchestrator.processes.child_process import NUM_LAST_LINES, ChildProcess, start_child
from orchestrator.processes.exits import describe_exit

PUPPET = "tests.unit.launch.puppet"
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children import tests: they do not look into the current directory."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def start(*orders: str, lines: list[str] | None = None, pass_fds: tuple[int, ...] = ()) -> ChildProcess:
    return await start_child(PUPPET, list(orders), ([] if lines is None else lines).append, pass_fds)


async def test_every_line_is_passed_on_before_the_end_is_known() -> None:
    lines: list[str] = []
    child = await start("log one\n", "log two\nthr", "log ee", "exit 3", lines=lines)
    end = await child.exited
    assert lines == ["one", "two", "three"]
    assert (end.returncode, end.reason, end.last_lines) == (3, "exit status 3: three", ("one", "two", "three"))


async def test_only_the_last_lines_are_kept_and_an_endless_line_is_cut() -> None:
    lines: list[str] = []
    child = await start(*(f"log {i}\n" for i in range(50)), "log " + "x" * 100_000, "exit 0", lines=lines)
    end = await child.exited
    assert len(end.last_lines) == NUM_LAST_LINES
    assert sum(len(line) for line in lines if line.startswith("x")) == 100_000
    assert max(map(len, lines)) < 100_000


async def test_the_ready_line_is_returned_as_soon_as_it_is_there() -> None:
    child = await start("say ready", "wait")
    assert await child.ready_line() == b"ready"
    assert await child.ready_line() == b"ready"
    assert await child.stop(10)
    assert child.exited.result().returncode == -signal.SIGTERM


async def test_a_child_that_ends_without_a_ready_line_is_a_failed_start_with_its_last_line() -> None:
    child = await start("log no such thing\n", "exit 1")
    with pytest.raises(StartupError, match=f"{PUPPET} did not start: exit status 1: no such thing"):
        await child.ready_line()


async def test_a_child_deaf_to_sigterm_is_killed_after_the_timeout() -> None:
    child = await start("deaf", "say ready", "wait")
    await child.ready_line()
    assert not await child.stop(0.05)
    assert child.exited.result().returncode == -signal.SIGKILL


async def test_a_hurry_ends_the_patience() -> None:
    child = await start("deaf", "say ready", "wait")
    await child.ready_line()
    force_stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    force_stop.set_result(None)
    assert not await child.stop(60, force_stop)


async def test_stopping_a_child_that_has_ended_has_no_effect() -> None:
    child = await start("exit 0")
    await child.exited
    assert await child.stop(0)
    child.send_signal(signal.SIGKILL)


async def test_a_process_that_inherited_the_pipes_does_not_hide_the_end() -> None:
    reading, writing = os.pipe()
    child = await start(f"grandchild {reading}", "exit 4", pass_fds=(reading,))
    end = await asyncio.wait_for(child.exited, 10)
    assert end.returncode == 4
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("returncode", "lines", "expected"),
    [
        (0, ["all well"], "exit status 0"),
        (2, ["first", "why", "  "], "exit status 2: why"),
        (-9, ["unrelated"], "killed by SIGKILL"),
        (-11, ["fault"], "killed by SIGSEGV: fault"),
        (-63, [], "killed by signal 63"),
    ],
)
def test_an_end_is_described_in_one_sentence(returncode: int, lines: list[str], expected: str) -> None:
    assert describe_exit(returncode, lines) == expected
