"""The placement of ranks: which resources each one reserves, and whether the cluster has them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.wire.errors import StartupError


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What one living node of a Ray cluster has in all, taken or not."""

    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """What each rank reserves. device: what engines are configured with. bundle: resources of one placement group."""

    device: str
    bundle: Mapping[str, float]


def plan_placement(num_ranks: int, device: str, num_threads: int, nodes: Sequence[NodeResources]) -> PlacementPlan:
    """Give each rank one GPU on CUDA, else ``num_threads`` CPUs; a rank never spans nodes.

    device: ``auto`` takes CUDA as soon as the cluster has a GPU: nobody asks for half a deployment on CPUs.

    Raises:
        StartupError: naming what is needed and what the cluster has.
    """
    num_gpus = sum(int(node.num_gpus) for node in nodes)
    if device.startswith("cuda") or (device == "auto" and num_gpus > 0):
        if num_gpus < num_ranks:
            hint = "; --device cpu runs without" if device == "auto" else ""
            raise StartupError(f"needs {_count(num_ranks, 'GPU')}, the Ray cluster has {num_gpus}{_of(nodes)}{hint}")
        return PlacementPlan("cuda", {"GPU": 1.0})
    # Per node, not in all: two halves of a rank on two nodes hold no rank.
    num_placements = sum(int(node.num_cpus) // num_threads for node in nodes)
    if num_placements < num_ranks:
        num_cpus = sum(int(node.num_cpus) for node in nodes)
        raise StartupError(
            f"needs {_count(num_ranks * num_threads, 'CPU')} ({num_ranks} ranks x {num_threads} threads), "
            f"the Ray cluster has {num_cpus}{_of(nodes)}"
        )
    return PlacementPlan("cpu", {"CPU": float(num_threads)})


def count_placements(bundle: Mapping[str, float], free: Sequence[Mapping[str, float]]) -> int:
    """Return how many more ranks fit. bundle: what one reserves. free: what each living node has left."""
    return sum(min(int(node.get(name, 0.0) // amount) for name, amount in bundle.items()) for node in free)


def _of(nodes: Sequence[NodeResources]) -> str:
    return f" ({_count(len(nodes), 'node')})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
