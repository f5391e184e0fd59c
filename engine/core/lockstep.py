"""The core of a rank of a lockstep group, and the contract with its runner."""

from collections.abc import Sequence
from typing import Any, Protocol

from engine.config.engine_config import SchedulerConfig
from engine.core.native import NativeCore
from engine.interfaces.engine_core import Runner
from engine.interfaces.plan import Sample, StepPlan


class LockstepRunner(Runner, Protocol):
    """Runs steps together with the other members of a group.

    num_experts: experts of each layer. row_device: where the rows live that members exchange (``cpu``, ``cuda:N``).
    """

    @property
    def num_experts(self) -> int:
        """Return the experts of each layer."""

    @property
    def row_device(self) -> str:
        """Return the device of the rows that travel between members."""

    def load_rows(self, expert_ids: Sequence[int], peers: Any = None) -> Any:
        """Get ready to compute these experts, in any thread, while steps go on; return what ``join`` takes.

        peers: the rows that other members hold; None when no member is to be asked.

        Raises:
            GroupBrokenError: a peer is gone. StartupError: the weights are not there.
        """

    def join(self, rows: Any, placement: Sequence[Sequence[int]], index: int, transport: Any) -> None:
        """Step with these members from now on: an exchange of references, nothing blocks.

        rows: from ``load_rows``. placement: expert ids of each member. index: this member's place among them.
        """

    def run_shared(self, plan: StepPlan, sizes: Sequence[int]) -> Sequence[Sample]:
        """Take part in a step, with or without tokens of this rank; one sample per chunk that samples, in plan order.

        sizes: tokens of each member.

        Raises:
            GroupBrokenError: a member is gone, or this one is to leave its group; the step is to be discarded.
        """

    def expert_loads(self) -> list[int]:
        """Return how often this rank's own tokens chose each expert; only grows."""


class LockstepCore(NativeCore):
    """A native core that does not step by itself: its loop plans, runs with the other members, and applies.

    lockstep_runner: the same runner, as one that can step together with others.
    """

    def __init__(self, config: SchedulerConfig, runner: LockstepRunner) -> None:
        super().__init__(config, runner)
        self.lockstep_runner = runner
