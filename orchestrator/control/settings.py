"""The settings store, one authority on the desired state: changes in, whole numbered settings out. Pure."""

from collections.abc import Callable, Collection

from msgspec.structs import replace

from engine.wire.control import ClusterSettings, PauseMode
from engine.wire.process import LOG_LEVELS
from orchestrator.control.errors import ControlRefusedError
from orchestrator.control.messages import (
    Cordon,
    Fault,
    Pause,
    Rebalance,
    Resume,
    SetLogLevel,
    SettingsChange,
    Sleep,
    WakeUp,
)

DEEPEST_SLEEP = 2


class SettingsStore:
    """Holds the settings of one deployment. A change that changes nothing keeps their number.

    current: written here alone.
    """

    def __init__(self, ranks: Callable[[], Collection[int]]) -> None:
        """Begin with everything running. ranks: returns the ranks there are."""
        self.current = ClusterSettings()
        self._ranks = ranks

    def change(self, change: SettingsChange) -> ClusterSettings:
        """Apply one change; return the settings that are wanted from now on.

        Raises:
            ControlRefusedError: it is invalid; names what is valid.
        """
        after = self._apply(change)
        # The number moves only with the value: a repeated call finds its settings in force and returns at once.
        if after != self.current:
            self.current = replace(after, seq=self.current.seq + 1)
        return self.current

    def _apply(self, change: SettingsChange) -> ClusterSettings:
        before = self.current
        match change:
            case Pause(mode):
                _ensure(mode is not PauseMode.RUN, "mode", "a pause needs a mode: abort, wait or keep")
                return replace(before, pause=mode)
            case Resume():
                return replace(before, pause=PauseMode.RUN)
            case Sleep(level):
                _ensure(1 <= level <= DEEPEST_SLEEP, "level", f"level must be 1..{DEEPEST_SLEEP}, not {level}")
                # Weights that were dropped are not on the host any more: a lighter sleep has to wake up first.
                return replace(before, sleep_level=max(before.sleep_level, level))
            case WakeUp():
                return replace(before, sleep_level=0)
            case Rebalance():
                # A counter, because it is an event in what is otherwise state: each step of it is done once.
                return replace(before, rebalance_seq=before.rebalance_seq + 1)
            case SetLogLevel(level):
                names = ", ".join(LOG_LEVELS)
                _ensure(level in ("", *LOG_LEVELS), "level", f"level must be one of {names}, not {level!r}")
                return replace(before, log_level=level)
            case Cordon(rank, is_on):
                ranks = ", ".join(map(str, sorted(self._ranks())))
                _ensure(rank in self._ranks(), "rank", f"there is no rank {rank}; valid: {ranks}")
                others = set(before.cordoned) - {rank}
                return replace(before, cordoned=sorted(others | {rank} if is_on else others))


def _ensure(is_right: bool, subject: str, message: str) -> None:
    if not is_right:
        raise ControlRefusedError(Fault(message, is_callers=True, subject=subject))
