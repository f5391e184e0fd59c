"""The core of a rank that steps together with others, and what it needs of its runner."""

from collections.abc import Sequence
from typing import Any, Protocol

from engine.config.engine_config import SchedulerConfig
from engine.core.native import NativeCore
from engine.interfaces.engine_core import Runner
from engine.interfaces.plan import Sample, StepPlan


class LockstepRunner(Runner, Protocol):
    """Runs steps together with the other members of a group.

    num_experts: experts of each layer. device: where the rows live that members exchange (``cpu``, ``cuda:N``).
    """

    @property
    def num_experts(self) -> int:
        """Return the experts of each layer."""

    @property
    def row_device(self) -> str:
        """Return the device of the rows that travel between members."""

    def load_rows(self, expert_ids: Sequence[int], peers: Any = None) -> Any:
        """Get ready to compute these experts, in any thread, while steps go on; return what ``join`` wants.

        peers: hands over what other members hold; None when nobody is to be asked.
        """

    def join(self, rows: Any, placement: Sequence[Sequence[int]], index: int, transport: Any) -> None:
        """Step in this company from now on: an exchange of references, nothing blocks.

        rows: from ``load_rows``. placement: expert ids of each member. index: this member's place among them.
        """

    def run_shared(self, plan: StepPlan, sizes: Sequence[int]) -> Sequence[Sample]:
        """Take part in a step, with or without tokens of one's own; one sample per chunk that samples.

        sizes: tokens of each member.

        Raises:
            GroupBrokenError: a member is gone, or this one was told to leave; the step is to be discarded.
        """

    def expert_loads(self) -> list[int]:
        """Return how often this rank's own tokens chose each expert; only grows."""


class LockstepCore(NativeCore):
    """A native core whose steps are taken apart: whoever drives it runs them in company."""

    def __init__(self, config: SchedulerConfig, runner: LockstepRunner) -> None:
        super().__init__(config, runner)
        self.lockstep_runner = runner
