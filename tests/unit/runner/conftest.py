"""Saving a model draws progress bars too; their watcher thread would count as a leak of the first test."""

import pytest
from tqdm import tqdm


@pytest.fixture(autouse=True)
def no_progress_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
