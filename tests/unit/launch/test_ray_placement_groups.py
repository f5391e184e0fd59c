"""Places on a cluster whose nodes are lost. Ray's three functions are stubs: a real node takes a minute to be lost."""

import asyncio
from typing import Any

import pytest

from orchestrator.launch import ray_placement_groups
from orchestrator.launch.ray_placement_groups import RayPlacementGroups


class Ray:
    """What Ray keeps of the placement groups. is_full: new ones stay without a place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[str] = []
        self.is_full = False
        monkeypatch.setattr(ray_placement_groups, "placement_group", self._create)
        monkeypatch.setattr(ray_placement_groups, "placement_group_table", lambda group: {"state": self.states[group]})
        monkeypatch.setattr(ray_placement_groups, "remove_placement_group", self._remove)

    def _create(self, bundles: Any) -> int:
        self.states.append("PENDING" if self.is_full else "CREATED")
        return len(self.states) - 1

    def _remove(self, group: int) -> None:
        self.states[group] = "REMOVED"


async def test_a_new_rank_gets_its_place_while_another_has_lost_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(monkeypatch)
    places = RayPlacementGroups(2, {"CPU": 1.0})
    await places.wait()
    ray.states[1] = "RESCHEDULING"
    await asyncio.wait_for(places.add(2), 5.0)
    assert ray.states == ["CREATED", "RESCHEDULING", "CREATED"]


async def test_asking_for_a_place_leaves_none_behind_when_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(monkeypatch)
    places = RayPlacementGroups(1, {"CPU": 1.0})
    ray.is_full = True
    asking = asyncio.create_task(places.add(1))
    await asyncio.sleep(0)
    assert ray.states == ["CREATED", "PENDING"]
    asking.cancel()
    await asyncio.wait([asking])
    assert ray.states == ["CREATED", "REMOVED"]
