"""A runner that returns the same samples whatever it is given."""

from engine.interfaces.engine_core import OnProgress, RunnerLimits
from engine.interfaces.plan import Sample, StepPlan
from tests.unit.engine.builders import sample_for


class FixedRunner:
    """A runner that answers every sample alike, or raises."""

    def __init__(self, limits: RunnerLimits, error: Exception | None = None) -> None:
        self.limits = limits
        self.error = error
        self.num_runs = 0
        self.is_closed = False
        self.sleep_level = 0

    def run(self, plan: StepPlan) -> list[Sample]:
        self.num_runs += 1
        if self.error is not None:
            raise self.error
        return sample_for(plan)

    def sleep(self, level: int) -> None:
        self.sleep_level = max(self.sleep_level, level)

    def wake_up(self, on_progress: OnProgress) -> None:
        on_progress("waking", 0.5)
        self.sleep_level = 0

    def close(self) -> None:
        self.is_closed = True
