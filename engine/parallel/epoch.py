"""The group of one epoch as one member has it: how it forms beside the one in use, and the headers it exchanges."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.core.lockstep import LockstepRunner
from engine.parallel.expert_rows import PeerRows
from engine.parallel.group_member import StepHeader
from engine.parallel.transport import Transport, all_to_all, form_transports
from engine.wire.control import Membership
from engine.wire.ids import EngineId


@dataclass(frozen=True, slots=True)
class EpochGroup:
    """What a member needs to step in an epoch.

    headers, rows: connections. experts: what its runner loaded for it; None once they are the runner's.
    """

    membership: Membership
    index: int
    headers: Transport
    rows: Transport
    experts: Any

    @property
    def num_entered(self) -> int:
        """Return how many collectives this member has begun: the member that began the fewest is the one waited for."""
        return self.headers.num_entered + self.rows.num_entered

    @property
    def collective_s(self) -> float:
        """Return the time spent in collectives, waiting for peers included; only grows."""
        return self.headers.collective_s + self.rows.collective_s

    def install(self, runner: LockstepRunner) -> "EpochGroup":
        """Let the runner compute in this group, and return the group to step in.

        It holds the experts no more: a runner that is put to sleep is to give their memory back.
        """
        runner.join(self.experts, self.membership.expert_placement, self.index, self.rows)
        return replace(self, experts=None)

    def close(self) -> None:
        """Close the connections. Takes 0.25 s beside healthy peers and 10 s beside a stopped one."""
        self.headers.close()
        self.rows.close()


def prepare_epoch(
    runner: LockstepRunner,
    engine_id: EngineId,
    membership: Membership,
    generation: int,
    host: str,
    must_leave: Callable[[], bool],
) -> EpochGroup:
    """Connect to the members of a group and get the experts this one shall hold; waits until all do the same.

    generation: of the coordinator that proposed it; with the epoch it names the attempt, which is never repeated.
    host: the address by which peers reach this process. must_leave: polled while one of its collectives is waited for.

    Raises:
        GroupBrokenError: not all members came.
        StartupError: the weights are not there.
    """
    index = membership.members.index(engine_id)
    headers, rows = form_transports(
        membership.store_address,
        f"{generation}/{membership.epoch}",
        index,
        len(membership.members),
        torch.device(runner.row_device),
        must_leave,
        host=host,
    )
    placement = membership.expert_placement
    # Not over ``rows``: on CUDA two groups of one device that are used from two threads may wait for each other.
    peers = PeerRows(headers, index, membership.held, placement) if any(membership.held) else None
    experts = runner.load_rows(placement[index], peers)
    return EpochGroup(membership, index, headers, rows, experts)


def exchange_headers(transport: Transport, header: StepHeader) -> list[StepHeader]:
    """Send every member this rank's header, and return the headers of all in the order of the members.

    Raises:
        GroupBrokenError: see ``Transport``.
    """
    num = transport.num_members
    mine = torch.tensor([header] * num, dtype=torch.int64)
    rows: Sequence[Sequence[int]] = all_to_all(transport, mine, [1] * num, [1] * num).tolist()
    return [StepHeader(*row) for row in rows]


def close_aside(group: EpochGroup) -> None:
    """Close a group that nobody steps in any more, in a thread of its own: it may take long."""
    threading.Thread(target=group.close, name=f"shoal-close-epoch-{group.membership.epoch}", daemon=True).start()
