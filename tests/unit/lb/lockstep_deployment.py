"""A lockstep deployment whose replicas and reports a test writes by hand."""

from typing import Any

from msgspec.structs import replace

from engine.wire.control import Membership, MemberStatus
from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import EnginePhase, ReplicaState
from lb.coordinator.lockstep_group import LockstepGroup

IDLE, RUNNING, PARKED = EnginePhase.IDLE, EnginePhase.RUNNING, EnginePhase.PARKED
NUM_EXPERTS = 6


class Deployment:
    """Replicas and reports of engines, and the group the coordinator makes of them."""

    def __init__(self, num_ranks: int, generation: int = 1, **options: Any) -> None:
        self.group = LockstepGroup(generation, **options)
        self.reports: dict[int, EngineReport] = {}
        self.replicas: dict[int, ReplicaInfo] = {}
        for rank in range(num_ranks):
            self.replica(rank)
            self.load(rank)

    def replica(self, rank: int, state: ReplicaState = ReplicaState.ALIVE, incarnation: int = 1) -> None:
        self.replicas[rank] = ReplicaInfo(EngineId(rank, incarnation), state)

    def load(self, rank: int) -> None:
        status = MemberStatus(NUM_EXPERTS, f"h:{rank}", Membership(0, []), 0, [1] * NUM_EXPERTS)
        engine_id = self.replicas[rank].engine_id
        self.reports[rank] = EngineReport(engine_id, 1, 0, 0, 0, 0, IDLE, 0, False, {}, Load(), member=status)

    def report(self, *ranks: int, **changes: Any) -> None:
        """Change reports. failed, committed, broken: of the member's status."""
        names = {"failed": "failed_epoch", "committed": "membership", "broken": "broken_epoch"}
        status = {field: changes.pop(name, None) for name, field in names.items()}
        for rank in ranks:
            known = self.reports[rank].member
            assert known is not None
            member = replace(known, **{name: value for name, value in status.items() if value is not None})
            self.reports[rank] = replace(self.reports[rank], member=member, **changes)

    def update(self) -> bool:
        return self.group.update(self.reports, self.replicas)

    def proposed(self) -> tuple[int, list[int], bool] | None:
        """Return epoch, ranks and whether it is direct."""
        proposal = self.group.proposal
        if proposal is None:
            return None
        return proposal.epoch, [member.rank for member in proposal.members], self.group.direct

    def committed(self) -> tuple[int, list[int]]:
        """Return epoch and ranks."""
        return self.group.committed.epoch, [member.rank for member in self.group.committed.members]

    def num_copies(self) -> int:
        return sum(map(len, self.group.committed.expert_placement))

    def prepare(self, *ranks: int) -> None:
        assert self.group.proposal is not None
        epoch = self.group.proposal.epoch
        self.report(*ranks, ready_epoch=epoch, max_epoch_seen=epoch)
        self.update()

    def switch(self, *ranks: int, phase: EnginePhase = RUNNING) -> None:
        committed = self.group.committed
        wave = self.group.waves.started
        self.report(*ranks, epoch=committed.epoch, committed=committed, phase=phase, wave=wave)
        self.update()

    def form(self, *, phase: EnginePhase = RUNNING) -> None:
        """Go from nothing to a group of all."""
        self.update()
        self.prepare(*self.reports)
        self.switch(*self.reports, phase=phase)


def three_ranks() -> Deployment:
    """Return a group of three that runs."""
    deployment = Deployment(3)
    deployment.form()
    assert deployment.committed() == (1, [0, 1, 2])
    assert deployment.proposed() is None
    return deployment
