"""When a lockstep group runs. Between waves nobody steps, and an idle group costs no CPU."""

from collections.abc import Iterable, Sequence

from engine.wire.messages import EngineReport
from engine.wire.states import EnginePhase


class Waves:
    """Numbers the running periods of a group; pure.

    started: the newest wave anybody may run in. It only rises, and to raise it is the only way to wake a rank.
    """

    def __init__(self) -> None:
        self.started = 0

    def update(self, members: Sequence[EngineReport], epoch: int) -> None:
        """Look at the members' reports, and start a wave when one is wanted.

        A member that is idle in the newest wave wants the next one when it has work, or is not in the committed epoch:
        a membership takes effect at a step, and the last wave may have ended with somebody who had not seen it. One
        that is behind has not seen the newest wave yet, and will run in it. A wave a member is in already, started by
        a coordinator before this one, is everybody's.

        epoch: the committed one.
        """
        self.started = max([self.started, *(report.wave for report in members)])
        idle = [r for r in members if r.phase is EnginePhase.IDLE and r.wave == self.started]
        if any(report.has_work or report.epoch != epoch for report in idle):
            self.started += 1

    def on_first_request(self, wave: int, members: Iterable[EngineReport]) -> bool:
        """Start the wave a client requests for, if it is the next one and all members are idle in the newest; else not.

        An optimisation: the member that got the request says the same a little later. A request that comes late, twice
        or out of the blue names a wave that was started already, or not the next one.
        """
        idle = all(report.phase is EnginePhase.IDLE and report.wave == self.started for report in members)
        if not idle or wave != self.started + 1:
            return False
        self.started = wave
        return True
