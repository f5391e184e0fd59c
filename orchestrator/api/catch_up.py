"""Which engines an API process has yet to reach; a restarted one waits for them, as its siblings serve meanwhile."""

import asyncio
from collections.abc import Callable, Sequence

from engine.wire.states import EngineState, ReplicaState
from lb.views.engine_view import EngineView
from orchestrator.api.polling import wait_until_none


def any_is_loading(views: Sequence[EngineView]) -> bool:
    """Tell whether some engine has not shaken hands yet, or none is known at all."""
    return not views or any(view.state is EngineState.LOADING for view in views)


def reaches_all(views: Sequence[EngineView]) -> bool:
    """Tell whether some engine is ready and every one that serves, as the supervisor says, has shaken hands."""
    return any(view.state is EngineState.READY for view in views) and not any(map(_is_missing, views))


async def wait_reaches_all(
    engine_views: Callable[[], Sequence[EngineView]], timeout_s: float, stop: asyncio.Event
) -> None:
    """Wait until every serving engine is reached, the time is over or ``stop`` is set."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    await wait_until_none(lambda: not reaches_all(engine_views()), deadline, lambda: not stop.is_set())


def _is_missing(view: EngineView) -> bool:
    return view.state is EngineState.LOADING and view.replica is not None and view.replica.state is ReplicaState.ALIVE
