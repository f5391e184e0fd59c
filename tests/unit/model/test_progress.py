"""Progress bars become numbers; everything else still reaches standard error."""

import sys
import threading

import pytest
from tqdm import tqdm

from engine.model.progress import progress_bars_to


def test_bars_become_progress_that_never_goes_back(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, float]] = []
    with progress_bars_to(lambda what, share: seen.append((what, share)), 0.5, 0.9):
        for name in ("Unpacking...", "Loading weights"):
            for _ in tqdm(range(4), desc=name, mininterval=0):
                pass
        print("a warning", file=sys.stderr)  # noqa: T201
    assert capsys.readouterr().err == "a warning\n"
    assert seen[0] == ("Unpacking", 0.5)
    assert [share for _, share in seen] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9])


def test_no_thread_stays_and_the_watcher_setting_comes_back() -> None:
    before, interval = threading.active_count(), tqdm.monitor_interval
    with progress_bars_to(lambda what, share: None, 0, 1):
        list(tqdm(range(3)))
    assert threading.active_count() == before
    assert tqdm.monitor_interval == interval
