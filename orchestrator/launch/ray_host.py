"""The Ray host: engines in Ray actors, one placement group and one plain actor per rank."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine.config.engine_spec import EngineSpec
from engine.wire.ids import EngineId
from orchestrator.launch import ray_cluster
from orchestrator.launch.engine_actor import EngineActor, engine_mark, reap
from orchestrator.launch.host import Capacity, EngineHandle, Site
from orchestrator.launch.placement import count_placements, plan_placement
from orchestrator.launch.ray_placement_groups import RayPlacementGroups, amounts
from orchestrator.processes.child_process import NUM_LAST_LINES, LineSink
from orchestrator.processes.exits import ProcessExit

_FENCE_S = 1.0  # a node that does not answer for this long is out of reach; what is to be killed there counts as dead
_REACH_POLL_S = 0.5
_KILLED_S = 5.0  # what a killed process needs to be gone, driver and device included


async def open_ray_host(
    num_ranks: int,
    device: str,
    *,
    address: str | None,
    advertise_host: str | None,
    num_threads: int,
    run_dir: Path,
    on_line: LineSink,
    max_ranks: int = 1,
) -> Site:
    """Start or join Ray and reserve one placement group per rank.

    address: of a running cluster; None starts one inside ``run_dir``. max_ranks: how far the deployment may grow; a
    cluster of our own is made large enough for that.

    Raises:
        StartupError: no Ray, or not enough CPUs or GPUs in it. Nothing is left behind then.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(ray_cluster.leave_cluster)
        if address is None:
            ray_cluster.start_cluster(run_dir, max(num_ranks, max_ranks) * num_threads)
        else:
            await ray_cluster.join_cluster(address, on_line)
        plan = plan_placement(num_ranks, device, num_threads, ray_cluster.living_nodes())
        placement_groups = RayPlacementGroups(num_ranks, plan.bundle)
        undo.callback(placement_groups.release)
        await placement_groups.wait()
        if advertise_host is None and address is not None:
            advertise_host = ray_cluster.own_address()
        undo.pop_all()
    return Site(RayHost(placement_groups, on_line), device=plan.device, address=advertise_host)


@dataclass(slots=True, eq=False)
class _Engine:
    """One engine that is not known to have ended. killed: set once ``kill`` was called."""

    handle: EngineHandle
    mark: str
    node_id: str
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    following: asyncio.Task[None] | None = None


