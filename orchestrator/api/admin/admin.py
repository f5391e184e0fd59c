"""The admin calls: change what the operator wants, call a method on every rank, end requests, place experts anew.

No HTTP in here but its errors.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from engine.wire.codec import encode
from engine.wire.control import ClusterSettings
from engine.wire.errors import UtilityError, UtilityErrorCode
from engine.wire.ids import EngineId, name_ranks
from engine.wire.states import EngineState
from lb.coordinator.expert_placement import num_moved
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView
from orchestrator.api.base.errors import AdminError, ApiError
from orchestrator.api.base.waits import ranks_behind, wait_in_force, wait_until_none
from orchestrator.control.client import ControlClient
from orchestrator.control.messages import (
    AbortRequests,
    Cordon,
    GetSettings,
    Pause,
    Rebalance,
    Resume,
    SettingsChange,
    Sleep,
    WakeUp,
)

_CALL_S = 10.0
"""The supervisor answers in milliseconds; one that takes longer hangs."""

# What a later call of another kind may take back before every rank shows it.
_EXCLUSIVE_FIELDS = {Pause: "pause", Resume: "pause", Sleep: "sleep_level", WakeUp: "sleep_level"}


class MembersClient(Protocol):
    """The part of the engines' client that placing experts needs."""

    def engine_views(self) -> list[EngineView]:
        """Return what is known of every engine, one per rank."""

    def group_view(self) -> GroupView | None:
        """Return what is known of the lockstep group; None for independent ranks."""


