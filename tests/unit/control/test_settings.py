"""What the operator wants, change by change."""

import pytest

from engine.wire.control import ClusterSettings, PauseMode
from orchestrator.control.errors import ControlRefusedError
from orchestrator.control.messages import Cordon, Pause, Resume, SetLogLevel, SettingsChange, Sleep, WakeUp
from orchestrator.control.settings import SettingsStore


@pytest.fixture
def store() -> SettingsStore:
    return SettingsStore(lambda: [0, 1, 5])


def test_every_change_is_a_new_number_and_keeps_the_rest(store: SettingsStore) -> None:
    store.change(Cordon(5, is_on=True))
    store.change(Cordon(0, is_on=True))
    store.change(SetLogLevel("debug"))
    store.change(Sleep(1))
    assert store.change(Pause(PauseMode.WAIT)) == ClusterSettings(5, PauseMode.WAIT, 1, [0, 5], "debug")
    store.change(Resume())
    store.change(WakeUp())
    store.change(Cordon(5, is_on=False))
    assert store.change(SetLogLevel("")) == ClusterSettings(9, PauseMode.RUN, 0, [0], "")


@pytest.mark.parametrize("change", [Resume(), WakeUp(), Cordon(1, is_on=False), SetLogLevel("")])
def test_what_changes_nothing_keeps_its_number(store: SettingsStore, change: SettingsChange) -> None:
    assert store.change(change) == ClusterSettings()


def test_the_same_pause_twice_is_one(store: SettingsStore) -> None:
    assert store.change(Pause(PauseMode.KEEP)) == store.change(Pause(PauseMode.KEEP))
    assert store.change(Pause(PauseMode.ABORT)).seq == 2


def test_sleep_only_gets_deeper(store: SettingsStore) -> None:
    assert store.change(Sleep(2)) == store.change(Sleep(1))


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
    store: SettingsStore, change: SettingsChange, subject: str, words: str
) -> None:
    with pytest.raises(ControlRefusedError, match=words) as refused:
        store.change(change)
    assert (refused.value.fault.is_callers, refused.value.fault.subject) == (True, subject)
    assert store.current == ClusterSettings()
