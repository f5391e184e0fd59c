"""Scale operations carried out: the real scaler and replicas on a host whose engines do what the test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.states import EnginePhase
from orchestrator.processes.exits import ProcessExit
from orchestrator.processes.restarts import RestartRule
from orchestrator.ranks.replica_table import Replica
from orchestrator.scaling.operation import ScaleOperation
from orchestrator.scaling.operations import ScaleOperations
from orchestrator.scaling.plan import RefusalKind, ScaleLimits, ScaleRefusedError, ScaleRequest
from orchestrator.scaling.scaler import Scaler
from orchestrator.scaling.steps import Phase, ScaleDeadlines
from tests.contract.deployment import eventually
from tests.unit.ranks.puppet_host import PuppetHost, make_group
from tests.unit.ranks.reports import report

SHORT = ScaleDeadlines(load_s=0.2, handshake_s=0.2, migrate_s=0.2, stop_s=0.1)


class Stage:
    """A deployment of puppets. Its engines follow the published state at once."""

    def __init__(self, num_ranks: int) -> None:
        self.host = PuppetHost()
        self.host.may_reserve.set()
        self.group = make_group(self.host, num_ranks, RestartRule(max_in_row=3))
        self.left: list[int] = []
        self.unreachable: set[int] = set()
        operations = ScaleOperations(ScaleLimits(), SHORT)
        self.scaler = Scaler(self.group, self.host, operations, self._reached, self.left.append)
        self.stuck: set[int] = set()
        self._seq = 0

    async def obey(self) -> None:
        """Be all engines: load, turn away, hand back, and end when dismissed."""
        while True:
            await asyncio.sleep(0.005)
            for replica in list(self.group.replicas):
                if replica.exit is None and replica.engine_id.rank not in self.stuck:
                    self._obey(replica)

    def _obey(self, replica: Replica) -> None:
        handle = self.host.handles.get(replica.engine_id)
        if handle is None or handle.exited.done():
            return
        if replica.dismissed:
            self.host.end(replica.engine_id, ProcessExit(0, "exit status 0"))
            return
        self._seq += 1
        load = Load(num_running=0 if replica.is_migrating else 3)
        said = report(replica.engine_id, self._seq, EnginePhase.RUNNING)
        self.group.replicas.on_report(replace(said, is_draining=replica.is_draining, load=load), 0.0)

    async def _reached(self) -> set[EngineId]:
        return {replica.engine_id for replica in self.group.replicas if replica.engine_id.rank not in self.unreachable}

    @property
    def ranks(self) -> list[int]:
        return [replica.engine_id.rank for replica in self.group.replicas]

    async def scale(self, *, key: str | None = None, **request: object) -> ScaleOperation:
        return await self.scaler.begin(ScaleRequest(**request), key)  # type: ignore[arg-type]

    async def finish(self, operation: ScaleOperation) -> Phase:
        await eventually(lambda: operation.is_over)
        return operation.phase

    def assert_serves(self, *ranks: int) -> None:
        """Check that exactly these ranks are there, each like any other, and nothing else is held."""
        assert self.ranks == list(ranks)
        assert all(replica.is_ready and not replica.is_temporary for replica in self.group.replicas)
        living = {handle.engine_id.rank for handle in self.host.handles.values() if not handle.exited.done()}
        assert living == set(ranks)
        assert self.host.reserved <= set(ranks)


@asynccontextmanager
async def stage(num_ranks: int = 2) -> AsyncIterator[Stage]:
    built = Stage(num_ranks)
    await built.group.start()
    built.group.start_replacing()
    engines = asyncio.create_task(built.obey())
    await eventually(lambda: built.group.replicas.all_ready)
    try:
        yield built
    finally:
        force_stop = asyncio.get_running_loop().create_future()
        await built.scaler.stop(force_stop)
        await built.group.stop(force_stop)
        engines.cancel()
        await asyncio.gather(engines, return_exceptions=True)


async def test_ranks_come_and_go_and_come_again_under_their_next_incarnation() -> None:
    async with stage() as deployment:
        assert await deployment.finish(await deployment.scale(size=4)) is Phase.DONE
        deployment.assert_serves(0, 1, 2, 3)
        assert deployment.host.reserved == {2, 3}
        assert await deployment.finish(await deployment.scale(remove=(0, 3), drain_timeout_s=0.0)) is Phase.DONE
        deployment.assert_serves(1, 2)
        assert deployment.left == [0, 3]
        assert await deployment.finish(await deployment.scale(size=3)) is Phase.DONE
        assert [replica.engine_id for replica in deployment.group.replicas if replica.engine_id.rank == 0] == [
            EngineId(0, 2)
        ]
        assert deployment.host.handles[EngineId(0, 2)]


async def test_the_same_key_returns_the_same_operation_and_a_competitor_is_refused() -> None:
    async with stage() as deployment:
        deployment.host.may_reserve.clear()
        first = await deployment.scale(size=3, key="k")
        assert await deployment.scale(size=3, key="k") is first
        with pytest.raises(ScaleRefusedError, match=f"operation {first.id} is running") as refused:
            await deployment.scale(size=4)
        assert refused.value.kind is RefusalKind.CONFLICT
        deployment.host.may_reserve.set()
        assert await deployment.finish(first) is Phase.DONE
        assert await deployment.scale(size=3, key="k") is first


async def test_what_does_not_fit_is_refused_before_anything_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.scaling.scaler._FREE_S", 0.0)
    async with stage() as deployment:
        deployment.host.num_free = 1
        with pytest.raises(
            ScaleRefusedError, match="2 more ranks do not fit, 1 would: each rank needs 1 CPU"
        ) as refused:
            await deployment.scale(size=4)
        assert (refused.value.kind, refused.value.field) == (RefusalKind.NO_CAPACITY, "size")
        assert deployment.scaler.operations.all() == []
        deployment.assert_serves(0, 1)


@pytest.mark.parametrize("fault", ["no place", "no start", "dies", "never ready", "never reached"])
async def test_a_fault_on_the_way_leaves_the_old_size_and_the_next_scale_works(fault: str) -> None:
    async with stage() as deployment:
        host = deployment.host
        if fault == "no place":
            host.refusal = "needs 1 CPU"
        if fault == "no start":
            host.refusals = [OSError("no process")]
        if fault in ("dies", "never ready"):
            deployment.stuck = {2, 3}
        if fault == "never reached":
            deployment.unreachable = {3}
        operation = await deployment.scale(size=4)
        if fault == "dies":
            await eventually(lambda: EngineId(3, 1) in host.handles)
            host.end(EngineId(3, 1))
        assert await deployment.finish(operation) is Phase.FAILED
        deployment.assert_serves(0, 1)
        assert not host.reserved
        host.refusal, deployment.stuck, deployment.unreachable = "", set(), set()
        assert await deployment.finish(await deployment.scale(size=3)) is Phase.DONE
        deployment.assert_serves(0, 1, 2)


@pytest.mark.parametrize("phase", [Phase.RESERVE, Phase.LOAD, Phase.HANDSHAKE, Phase.DRAIN, Phase.MIGRATE])
async def test_a_cancel_in_any_phase_leaves_the_old_size(phase: Phase) -> None:
    async with stage() as deployment:
        if phase is Phase.RESERVE:
            deployment.host.may_reserve.clear()
        if phase is Phase.LOAD:
            deployment.stuck = {2}
        if phase is Phase.HANDSHAKE:
            deployment.unreachable = {2}
        drain_s = 60.0 if phase is Phase.DRAIN else 0.0
        deployment.stuck |= {0} if phase is Phase.MIGRATE else set()
        operation = await deployment.scale(size=2, remove=(0,), drain_timeout_s=drain_s)
        await eventually(lambda: operation.phase is phase)
        operation.cancel()
        assert await deployment.finish(operation) is Phase.CANCELLED
        deployment.assert_serves(0, 1)
        assert not deployment.host.reserved
        deployment.stuck = set()


async def test_a_leaving_rank_that_dies_while_it_drains_is_replaced_when_the_scale_is_cancelled() -> None:
    async with stage() as deployment:
        operation = await deployment.scale(remove=(1,))
        await eventually(lambda: operation.phase is Phase.DRAIN)
        deployment.stuck = {0}
        deployment.host.end(EngineId(0, 1))
        await eventually(lambda: deployment.group.replicas.at(0).engine_id == EngineId(0, 2))  # type: ignore[union-attr]
        deployment.host.end(EngineId(1, 1))  # nobody else serves now: it waits until rank 0 does again
        await eventually(lambda: operation.blocking_ranks == (0,))
        operation.cancel()
        assert await deployment.finish(operation) is Phase.CANCELLED
        deployment.stuck = set()
        await eventually(lambda: deployment.group.replicas.all_ready)
        deployment.assert_serves(0, 1)


async def test_an_engine_that_does_not_go_is_killed() -> None:
    async with stage() as deployment:
        deployment.stuck = {1}
        operation = await deployment.scale(remove=(1,), drain_timeout_s=0.0)
        assert await deployment.finish(operation) is Phase.DONE
        assert deployment.host.killed == [EngineId(1, 1)]
        deployment.assert_serves(0)


async def test_the_end_of_the_deployment_lets_go_of_an_operation() -> None:
    async with stage() as deployment:
        deployment.host.may_reserve.clear()
        await deployment.scale(size=3)
    with pytest.raises(ScaleRefusedError, match="stopping"):
        await deployment.scale(size=3)
