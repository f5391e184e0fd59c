"""Hosts engines in Ray actors: one placement group and one plain actor per rank."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config import EngineSpec
from engine.wire.errors import StartupError
from engine.wire.ids import EngineId
from orchestrator.launch import ray_cluster
from orchestrator.launch.host import EngineExit, EngineHandle, LineSink, Site
from orchestrator.launch.placement import plan_placement
from orchestrator.launch.shell import EngineShell
from orchestrator.launch.subprocess import NUM_LAST_LINES

_FENCE_S = 10.0  # how long an engine whose node is out of reach may go on before it counts as dead
_PLACE_S = 15.0  # resources that a deployment has just given back need a moment to be free
_PLACE_POLL_S = 0.02
_PLACED = "CREATED"


class RayHost:
    """An ``EngineHost`` on a Ray cluster.

    address: of a running cluster; None starts one inside ``run_dir``. A rank keeps its placement group for as long as
    the deployment lives, and its shell for as long as that lives: a shell whose engine ended runs the next one. Lines
    of an engine's log stay with Ray; the last ones are passed on when it ends.
    """

    def __init__(
        self, address: str | None, advertise_host: str | None, num_threads: int, run_dir: Path, on_line: LineSink
    ) -> None:
        self._address = address
        self._advertise_host = advertise_host
        self._num_threads = num_threads
        self._run_dir = run_dir
        self._on_line = on_line
        self._bundle: dict[str, float] = {}
        self._groups: list[PlacementGroup] = []
        self._shells: dict[int, Any] = {}  # by rank: actors not known to be dead
        self._following: dict[EngineId, asyncio.Task[None]] = {}  # engines not known to have ended
        self._killed: set[EngineId] = set()  # their last lines are our own doing and tell nobody anything

    async def open(self, num_ranks: int, device: str) -> Site:
        """Start or join Ray and reserve one placement group per rank.

        Raises:
            StartupError: no Ray, or not enough CPUs or GPUs in it.
        """
        if self._address is None:
            ray_cluster.start_cluster(self._run_dir, num_ranks * self._num_threads)
        else:
            await ray_cluster.join_cluster(self._address, self._on_line)
        plan = plan_placement(num_ranks, device, self._num_threads, ray_cluster.living_nodes())
        self._bundle = dict(plan.bundle)
        self._groups = [placement_group([self._bundle]) for _ in range(num_ranks)]
        await self._wait_placed()
        return Site(device=plan.device, address=self._line_address())

    async def start(self, spec: EngineSpec) -> EngineHandle:
        """Run one engine in its rank's shell; a rank without a living one gets a new one in its placement group."""
        rank = spec.engine_id.rank
        if rank not in self._shells:
            self._shells[rank] = self._new_shell(spec.engine_id)
        exited: asyncio.Future[EngineExit] = asyncio.get_running_loop().create_future()
        ending = self._shells[rank].run.remote(msgspec.json.encode(spec))
        following = self._follow(spec.engine_id, ending, exited)
        task = asyncio.create_task(following, name=f"follow engine {spec.engine_id}")
        self._following[spec.engine_id] = task
        return EngineHandle(spec.engine_id, exited)

    def kill(self, engine_id: EngineId) -> None:
        """Kill an engine's shell; the engine's process dies with it."""
        if engine_id in self._following:
            self._killed.add(engine_id)
            self._kill_shell(engine_id.rank)

    async def stop(self, _hurry: "asyncio.Future[Any]") -> list[str]:
        """Kill the actors, remove the placement groups, leave or stop Ray."""
        following = list(self._following.values())
        for task in following:
            task.cancel()
        for rank in list(self._shells):
            self._kill_shell(rank)
        await asyncio.gather(*following, return_exceptions=True)
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        ray_cluster.leave_cluster()
        return []

    def _new_shell(self, engine_id: EngineId) -> Any:
        shell: Any = ray.remote(EngineShell).options(
            name=f"shoal-engine-{engine_id}",
            num_cpus=self._bundle.get("CPU", 0),
            num_gpus=self._bundle.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[engine_id.rank], 0),
        )
        return shell.remote()

    def _kill_shell(self, rank: int) -> None:
        shell = self._shells.pop(rank, None)
        if shell is not None:
            ray.kill(shell, no_restart=True)

    async def _follow(
        self, engine_id: EngineId, ending: "ray.ObjectRef[Any]", exited: "asyncio.Future[EngineExit]"
    ) -> None:
        try:
            end = await self._wait_end(engine_id, ending)
        finally:
            del self._following[engine_id]
        if end.returncode != 0 and engine_id not in self._killed:
            for line in end.last_lines:
                self._on_line(line)
        self._killed.discard(engine_id)
        exited.set_result(end)

    async def _wait_end(self, engine_id: EngineId, ending: "ray.ObjectRef[Any]") -> EngineExit:
        try:
            returncode, reason, lines = await ending
        except ActorUnavailableError:
            # Not a death yet: the node may be back, and the engine on it goes on meanwhile.
            await asyncio.sleep(_FENCE_S)
            self._kill_shell(engine_id.rank)
            return EngineExit(None, f"its node was out of reach for {_FENCE_S:g} s")
        except RayError as error:
            self._shells.pop(engine_id.rank, None)
            return EngineExit(None, describe_ray_error(error), tuple(str(error).splitlines()[-NUM_LAST_LINES:]))
        return EngineExit(returncode, reason, tuple(lines))

    async def _wait_placed(self) -> None:
        deadline = asyncio.get_running_loop().time() + _PLACE_S
        while waiting := [group for group in self._groups if placement_group_table(group)["state"] != _PLACED]:
            if asyncio.get_running_loop().time() > deadline:
                raise StartupError(
                    f"{len(waiting)} of {len(self._groups)} ranks find no place within {_PLACE_S:g} s: each needs "
                    f"{_amounts(self._bundle)}, the Ray cluster has {_amounts(ray_cluster.free_resources())} free"
                )
            await asyncio.sleep(_PLACE_POLL_S)

    def _line_address(self) -> str | None:
        if self._advertise_host is not None or self._address is None:
            return self._advertise_host
        return ray_cluster.own_address()


def describe_ray_error(error: RayError) -> str:
    """Return the one line of Ray's many that says why an actor ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].split(" Some common causes")[0] if lines else type(error).__name__


def _amounts(resources: Mapping[str, float]) -> str:
    return (
        " and ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU") if resources.get(name))
        or "nothing"
    )
