"""Placing a lockstep group's experts anew, and waiting until every member steps with them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from engine.wire.ids import EngineId, name_ranks
from lb.coordinator.expert_placement import num_moved
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView
from orchestrator.api.errors import AdminError, ApiError
from orchestrator.api.polling import wait_until_none


class MembersClient(Protocol):
    """What is needed of the client of the engines."""

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every engine, one per rank."""

    def group_view(self) -> GroupView | None:
        """Return what is known of the lockstep group; None for independent ranks."""


async def rebalance(
    client: MembersClient, request: Callable[[float], Awaitable[object]], timeout_s: float
) -> dict[str, Any]:
    """Let the experts be placed by how often each was chosen; return once all members step in the new epoch.

    request: makes it wanted, within so many seconds.

    Raises:
        ApiError: 409 there is no group; 504 names the members that do not step in it in time; it stays wanted.
        ControlError: the supervisor said no, or nothing.
    """
    before = client.group_view()
    if before is None or not before.epoch:
        message = (
            "no lockstep group is formed here, so there are no experts to place: ranks are independent unless they are "
            "started with --enable-expert-parallel"
        )
        raise ApiError(409, message, code="no_group")
    deadline = asyncio.get_running_loop().time() + timeout_s
    await request(timeout_s)
    behind = await wait_until_none(
        lambda: members_behind(client.group_view(), client.engine_views(), before.epoch), deadline
    )
    if behind:
        message = f"no new placement is in force within {timeout_s:g} s on {name_ranks(behind)}; it stays wanted"
        raise AdminError(504, message, {"epoch": before.epoch, "ranks_behind": behind}, code="not_in_force")
    after = client.group_view()
    assert after is not None, "nobody is behind a group"
    return {
        "status": "rebalanced",
        "epoch": after.epoch,
        "experts_moved": _num_moved(before, after),
        "experts": {str(member.rank): list(held) for member, held in after.placement.items()},
    }


def members_behind(group: GroupView | None, views: Sequence[EngineView], epoch: int) -> list[int]:
    """Return the members of a group, by rank, that do not step in an epoch above ``epoch`` that is in force; pure."""
    if group is None:
        return [view.engine_id.rank for view in views]
    steps_in = {view.engine_id: 0 if view.report is None else view.report.epoch for view in views}
    is_new = group.epoch > epoch
    return [member.rank for member in group.placement if not (is_new and steps_in.get(member, 0) == group.epoch)]


def _num_moved(before: GroupView, after: GroupView) -> int:
    def held(group: GroupView, member: EngineId) -> Sequence[int]:
        return group.placement.get(member, ())

    members = list(after.placement)
    return num_moved([held(before, member) for member in members], [list(held(after, member)) for member in members])
