"""When experts count as placed anew, and what is said when they are not."""

import pytest
from msgspec.structs import replace

from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.states import EnginePhase, EngineState
from lb.views.engine_view import EngineView
from lb.views.group_view import GroupView
from orchestrator.api.admin.admin import members_behind, rebalance
from orchestrator.api.base.errors import AdminError, ApiError

MEMBERS = (EngineId(0, 1), EngineId(2, 3))
REPORT = EngineReport(MEMBERS[0], 1, 0, 0, 0, 0, EnginePhase.RUNNING, 0, True, {}, Load())


def group(epoch: int, *held: list[int]) -> GroupView:
    return GroupView(epoch=epoch, wave=1, placement=dict(zip(MEMBERS, held, strict=True)))


def views(*epochs: int) -> list[EngineView]:
    return [
        EngineView(
            engine_id=engine_id, state=EngineState.READY, report=replace(REPORT, engine_id=engine_id, epoch=epoch)
        )
        for engine_id, epoch in zip(MEMBERS, epochs, strict=True)
    ]


class Client:
    """A client that sees one thing until the request is made, and then the others, one at each look."""

    def __init__(self, *seen: tuple[GroupView | None, list[EngineView]]) -> None:
        self._seen = list(seen)

    async def wish(self, timeout_s: float) -> None:
        del self._seen[0]

    def group_view(self) -> GroupView | None:
        return self._seen[0][0]

    def engine_views(self) -> list[EngineView]:
        _, now = self._seen[0]
        if len(self._seen) > 1:
            del self._seen[0]
        return now


async def test_it_returns_when_every_member_steps_in_the_new_epoch() -> None:
    before, after = group(3, [0, 1], [2, 3]), group(4, [0, 2], [1, 3])
    client = Client((before, views(3, 3)), (before, views(3, 3)), (after, views(4, 3)), (after, views(4, 4)))
    assert await rebalance(client, client.wish, 10.0) == {
        "status": "rebalanced",
        "epoch": 4,
        "experts_moved": 2,
        "experts": {"0": [0, 2], "2": [1, 3]},
    }


async def test_members_that_do_not_follow_in_time_are_named() -> None:
    before, after = group(3, [0, 1], [2, 3]), group(4, [0, 2], [1, 3])
    client = Client((before, views(3, 3)), (after, views(4, 3)))
    with pytest.raises(AdminError, match=r"on rank 2; it stays wanted") as late:
        await rebalance(client, client.wish, 0.0)
    assert late.value.status == 504


@pytest.mark.parametrize("seen", [None, group(0, [], [])], ids=["independent", "not formed"])
async def test_without_a_group_there_is_nothing_to_place(seen: GroupView | None) -> None:
    client = Client((seen, []))
    with pytest.raises(ApiError, match="--enable-expert-parallel") as refused:
        await rebalance(client, client.wish, 10.0)
    assert refused.value.status == 409


@pytest.mark.parametrize(
    ("epoch", "stepping", "behind"),
    [(3, (3, 3), [0, 2]), (4, (3, 4), [0]), (4, (4, 4), []), (5, (4, 5), [0])],
)
def test_a_member_is_behind_until_it_steps_in_the_epoch_in_force(
    epoch: int, stepping: tuple[int, int], behind: list[int]
) -> None:
    assert members_behind(group(epoch, [0], [1]), views(*stepping), epoch=3) == behind
