"""The Ray placement groups of a deployment: one per rank, kept across replacements of its engine."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.wire.errors import StartupError
from orchestrator.launch import ray_cluster

_LOG = logging.getLogger(__name__)

_PLACEMENT_S = 15.0  # resources that a deployment has just given back need a moment to be free
_PLACEMENT_POLL_S = 0.02
_REPLACE_POLL_S = 0.2
_PLACED = "CREATED"


class RayPlacementGroups:
    """One placement group with the resources of ``bundle`` per rank. Ray moves the one of a rank whose node is lost.

    One each, not one for all: a rank's group is kept, given back and placed again by itself.
    """

    def __init__(self, num_ranks: int, bundle: Mapping[str, float]) -> None:
        self.bundle = dict(bundle)
        self._groups: dict[int, PlacementGroup] = {rank: placement_group([self.bundle]) for rank in range(num_ranks)}

    async def add(self, rank: int) -> None:
        """Make the group of one more rank; none is left behind by a failure or a cancel.

        Raises:
            StartupError: it is not placed soon; names what is needed and what is free.
        """
        assert rank not in self._groups
        self._groups[rank] = placement_group([self.bundle])
        try:
            # Not for the others: one that has lost its node may be unplaced for minutes.
            await _wait_placed([self._groups[rank]], self.bundle)
        except BaseException:
            self.remove(rank)
            raise

    def remove(self, rank: int) -> None:
        """Give the group of a rank back, if it has one."""
        group = self._groups.pop(rank, None)
        if group is not None:
            remove_placement_group(group)

    async def wait(self) -> None:
        """Wait until the group of every rank is placed.

        Raises:
            StartupError: they are not all placed soon; names what is needed and what is free.
        """
        await _wait_placed(list(self._groups.values()), self.bundle)

    async def wait_again(self, rank: int) -> None:
        """Wait until the group of a rank is placed again, however long: a lost node may be replaced after minutes."""
        if _is_placed(self._groups[rank]):
            return
        _LOG.warning("rank %d has lost its node and waits for %s elsewhere", rank, amounts(self.bundle))
        while not _is_placed(self._groups[rank]):  # noqa: ASYNC110 - Ray sends no notice, it has to be polled
            await asyncio.sleep(_REPLACE_POLL_S)

    def node_of(self, rank: int) -> str:
        """Return the id of the node of a rank whose group is placed; empty when it has lost it meanwhile."""
        nodes: dict[int, str] = placement_group_table(self._groups[rank])["bundles_to_node_id"]
        return nodes.get(0, "")

    def actor_options(self, rank: int) -> dict[str, Any]:
        """Return the options with which an actor is created in the group of a rank."""
        return {
            "num_cpus": self.bundle.get("CPU", 0),
            "num_gpus": self.bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._groups[rank], 0),
        }

    def release(self) -> None:
        """Give every group back; idempotent."""
        for rank in list(self._groups):
            self.remove(rank)


async def _wait_placed(groups: Sequence[PlacementGroup], bundle: Mapping[str, float]) -> None:
    deadline = asyncio.get_running_loop().time() + _PLACEMENT_S
    while waiting := [group for group in groups if not _is_placed(group)]:
        if asyncio.get_running_loop().time() > deadline:
            raise StartupError(
                f"{len(waiting)} of {len(groups)} ranks find no place within {_PLACEMENT_S:g} s: each needs "
                f"{amounts(bundle)}, the Ray cluster has {amounts(ray_cluster.free_resources())} free"
            )
        await asyncio.sleep(_PLACEMENT_POLL_S)


def _is_placed(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group)["state"] == _PLACED)


def amounts(resources: Mapping[str, float]) -> str:
    """Return amounts of what a rank can need, in words."""
    return (
        " and ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU") if resources.get(name))
        or "nothing"
    )
