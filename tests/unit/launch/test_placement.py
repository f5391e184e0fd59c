"""Which resources each rank gets, and what is said when the cluster lacks them."""

import pytest

from engine.wire.errors import StartupError
from orchestrator.launch.placement import NodeResources, count_placements, plan_placement

CPU_NODE = NodeResources(num_cpus=2.0, num_gpus=0.0)
GPU_NODE = NodeResources(num_cpus=8.0, num_gpus=2.0)


def test_without_a_gpu_in_sight_each_rank_gets_the_cpus_of_its_threads() -> None:
    plan = plan_placement(2, "auto", 1, [CPU_NODE])
    assert (plan.device, plan.bundle) == ("cpu", {"CPU": 1.0})
    assert plan_placement(2, "auto", 2, [CPU_NODE, CPU_NODE]).bundle == {"CPU": 2.0}


def test_a_rank_never_spans_nodes_when_the_free_places_are_counted() -> None:
    free = [{"CPU": 3.0, "memory": 9.0}, {"CPU": 1.5}, {"GPU": 2.0}]
    assert count_placements({"CPU": 1.0}, free) == 4
    assert count_placements({"CPU": 2.0}, free) == 1
    assert count_placements({"GPU": 1.0}, free) == 2
    assert count_placements({"GPU": 1.0}, []) == 0


def test_with_gpus_each_rank_gets_one_unless_cpu_was_asked_for() -> None:
    assert plan_placement(4, "auto", 1, [GPU_NODE, GPU_NODE]).bundle == {"GPU": 1.0}
    assert plan_placement(4, "cuda", 1, [GPU_NODE, GPU_NODE]).device == "cuda"
    assert plan_placement(4, "cpu", 1, [GPU_NODE]).device == "cpu"


@pytest.mark.parametrize(
    ("num_ranks", "device", "num_threads", "nodes", "expected"),
    [
        (4, "cuda", 1, [CPU_NODE, NodeResources(8, 1)], "needs 4 GPUs, the Ray cluster has 1 (2 nodes)"),
        (1, "cuda", 1, [CPU_NODE], "needs 1 GPU, the Ray cluster has 0 (1 node)"),
        (3, "auto", 1, [GPU_NODE], "needs 3 GPUs, the Ray cluster has 2 (1 node); --device cpu runs without"),
        (3, "cpu", 1, [CPU_NODE], "needs 3 CPUs (3 ranks x 1 threads), the Ray cluster has 2 (1 node)"),
        # A rank never spans nodes: four CPUs on two nodes hold no rank of three threads.
        (1, "cpu", 3, [CPU_NODE, CPU_NODE], "needs 3 CPUs (1 ranks x 3 threads), the Ray cluster has 4 (2 nodes)"),
    ],
)
def test_what_is_missing_is_named(
    num_ranks: int, device: str, num_threads: int, nodes: list[NodeResources], expected: str
) -> None:
    with pytest.raises(StartupError) as caught:
        plan_placement(num_ranks, device, num_threads, nodes)
    assert str(caught.value) == expected