class RayHost:
    """An ``EngineHost`` on a Ray cluster that has been joined.

    A rank keeps its placement group for as long as the deployment lives, and its actor for as long as that lives: an
    actor whose engine ended runs the next one. Lines of an engine's log stay with Ray; the last ones are passed on when
    it ends.
    """

    def __init__(self, placement_groups: RayPlacementGroups, on_line: LineSink) -> None:
        """placement_groups: one for each of the first ranks; from now on this host's to give back."""
        self._placement_groups = placement_groups
        self._on_line = on_line
        self._actors: dict[int, Any] = {}  # by rank: those not known to be dead
        self._engines: dict[EngineId, _Engine] = {}
        self._cleanups: dict[int, asyncio.Task[None]] = {}  # by rank: done once nothing of its last engine is left

    def capacity(self) -> Capacity:
        """Return what fits on each node beside all that is reserved there."""
        bundle = self._placement_groups.bundle
        free, in_all = ray_cluster.free_on_nodes(), ray_cluster.free_resources()
        text = f"each rank needs {amounts(bundle)}; the Ray cluster has {amounts(in_all)} free on {len(free)} node(s)"
        return Capacity(count_placements(bundle, free), text, {name: in_all.get(name, 0.0) for name in ("CPU", "GPU")})

    async def reserve(self, rank: int) -> None:
        """Make one more placement group.

        Raises:
            StartupError: it finds no place soon.
        """
        await self._placement_groups.add(rank)

    async def release(self, rank: int) -> None:
        """End a rank's actor, see to it that nothing of its engine is left, and remove its placement group."""
        self._kill_actor(rank)
        cleanup = self._cleanups.pop(rank, None)
        if cleanup is not None:
            await cleanup
        self._placement_groups.remove(rank)

    async def start(self, spec: EngineSpec) -> EngineHandle:
        """Run one engine in its rank's actor; a rank without a living one gets a new one in its placement group.

        Waits until what is left of the rank's last engine is gone, and until its placement group has a place again if
        it lost its node.
        """
        rank = spec.engine_id.rank
        if rank in self._cleanups:
            await self._cleanups[rank]
        if rank not in self._actors:
            await self._placement_groups.wait_again(rank)
            self._actors[rank] = _new_actor(spec.engine_id, self._placement_groups)
        result = self._actors[rank].run.remote(msgspec.json.encode(spec))
        handle = EngineHandle(spec.engine_id, asyncio.get_running_loop().create_future())
        engine = _Engine(handle, engine_mark(spec), self._placement_groups.node_of(rank))
        self._engines[spec.engine_id] = engine
        engine.following = asyncio.create_task(self._follow(engine, result), name=f"follow engine {spec.engine_id}")
        return engine.handle

    def kill(self, engine_id: EngineId) -> None:
        """Kill an engine's actor; the engine's process dies with it."""
        engine = self._engines.get(engine_id)
        if engine is not None and not engine.killed.is_set():
            engine.killed.set()
            self._kill_actor(engine_id.rank)

    async def stop(self, _force_stop: "asyncio.Future[Any]") -> list[str]:
        """Kill the actors, remove the placement groups, leave or stop Ray."""
        following = [engine.following for engine in self._engines.values() if engine.following is not None]
        tasks: list[asyncio.Task[Any]] = [*following, *self._cleanups.values()]
        for task in tasks:
            task.cancel()
        for rank in list(self._actors):
            self._kill_actor(rank)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._placement_groups.release()
        ray_cluster.leave_cluster()
        return []

    def _kill_actor(self, rank: int) -> None:
        actor = self._actors.pop(rank, None)
        if actor is not None:
            ray.kill(actor, no_restart=True)

    async def _follow(self, engine: _Engine, result: "ray.ObjectRef[Any]") -> None:
        engine_id = engine.handle.engine_id
        try:
            end = await self._wait_end(engine, result)
        finally:
            del self._engines[engine_id]
        if end.returncode != 0 and not engine.killed.is_set():  # else its last lines are our doing
            for line in end.last_lines:
                self._on_line(line)
        engine.handle.exited.set_result(end)

    async def _wait_end(self, engine: _Engine, result: "ray.ObjectRef[Any]") -> ProcessExit:
        try:
            returncode, reason, lines = await result
        except ActorUnavailableError:
            # Not a death yet: the node may be back, and the engine on it goes on meanwhile. Its reports decide.
            engine.handle.out_of_reach.set_result(None)
            await engine.killed.wait()
            is_gone = await self._clean_up(engine, _FENCE_S)
            where = "on a node that is out of reach"
            return ProcessExit(None, f"killed {where}" if is_gone else f"{where} for {_FENCE_S:g} s, and silent")
        except RayError as error:
            self._actors.pop(engine.handle.engine_id.rank, None)
            # An actor that died by itself took its engine with it; that engine's streams are not to wait for a proof.
            await self._clean_up(engine, _KILLED_S if engine.killed.is_set() else 0.0)
            return ProcessExit(None, describe_ray_error(error), _last_lines(error))
        return ProcessExit(returncode, reason, tuple(lines))

    async def _clean_up(self, engine: _Engine, timeout_s: float) -> bool:
        """See to it that nothing is left of an engine; return whether that was so within ``timeout_s``.

        It goes on behind the timeout: the next engine of the rank waits for it, the report of the death does not.
        """
        name = f"clean up behind engine {engine.handle.engine_id}"
        cleanup = asyncio.create_task(self._wait_gone(engine), name=name)
        self._cleanups[engine.handle.engine_id.rank] = cleanup
        return bool((await asyncio.wait([cleanup], timeout=timeout_s))[0])

    async def _wait_gone(self, engine: _Engine) -> None:
        """Wait until the engine is gone from its node, or its placement group is: Ray moves that off a lost node."""
        rank = engine.handle.engine_id.rank
        while not await self._reap(engine):
            if self._placement_groups.node_of(rank) != engine.node_id:
                return
            await asyncio.sleep(_REACH_POLL_S)

    async def _reap(self, engine: _Engine) -> bool:
        """End what is left of an engine; return False when its node does not confirm that in time."""
        if engine.node_id == ray.get_runtime_context().get_node_id():
            return await asyncio.to_thread(reap, engine.mark, _KILLED_S)
        on_its_node = NodeAffinitySchedulingStrategy(engine.node_id, soft=False)
        task: Any = ray.remote(reap).options(num_cpus=0, max_retries=0, scheduling_strategy=on_its_node)
        try:
            return bool(await asyncio.wait_for(task.remote(engine.mark, _KILLED_S), _FENCE_S))
        except (RayError, TimeoutError):
            return False


def _new_actor(engine_id: EngineId, placement_groups: RayPlacementGroups) -> Any:
    options = placement_groups.actor_options(engine_id.rank)
    actor: Any = ray.remote(EngineActor).options(name=f"shoal-engine-{engine_id}", max_restarts=0, **options)
    return actor.remote()


def _last_lines(error: RayError) -> tuple[str, ...]:
    """Return what an actor wrote last: a traceback of its own. Of one that died Ray knows no more than the reason."""
    return () if isinstance(error, ActorDiedError) else tuple(str(error).splitlines()[-NUM_LAST_LINES:])


def describe_ray_error(error: RayError) -> str:
    """Return the one line of Ray's many that holds why an actor ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].split(" Some common causes")[0] if lines else type(error).__name__
