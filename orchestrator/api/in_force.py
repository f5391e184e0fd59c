"""Waiting until what the operator wants is in force on every engine that lives."""

from collections.abc import Callable, Sequence

from engine.wire.control import ClusterSettings
from engine.wire.states import EnginePhase, EngineState
from lb.views.engine_view import EngineView
from orchestrator.api.polling import wait_until_none


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
    is_loading = view.report is None or view.report.phase is EnginePhase.LOADING
    return view.state is EngineState.DEAD or (view.state is EngineState.LOADING and is_loading)


def _shown(view: EngineView) -> int:
    return -1 if view.report is None else view.report.settings_seq
