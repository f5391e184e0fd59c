"""The pause controller: applies the operator's settings, which say whether an engine steps, sleeps and is cordoned."""

from dataclasses import dataclass

from engine.interfaces.engine_core import EngineCore, OnProgress
from engine.wire.control import ClusterSettings, PauseMode


@dataclass(frozen=True, slots=True)
class AppliedSettings:
    """How far the settings are in force, for the report.

    settings_seq: number of the newest that are in force. is_frozen: no step runs, whatever waits.
    """

    settings_seq: int = 0
    is_sleeping: bool = False
    is_frozen: bool = False


class PauseController:
    """Applies settings to the core, between two steps; belongs to the busy loop. No clock, no thread, no socket.

    A pause begins when the engine leaves RUN. Sequences that come from then on are held back until RUN, whatever modes
    follow each other meanwhile; the mode decides about those that came before: ABORT ends them, WAIT lets them finish,
    KEEP freezes them. Sleep freezes all for its time, below any pause. Settings count in the order of their ``seq``;
    older ones and repetitions change nothing.
    """

    def __init__(self, core: EngineCore, rank: int) -> None:
        self._core = core
        self._rank = rank
        self._settings = ClusterSettings()
        self._applied = AppliedSettings()

    @property
    def is_cordoned(self) -> bool:
        """Tell whether new requests are to go to other engines."""
        return self._rank in self._settings.cordoned

    @property
    def may_step(self) -> bool:
        """Tell whether a step may run."""
        return not self.applied_settings.is_frozen

    @property
    def has_work(self) -> bool:
        """Tell whether a step may run and has anything to do."""
        return self._core.has_work() and self.may_step

    @property
    def applied_settings(self) -> AppliedSettings:
        """Return how far the settings are in force now."""
        if self._applied.settings_seq != self._settings.seq:  # a WAIT pause comes into force by itself
            self._applied = self._judge()
        return self._applied

    def apply(self, settings: ClusterSettings, on_progress: OnProgress) -> bool:
        """Bring newer settings into force, as far as that can be done at once; False when these are not newer.

        on_progress: called with what waking up does. Whatever waking up raises is the engine's death.
        """
        if settings.seq <= self._settings.seq:
            return False
        before = self._applied
        self._set_sleep(settings.sleep_level, on_progress)  # awake before any sequence may run
        self._set_pause(settings.pause)
        self._settings = settings
        # In force under their own number once ``_judge`` says so; until then steps run on, which a WAIT needs.
        self._applied = AppliedSettings(before.settings_seq)
        return True

    def _set_sleep(self, level: int, on_progress: OnProgress) -> None:
        before = self._settings.sleep_level
        if level < before:  # also from 2 to 1: there is no way from one level to a lighter one but through being awake
            self._core.wake_up(on_progress)
            before = 0
        if level > before:
            self._core.sleep(level)

    def _set_pause(self, mode: PauseMode) -> None:
        if mode is self._settings.pause:
            return
        if mode is PauseMode.RUN:
            self._core.scheduler.release_held_requests()
            return
        self._core.scheduler.hold_new_requests()  # idempotent: one mode after another holds the same sequences
        if mode is PauseMode.ABORT:
            self._core.scheduler.abort_earlier()

    def _judge(self) -> AppliedSettings:
        settings = self._settings
        is_sleeping = settings.sleep_level > 0
        if settings.pause is PauseMode.WAIT and not is_sleeping and self._core.scheduler.has_earlier():
            return self._applied
        return AppliedSettings(settings.seq, is_sleeping, is_sleeping or settings.pause is not PauseMode.RUN)
