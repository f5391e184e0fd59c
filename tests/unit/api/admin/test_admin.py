"""The status of an admin call that failed on some ranks: by the codes of the failures, never by their texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from engine.wire.control import ClusterSettings
from engine.wire.errors import UtilityError, UtilityErrorCode
from engine.wire.ids import ClientId
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView
from orchestrator.api.admin.admin import Admin, RankClient
from orchestrator.api.base.errors import AdminError, ApiError
from orchestrator.control.client import ControlClient

MISLEADING = "UnknownMethodError: no answer within 1 s"


class FailingClient(RankClient):
    """Fails every call on some ranks with these codes."""

    def __init__(self, codes: Mapping[int, UtilityErrorCode], results: Mapping[int, Any]) -> None:
        self._codes = codes
        self._results = results

    @property
    def settings(self) -> ClusterSettings:
        return ClusterSettings()

    def engine_views(self) -> list[EngineView]:
        return []

    def group_view(self) -> GroupView | None:
        return None

    async def call_ranks_async(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> dict[int, Any]:
        raise UtilityError(method, dict.fromkeys(self._codes, MISLEADING), self._results, self._codes)


async def refusal(codes: Mapping[int, UtilityErrorCode], results: Mapping[int, Any]) -> ApiError:
    admin = Admin(FailingClient(codes, results), ControlClient(ClientId(0, 1), None, {}))
    with pytest.raises(ApiError) as caught:
        await admin.call_ranks("echo", (), {}, 1.0)
    return caught.value


async def test_a_method_that_no_rank_knows_is_the_callers_mistake() -> None:
    answer = await refusal(dict.fromkeys((0, 1), UtilityErrorCode.UNKNOWN_METHOD), {})
    assert (answer.status, answer.param, answer.code) == (400, "method", "unknown_method")


async def test_a_method_that_one_rank_knows_is_a_partial_failure() -> None:
    answer = await refusal({1: UtilityErrorCode.UNKNOWN_METHOD}, {0: 7})
    assert isinstance(answer, AdminError)
    assert (answer.status, answer.code) == (500, "partial_failure")
    assert answer.facts == {"results": {"0": 7}, "failures": {"1": MISLEADING}}


@pytest.mark.parametrize(
    ("code", "status"),
    [(UtilityErrorCode.NO_ANSWER, 504), (UtilityErrorCode.ENGINE_DEAD, 500), (UtilityErrorCode.FAILED, 500)],
)
async def test_a_rank_that_did_not_answer_in_time_is_a_timeout_and_one_that_failed_is_not(
    code: UtilityErrorCode, status: int
) -> None:
    assert (await refusal({0: UtilityErrorCode.FAILED, 1: code}, {})).status == status
