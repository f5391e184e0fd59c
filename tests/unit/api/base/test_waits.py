"""Who is waited for when the operator wants something, and for how long."""

import asyncio
from typing import Any

import pytest

from engine.wire.control import ClusterSettings
from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.states import EnginePhase, EngineState
from lb.views.engine_view import EngineView
from orchestrator.api.base.waits import ranks_behind, wait_in_force


def view(rank: int, settings_seq: int | None, state: EngineState = EngineState.READY, **report: Any) -> EngineView:
    engine_id = EngineId(rank, 1)
    phase = report.get("phase", EnginePhase.IDLE)
    said = EngineReport(engine_id, 1, 0, 0, 0, 0, phase, 0, False, {}, Load(), settings_seq=settings_seq or 0)
    return EngineView(engine_id=engine_id, state=state, report=None if settings_seq is None else said)


def test_who_shows_older_settings_or_has_not_reported_is_behind() -> None:
    views = [view(0, 3), view(1, 2), view(2, None), view(3, 4), view(4, 2, EngineState.LEAVING)]
    assert ranks_behind(views, 3) == [1, 2, 4]


def test_the_dead_and_those_that_load_are_not_waited_for() -> None:
    views = [
        view(0, 1, EngineState.DEAD),
        view(1, None, EngineState.LOADING),
        view(2, 0, EngineState.LOADING, phase=EnginePhase.LOADING),
    ]
    assert ranks_behind(views, 3) == []


def test_one_that_serves_but_has_not_shaken_hands_here_is_waited_for() -> None:
    assert ranks_behind([view(1, 2, EngineState.LOADING)], 3) == [1]


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_the_wait_ends_when_the_last_rank_shows_it() -> None:
    seen: list[int] = []

    def views() -> list[EngineView]:
        seen.append(len(seen))
        return [view(0, min(3, len(seen)))]

    assert await wait_in_force(views, ClusterSettings(3), _in(10.0), lambda: True) == []
    assert len(seen) == 3


@pytest.mark.parametrize(("timeout_s", "is_wanted"), [(0.0, True), (60.0, False)])
async def test_the_wait_ends_with_its_time_or_when_nobody_wants_it(timeout_s: float, is_wanted: bool) -> None:
    assert await wait_in_force(lambda: [view(7, 1)], ClusterSettings(2), _in(timeout_s), lambda: is_wanted) == [7]