class RankClient(MembersClient, Protocol):
    """The part of the engines' client that admin calls need."""

    @property
    def settings(self) -> ClusterSettings:
        """Return the newest settings that were published."""

    async def call_ranks_async(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> dict[int, Any]:
        """Call a method of every engine; return rank -> result, or raise ``UtilityError``."""


class Admin:
    """Carries out admin calls for one API process; safe with several, because the supervisor alone decides."""

    def __init__(self, client: RankClient, control: ControlClient) -> None:
        self._client = client
        self._control = control

    async def settings(self) -> ClusterSettings:
        """Return what the operator wants now, from the supervisor."""
        return msgspec.convert(await self._control.call(GetSettings(), _CALL_S), ClusterSettings)

    @property
    def known_settings(self) -> ClusterSettings:
        """Return the newest settings that were published to this process."""
        return self._client.settings

    def ranks_behind(self, settings: ClusterSettings) -> list[int]:
        """Return the living ranks on which these settings are not in force yet."""
        return ranks_behind(self._client.engine_views(), settings.seq)

    async def change(self, change: SettingsChange, timeout_s: float) -> ClusterSettings:
        """Change what the operator wants, and return once that is in force on every living engine.

        Raises:
            ControlError: the supervisor refused it, or did not answer.
            ApiError: 504 names the ranks where it is not in force in time, and it stays wanted; 409 another call took
                it back meanwhile.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        settings = msgspec.convert(await self._control.call(change, min(timeout_s, _CALL_S)), ClusterSettings)
        behind = await wait_in_force(
            self._client.engine_views, settings, deadline, lambda: not self._is_superseded(change, settings)
        )
        if self._is_superseded(change, settings):
            raise ApiError(409, "another admin call changed that meanwhile", code="superseded")
        if behind:
            message = (
                f"not in force within {timeout_s:g} s on {name_ranks(behind)}; it stays wanted, and comes into force "
                "there as soon as it can"
            )
            answer = {"settings_seq": settings.seq, "ranks_behind": behind}
            raise AdminError(504, message, answer, code="not_in_force")
        return settings

    async def drain(self, rank: int, timeout_s: float) -> dict[str, Any]:
        """Cordon a rank and return once it has no sequence left.

        Raises:
            ApiError: 504 when it still has some by then; it stays cordoned. Else as ``change``.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        await self.change(Cordon(rank, is_on=True), timeout_s)
        at_start = self._num_sequences(rank)
        remaining = await wait_until_none(lambda: self._num_sequences(rank), deadline)
        progress = {"rank": rank, "sequences_at_start": at_start, "sequences_left": remaining}
        if remaining:
            message = f"rank {rank} still has {remaining} of {at_start} sequences after {timeout_s:g} s; it is cordoned"
            raise AdminError(504, message, progress, code="not_drained")
        return progress

    async def rebalance(self, timeout_s: float) -> dict[str, Any]:
        """Place the experts of a lockstep group anew; see the function ``rebalance``."""
        return await rebalance(self._client, lambda left_s: self.change(Rebalance(), left_s), timeout_s)

    async def call_ranks(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float
    ) -> dict[int, Any]:
        """Run one registered method on every rank; return rank -> result.

        Raises:
            ApiError: 400 no such method, or arguments that cannot travel; 500 it failed somewhere, 504 a rank did not
                answer in time: both hold every rank's result or reason.
        """
        call = (method, timeout_s, list(args), dict(kwargs))
        try:
            encode(call)
        except TypeError as error:
            raise ApiError(400, f"an argument of {method}: {error}", param="args", code="cannot_travel") from error
        try:
            return await self._client.call_ranks_async("collective_rpc", call, timeout_s)
        except UtilityError as error:
            raise _to_answer(method, error) from error

    async def abort(self, names: list[str] | None) -> dict[str, Any]:
        """End requests wherever they are; return what was ended, and what no API process had.

        Raises:
            ApiError: 500 when an API process did not answer; the others' requests have ended.
        """
        outcome = await self._control.call(AbortRequests(names), _CALL_S)
        ended = sorted({name for found in outcome["aborted"].values() for name in found})
        missing = sorted(set(names or ()).difference(ended))
        answer = {"aborted": ended, "not_found": missing, "failures": outcome["failures"]}
        if outcome["failures"]:
            message = f"these API processes did not answer: {', '.join(sorted(outcome['failures']))}"
            raise AdminError(500, message, answer, code="partial_failure")
        return answer

    def _is_superseded(self, change: SettingsChange, settings: ClusterSettings) -> bool:
        field = _EXCLUSIVE_FIELDS.get(type(change))
        newest = self._client.settings
        return field is not None and newest.seq > settings.seq and getattr(newest, field) != getattr(settings, field)

    def _num_sequences(self, rank: int) -> int:
        return sum(
            view.report.load.num_sequences
            for view in self._client.engine_views()
            if view.engine_id.rank == rank and view.report is not None and view.state is not EngineState.DEAD
        )


def _to_answer(method: str, error: UtilityError) -> ApiError:
    codes = set(error.codes.values())
    if not error.results and codes == {UtilityErrorCode.UNKNOWN_METHOD}:
        return ApiError(400, next(iter(error.failures.values())), param="method", code="unknown_method")
    status = 504 if UtilityErrorCode.NO_ANSWER in codes else 500
    answer = {"results": by_rank(error.results), "failures": by_rank(error.failures)}
    message = f"{method} failed on {name_ranks(sorted(error.failures))}"
    return AdminError(status, message, answer, code="partial_failure")


def by_rank(values: Mapping[int, Any]) -> dict[str, Any]:
    """Return values by rank as JSON has them."""
    return {str(rank): values[rank] for rank in sorted(values)}


# --- placing experts anew ---------------------------------------------------------------------------------------------


async def rebalance(
    client: MembersClient, request: Callable[[float], Awaitable[object]], timeout_s: float
) -> dict[str, Any]:
    """Let the experts be placed by how often each was chosen; return once all members step in the new epoch.

    request: makes it wanted, within so many seconds.

    Raises:
        ApiError: 409 there is no group; 504 names the members that do not step in it in time; it stays wanted.
        ControlError: the supervisor refused it, or did not answer.
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
    assert after is not None, "without a group every rank is behind"
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
