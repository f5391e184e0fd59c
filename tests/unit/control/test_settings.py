"""What the operator wants, change by change."""

import pytest

from engine.wire.messages import ClusterSettings, PauseMode
from orchestrator.control.errors import ControlRefusedError
from orchestrator.control.messages import Cordon, Pause, Resume, SetLogLevel, SettingsChange, Sleep, WakeUp
from orchestrator.control.settings import SettingsKeeper


@pytest.fixture
def keeper() -> SettingsKeeper:
    return SettingsKeeper(lambda: [0, 1, 5])


def test_every_change_is_a_new_number_and_keeps_the_rest(keeper: SettingsKeeper) -> None:
    keeper.change(Cordon(5, is_on=True))
    keeper.change(Cordon(0, is_on=True))
    keeper.change(SetLogLevel("debug"))
    keeper.change(Sleep(1))
    assert keeper.change(Pause(PauseMode.WAIT)) == ClusterSettings(5, PauseMode.WAIT, 1, [0, 5], "debug")
    keeper.change(Resume())
    keeper.change(WakeUp())
    keeper.change(Cordon(5, is_on=False))
    assert keeper.change(SetLogLevel("")) == ClusterSettings(9, PauseMode.RUN, 0, [0], "")


@pytest.mark.parametrize("change", [Resume(), WakeUp(), Cordon(1, is_on=False), SetLogLevel("")])
def test_what_changes_nothing_keeps_its_number(keeper: SettingsKeeper, change: SettingsChange) -> None:
    assert keeper.change(change) == ClusterSettings()


def test_the_same_pause_twice_is_one(keeper: SettingsKeeper) -> None:
    assert keeper.change(Pause(PauseMode.KEEP)) == keeper.change(Pause(PauseMode.KEEP))
    assert keeper.change(Pause(PauseMode.ABORT)).seq == 2


def test_sleep_only_gets_deeper(keeper: SettingsKeeper) -> None:
    assert keeper.change(Sleep(2)) == keeper.change(Sleep(1))


@pytest.mark.parametrize(
    ("change", "subject", "words"),
    [
        (Pause(PauseMode.RUN), "mode", "abort, wait or keep"),
        (Sleep(0), "level", r"1\.\.2, not 0"),
        (Sleep(3), "level", r"1\.\.2, not 3"),
        (Cordon(2, is_on=True), "rank", "no rank 2; valid: 0, 1, 5"),
        (SetLogLevel("loud"), "level", "debug, info, warning, error, not 'loud'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(
    keeper: SettingsKeeper, change: SettingsChange, subject: str, words: str
) -> None:
    with pytest.raises(ControlRefusedError, match=words) as refused:
        keeper.change(change)
    assert (refused.value.fault.is_callers, refused.value.fault.subject) == (True, subject)
    assert keeper.current == ClusterSettings()
