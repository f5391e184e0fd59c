"""What happens to calls and sequences when an engine comes, dies or leaves; one engine, and many."""

from collections import Counter

import pytest

from client.calls import UtilityCalls
from client.connection_table import Change, Closed, ConnectionTable
from client.mailbox import PendingResults
from client.migration import MigrationConfig
from client.routing import BalancedRouting, Routing, SingleEngineRouting
from engine.wire.drop_counter import DropCounter
from engine.wire.errors import EngineDeadError, InvalidRequestError, OverloadedError
from engine.wire.ids import EngineId
from engine.wire.messages import EngineCoreOutput, FinishReason
from tests.unit.client.builders import CLIENT, RecordingSender, make_add, make_batch, make_ready

E0, E1 = EngineId(0, 1), EngineId(1, 1)


class Parts:
    """What a client of so many engines gives its routing, and what a client does with changes of its table."""

    def __init__(self, num_ranks: int, *, single: bool = False, engines_are_replaced: bool = True) -> None:
        self.sender = RecordingSender()
        self.counts: Counter[str] = Counter()
        self.engines = ConnectionTable(None, self.counts, DropCounter())
        self.results = PendingResults(UtilityCalls(CLIENT, self.sender))
        self.routing: Routing = (
            SingleEngineRouting(CLIENT, self.engines, self.sender, self.results)
            if single
            else BalancedRouting(
                CLIENT,
                self.engines,
                self.sender,
                self.results,
                self.counts,
                MigrationConfig(suspect_rest_s=0.0),
                engines_are_replaced=engines_are_replaced,
            )
        )
        for rank in range(num_ranks):
            self.open(rank)

    def open(self, rank: int, incarnation: int = 1) -> None:
        """Let an engine shake hands."""
        self._act(self.engines.on_ready(make_ready(rank, incarnation), 0.0))
        self.routing.on_opened(self.engines.connections[EngineId(rank, incarnation)])

    def kill(self, engine_id: EngineId) -> None:
        """Let an engine die."""
        self._act(self.engines.on_gone(engine_id, "killed"))
        self.routing.settle()

    async def ends(self) -> list[EngineCoreOutput]:
        """Return the ends that were made here."""
        outputs: list[EngineCoreOutput] = []
        while len(self.results.outputs):
            outputs += (await self.results.outputs.get()).outputs
        return outputs

    def _act(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Closed):
                self.routing.on_closed(change)


async def test_the_end_of_the_one_engine_is_the_end_of_everything() -> None:
    parts = Parts(1, single=True)
    call = parts.results.calls.call(parts.engines.only(), "ping", [])
    parts.kill(E0)
    with pytest.raises(EngineDeadError, match="killed"):
        await call
    with pytest.raises(EngineDeadError, match="killed"):
        await parts.results.outputs.get()
    with pytest.raises(EngineDeadError, match="killed"):
        parts.results.ensure_open()


def test_one_engine_takes_everything_but_another_rank() -> None:
    parts = Parts(1, single=True)
    assert parts.routing.route(make_add(1), None) == parts.routing.route(make_add(2), 0) == E0
    with pytest.raises(InvalidRequestError, match="valid: 0"):
        parts.routing.route(make_add(3), 1)
    parts.sender.refusing.add(E0)
    with pytest.raises(OverloadedError):
        parts.routing.route(make_add(4), None)
    parts.routing.abort([1, 2])
    assert len(parts.sender.sent) == 2


async def test_a_death_among_several_ends_its_calls_and_moves_its_sequences() -> None:
    parts = Parts(2)
    requests = [make_add(request_id) for request_id in range(2)]
    assert [parts.routing.route(request, None) for request in requests] == [E0, E1]
    dying, living = (parts.results.calls.call(parts.engines.connections[e], "ping", []) for e in (E0, E1))
    parts.kill(E0)
    with pytest.raises(EngineDeadError, match=r"engine 0\.1: killed"):
        await dying
    assert not living.done()
    parts.results.ensure_open()
    assert parts.sender.added[-1][0] == E1
    assert parts.sender.added[-1][1].attempt == 1
    assert parts.counts["moves_death"] == 1
    living.cancel()


@pytest.mark.parametrize(("dismissed", "why"), [(False, "moves_death"), (True, "moves_planned")])
def test_an_engine_that_was_to_leave_has_died_unless_it_was_let_go(dismissed: bool, why: str) -> None:
    parts = Parts(2)
    parts.routing.route(make_add(1), 0)
    connection = parts.engines.connections[E0]
    connection.leaving, connection.dismissed = True, dismissed
    parts.kill(E0)
    assert parts.counts[why] == 1


async def test_where_engines_are_replaced_sequences_wait_for_the_next_one() -> None:
    parts = Parts(1)
    parts.routing.route(make_add(1), None)
    parts.kill(E0)
    assert await parts.ends() == []
    assert parts.routing.statistics()["waiting_to_move"] == 1
    parts.open(0, incarnation=2)
    parts.routing.settle()
    assert parts.sender.added[-1][0] == EngineId(0, 2)


async def test_where_none_is_replaced_the_last_engine_is_not_risked_and_then_all_end() -> None:
    parts = Parts(2, engines_are_replaced=False)
    innocent, suspect = make_add(1), make_add(2)
    for request in (innocent, suspect):
        parts.routing.route(request, 0)
    assert isinstance(parts.routing, BalancedRouting)
    token = EngineCoreOutput(1, 0, 0, 0, [5])
    parts.routing.dispatcher.on_outputs(make_batch(parts.engines.connections[E0], token))
    parts.kill(E0)
    (end,) = await parts.ends()
    assert (end.request_id, end.finish_reason) == (2, FinishReason.ERROR)
    assert "not tried on the last engine" in (end.error or "")
    parts.kill(E1)
    (end,) = await parts.ends()
    assert (end.request_id, "no engine is left" in (end.error or "")) == (1, True)


async def test_lost_outputs_fail_the_calls_they_may_have_answered_and_resume_what_they_may_have_spoken_of() -> None:
    parts = Parts(1)
    parts.routing.route(make_add(1), None)
    connection = parts.engines.only()
    call = parts.results.calls.call(connection, "ping", [])
    parts.routing.on_outputs_lost(connection, make_batch(connection, applied=1))
    parts.routing.settle()
    with pytest.raises(EngineDeadError, match="lost on their way"):
        await call
    assert parts.sender.aborted == [(1, 0, 0)]
    assert [request.attempt for _, request in parts.sender.added] == [0, 1]


def test_a_group_state_frees_the_engines_that_are_to_be_freed() -> None:
    parts = Parts(2)
    parts.routing.route(make_add(1), 0)
    connection = parts.engines.connections[E0]
    connection.leaving = True
    parts.routing.on_group_changed(1, [connection])
    parts.routing.settle()
    assert parts.sender.aborted == [(1, 0, 0)]
    assert parts.sender.added[-1][0] == E1


async def test_an_abort_of_what_waits_ends_it_at_once() -> None:
    parts = Parts(1)
    parts.routing.route(make_add(1), None)
    parts.kill(E0)
    parts.routing.abort([1])
    (end,) = await parts.ends()
    assert (end.request_id, end.finish_reason) == (1, FinishReason.ABORT)
