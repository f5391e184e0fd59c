"""What every test of the runner wants."""

import pytest
import torch
from tqdm import tqdm


@pytest.fixture(autouse=True)
def no_progress_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the watcher of progress bars: saving a model draws some, and its thread would count as a leak."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Keep to one thread: several on shared cores are many times slower."""
    torch.set_num_threads(1)
