"""Members of a group that is being prepared hand each other experts, over a real transport."""

from collections.abc import Callable
from typing import Any

import torch

from engine.parallel.expert_rows import ExpertRows, PeerRows
from tests.unit.parallel.members import Company

LAYERS = ("layer.0", "layer.1")


def rows_of(*expert_ids: int) -> ExpertRows:
    """Return experts whose numbers tell whose they are: layer, parameter and expert."""
    tensors = {
        layer: {
            "down": torch.tensor([[expert + 0.25 + 100 * depth] * 3 for expert in expert_ids]).view(-1, 3),
            "up": torch.tensor([[[float(expert + 100 * depth)] * 2] * 2 for expert in expert_ids]).view(-1, 2, 2),
        }
        for depth, layer in enumerate(LAYERS)
    }
    return ExpertRows(tuple(expert_ids), tensors)


def assert_same(found: ExpertRows, *expert_ids: int) -> None:
    expected = rows_of(*expert_ids)
    assert found.expert_ids == expected.expert_ids
    for layer in LAYERS:
        for parameter, tensor in expected.tensors[layer].items():
            assert torch.equal(found.tensors[layer][parameter], tensor), (layer, parameter)


def together(num_members: int, act: Callable[[int, Any], ExpertRows]) -> list[ExpertRows]:
    """Let each member act with a transport to the others; return what each ends with."""
    company = Company(num_members)

    def run(index: int) -> ExpertRows:
        headers, _ = company.meet(index)
        return act(index, headers)

    return company.run(run)


def test_a_member_that_joins_gets_its_experts_from_those_that_hold_them() -> None:
    held = [[0, 1], [2, 3, 4], []]
    wanted = [[0], [2, 3], [1, 4]]

    def act(index: int, transport: Any) -> ExpertRows:
        rows = rows_of(*held[index])
        received = PeerRows(transport, index, held, wanted).exchange(rows)
        return rows.gather(wanted[index], received)

    found = together(3, act)
    for index, experts in enumerate(wanted):
        assert_same(found[index], *experts)


def test_an_expert_that_nobody_holds_is_left_to_the_checkpoint() -> None:
    held: list[list[int]] = [[0], [1], []]
    wanted = [[0], [1], [0, 2]]

    def act(index: int, transport: Any) -> ExpertRows:
        return PeerRows(transport, index, held, wanted).exchange(rows_of(*held[index]))

    found = together(3, act)
    assert_same(found[2], 0)
    assert found[0].expert_ids == found[1].expert_ids == ()


def test_of_replicas_the_first_member_gives() -> None:
    held: list[list[int]] = [[5], [5], []]
    peers = [PeerRows(None, index, held, [[5], [5], [5]]) for index in range(3)]  # type: ignore[arg-type]
    assert [peer.to_receive for peer in peers] == [[], [], [5]]


def test_gathered_rows_are_copies_in_ascending_order() -> None:
    rows = rows_of(1, 4)
    gathered = rows.gather([4, 2], rows_of(2))
    assert_same(gathered, 2, 4)
    gathered.tensors["layer.0"]["up"][:] = -1
    assert_same(rows, 1, 4)
