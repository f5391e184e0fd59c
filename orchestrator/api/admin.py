"""What admin calls do: change what the operator wants, ask every rank, end requests. No HTTP in here but its errors."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from client.calls import NO_ANSWER
from engine.wire.codec import encode
from engine.wire.control import ClusterSettings
from engine.wire.errors import UnknownMethodError, UtilityError
from engine.wire.ids import name_ranks
from engine.wire.states import EngineState
from orchestrator.api.errors import AdminError, ApiError
from orchestrator.api.in_force import ranks_behind, wait_in_force
from orchestrator.api.polling import wait_until_none
from orchestrator.api.rebalance import MembersClient, rebalance
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
"""The supervisor answers in milliseconds; who waits longer waits for one that hangs."""

_EXCLUSIVE_FIELDS = {Pause: "pause", Resume: "pause", Sleep: "sleep_level", WakeUp: "sleep_level"}


class RankClient(MembersClient, Protocol):
    """What is needed of the client of the engines."""

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
        """Return what the operator wants now, as the supervisor says."""
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
            ControlError: the supervisor said no, or nothing.
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
        """Place the experts of a lockstep group anew; see ``orchestrator.api.rebalance``."""
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
        """End requests wherever they are; return what was ended, and what nobody had.

        Raises:
            ApiError: 500 when an API process did not answer; the others' requests have ended.
        """
        said = await self._control.call(AbortRequests(names), _CALL_S)
        ended = sorted({name for found in said["aborted"].values() for name in found})
        missing = sorted(set(names or ()).difference(ended))
        answer = {"aborted": ended, "not_found": missing, "failures": said["failures"]}
        if said["failures"]:
            message = f"these API processes did not answer: {', '.join(sorted(said['failures']))}"
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
    unknown = f"{UnknownMethodError.__name__}: "
    reasons = list(error.failures.values())
    if not error.results and all(reason.startswith(unknown) for reason in reasons):
        return ApiError(400, reasons[0].removeprefix(unknown), param="method", code="unknown_method")
    status = 504 if any(reason.startswith(NO_ANSWER) for reason in reasons) else 500
    answer = {"results": by_rank(error.results), "failures": by_rank(error.failures)}
    message = f"{method} failed on {name_ranks(sorted(error.failures))}"
    return AdminError(status, message, answer, code="partial_failure")


def by_rank(values: Mapping[int, Any]) -> dict[str, Any]:
    """Return values by rank as JSON has them."""
    return {str(rank): values[rank] for rank in sorted(values)}
