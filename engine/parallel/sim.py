"""The sim runner of a lockstep group: its steps take the time of the slowest member, and its experts weigh nothing."""

from collections.abc import Sequence
from typing import Any

import torch

from engine.interfaces.plan import Sample, StepPlan
from engine.parallel.transport import all_to_all
from engine.sim.runner import SimRunner


class SimLockstepRunner(SimRunner):
    """Implements ``engine.core.lockstep.LockstepRunner``. Members exchange one row each in a step, as real ones do."""

    _transport: Any = None  # of the group it joined

    @property
    def num_experts(self) -> int:
        """Return how many experts a layer pretends to have."""
        return self._config.num_experts

    @property
    def row_device(self) -> str:
        """Return where the rows are."""
        return "cpu"

    def load_rows(self, expert_ids: Sequence[int], peers: Any = None) -> list[int]:
        """Pretend to load experts; ``peers`` have nothing to send."""
        self._sleep(self._config.load_s_per_expert * len(expert_ids))
        return list(expert_ids)

    def join(self, rows: Any, placement: Sequence[Sequence[int]], index: int, transport: Any) -> None:
        """Step in this group."""
        assert list(placement[index]) == rows, "other experts were loaded than the placement gives"
        self._transport = transport

    def run_shared(self, plan: StepPlan, sizes: Sequence[int]) -> Sequence[Sample]:
        """Take the time of a step, with one exchange in it as real members have."""
        num = len(sizes)
        mine = torch.full((num, 1), plan.num_tokens, dtype=torch.int64)
        seen = all_to_all(self._transport, mine, [1] * num, [1] * num).flatten().tolist()
        assert seen == list(sizes), "a member is in another step"
        return self.run(plan)

    def expert_loads(self) -> list[int]:
        """Return zeros: no token chooses an expert."""
        return [0] * self._config.num_experts
