"""A child process is kept running: each incarnation gets its number, each end is known before the next one starts."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from engine.wire.errors import ShoalError, StartupError
from orchestrator.processes.child_process import ChildProcess, start_child
from orchestrator.processes.process_supervisor import ProcessSpec, ProcessSupervisor
from orchestrator.processes.restarts import RestartRule
from tests.contract.deployment import eventually

PUPPET = "tests.unit.launch.puppet"
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children import tests: they do not look into the current directory."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def never() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


class Kept:
    """Supervised puppets. lives: orders of each incarnation, the last for all that follow. events: what happened."""

    def __init__(
        self, *lives: list[str], first_pause_s: float = 0.0, max_in_row: int = 5, start_s: float | None = None
    ) -> None:
        self.events: list[str] = []
        self.given_up: list[ShoalError] = []
        self._lives = lives
        spec = ProcessSpec(
            name="the puppet",
            module=PUPPET,
            make_spec=self._make_spec,
            incarnation_name=lambda life: f"life {life}",
            rule=RestartRule(max_in_row=max_in_row, first_pause_s=first_pause_s),
            stop_s=5.0,
            start_s=start_s,
        )
        self.supervisor = ProcessSupervisor(
            spec, lambda _: None, lambda life: self.events.append(f"end {life}"), self.given_up.append
        )

    def _make_spec(self, life: int) -> list[str]:
        self.events.append(f"start {life}")
        return self._lives[min(life, len(self._lives)) - 1]


async def test_each_life_follows_the_end_of_the_one_before() -> None:
    kept = Kept(["say one", "exit 3"], ["exit 4"], ["say three", "wait"])
    assert await kept.supervisor.start() == b"one"
    await eventually(lambda: kept.events == ["start 1", "end 1", "start 2", "end 2", "start 3"])
    assert await kept.supervisor.stop(never()) == []
    assert kept.supervisor.pid is None
    assert kept.events[-1] == "start 3"


async def test_a_first_life_without_a_ready_line_is_an_error_and_has_no_successor() -> None:
    kept = Kept(["log no luck\n", "exit 3"])
    with pytest.raises(StartupError, match="did not start: exit status 3: no luck"):
        await kept.supervisor.start()
    assert await kept.supervisor.stop(never()) == []
    assert kept.events == ["start 1"]


async def test_a_system_that_starts_no_process_now_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(["say one", "kill"], ["say none"], ["say three", "wait"])

    async def refuse_the_second(module: str, spec: list[str], *others: Any) -> ChildProcess:
        if spec == ["say none"]:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start_child(module, spec, *others)

    monkeypatch.setattr("orchestrator.processes.process_supervisor.start_child", refuse_the_second)
    await kept.supervisor.start()
    await eventually(lambda: kept.events[-1] == "start 3" and kept.supervisor.pid)
    assert kept.events == ["start 1", "end 1", "start 2", "end 2", "start 3"]
    assert await kept.supervisor.stop(never()) == []


async def test_what_dies_again_and_again_is_given_up_with_its_reason() -> None:
    kept = Kept(["say one", "kill"], max_in_row=2)
    await kept.supervisor.start()
    await eventually(lambda: kept.given_up)
    assert str(kept.given_up[0]) == "the puppet died 3 times in a row: killed by SIGKILL"
    assert kept.events == [f"{what} {life}" for life in (1, 2, 3) for what in ("start", "end")]
    assert await kept.supervisor.stop(never()) == []


async def test_a_restart_that_does_not_get_ready_is_killed_and_tried_again() -> None:
    kept = Kept(["say one", "kill"], ["wait"], max_in_row=2, start_s=0.0)
    await kept.supervisor.start()
    await eventually(lambda: kept.given_up)
    assert str(kept.given_up[0]) == "the puppet died 3 times in a row: killed by SIGKILL"
    assert kept.events == [f"{what} {life}" for life in (1, 2, 3) for what in ("start", "end")]
    assert await kept.supervisor.stop(never()) == []


async def test_a_stop_during_a_pause_starts_nothing_more() -> None:
    kept = Kept(["say one", "kill"], first_pause_s=3600.0)
    await kept.supervisor.start()
    await eventually(lambda: kept.events[-1] == "end 2")
    assert await kept.supervisor.stop(never()) == []
    assert kept.events == ["start 1", "end 1", "start 2", "end 2"]


async def test_a_deaf_process_is_killed_and_named() -> None:
    kept = Kept(["deaf", "say one", "wait"])
    await kept.supervisor.start()
    force_stop = never()
    force_stop.set_result(None)
    assert await kept.supervisor.stop(force_stop) == ["the puppet did not stop and was killed"]
