"""When a lockstep group runs. Between waves nobody steps, and an idle group costs no CPU."""

from collections.abc import Iterable

from engine.wire.messages import EnginePhase, EngineReport


class Waves:
    """Numbers the running periods of a group; pure.

    started: the newest wave anybody may run in. It only rises, and to raise it is the only way to wake a rank.
    """

    def __init__(self) -> None:
        self.started = 0

    def update(self, members: Iterable[EngineReport]) -> bool:
        """Look at the members' reports; True when a wave was started.

        A member that is idle in the newest wave and has work wants the next one. One that is behind has not seen the
        newest yet, and will run in it. A wave a member is in already, started by a coordinator before this one, is
        everybody's.
        """
        before = self.started
        for report in members:
            self.started = max(self.started, report.wave)
        wants = (r.phase is EnginePhase.IDLE and r.has_work and r.wave == self.started for r in members)
        if any(wants):
            self.started += 1
        return self.started != before

    def start_next(self, members: Iterable[EngineReport]) -> None:
        """Start a wave whoever has work: a new membership takes effect at a step, and an idle group makes none."""
        self.started = max([self.started, *(report.wave for report in members)]) + 1
