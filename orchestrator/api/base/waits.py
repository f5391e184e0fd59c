"""Waits for what engines report: settings that come into force, engines that are reached.

What is waited for arrives with reports, and nothing announces it, so these look again and again.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from engine.wire.control import ClusterSettings
from engine.wire.states import EnginePhase, EngineState, ReplicaState
from lb.views.engine_view import EngineView

_PAUSE_S = 0.02  # reports come a few times a second, and a look costs microseconds

Rest = TypeVar("Rest")


async def wait_until_none(
    observe: Callable[[], Rest], deadline: float, is_wanted: Callable[[], bool] = lambda: True
) -> Rest:
    """Observe until nothing is left to wait for, or it is too late; return what was observed last.

    observe: falsy once nothing is left; called once at least. deadline: by the loop's clock, seconds. is_wanted: false
    ends the wait early.
    """
    loop = asyncio.get_running_loop()
    while (left := observe()) and is_wanted() and loop.time() < deadline:  # noqa: ASYNC110 - nothing sets an event
        await asyncio.sleep(_PAUSE_S)
    return left


# --- settings -------------------------------------------------------------------------------------------------------


def ranks_behind(views: Sequence[EngineView], settings_seq: int) -> list[int]:
    """Return the ranks whose engine lives and does not show these settings yet; pure.

    One that loads is not waited for: it applies them before it takes its first request.
    """
    return [view.engine_id.rank for view in views if not _is_dead_or_loading(view) and _shown(view) < settings_seq]


async def wait_in_force(
    views: Callable[[], Sequence[EngineView]],
    settings: ClusterSettings,
    deadline: float,
    is_wanted: Callable[[], bool],
) -> list[int]:
    """Wait until every living engine shows the settings; return the ranks that do not when it is too late.

    deadline: by the loop's clock, seconds. is_wanted: false ends the wait early, with the ranks that are behind then.
    """
    return await wait_until_none(lambda: ranks_behind(views(), settings.seq), deadline, is_wanted)


def _is_dead_or_loading(view: EngineView) -> bool:
    # LOADING of a view only says that no handshake has come here; the engine may serve other API processes already.
    is_loading = view.report is None or view.report.phase is EnginePhase.LOADING
    return view.state is EngineState.DEAD or (view.state is EngineState.LOADING and is_loading)


def _shown(view: EngineView) -> int:
    return -1 if view.report is None else view.report.settings_seq


# --- reach ----------------------------------------------------------------------------------------------------------


def any_is_loading(views: Sequence[EngineView]) -> bool:
    """Tell whether the handshake of some engine is missing, or none is known at all; pure."""
    return not views or any(view.state is EngineState.LOADING for view in views)


def reaches_all(views: Sequence[EngineView]) -> bool:
    """Tell whether some engine is ready, and no handshake is missing of those the supervisor reports alive; pure."""
    return any(view.state is EngineState.READY for view in views) and not any(map(_is_missing, views))


async def wait_reaches_all(
    engine_views: Callable[[], Sequence[EngineView]], timeout_s: float, stop: asyncio.Event
) -> None:
    """Wait until every serving engine is reached, the time is over or ``stop`` is set.

    For a restarted API process: its siblings serve meanwhile, and its first callers must not find half the ranks.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    await wait_until_none(lambda: not reaches_all(engine_views()), deadline, lambda: not stop.is_set())


def _is_missing(view: EngineView) -> bool:
    return view.state is EngineState.LOADING and view.replica is not None and view.replica.state is ReplicaState.ALIVE
