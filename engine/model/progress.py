"""A reader of the loading library's progress bars, which turns them into numbers that a report can carry."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from typing import TextIO

from tqdm import tqdm
from transformers.utils.logging import enable_progress_bar

from engine.interfaces.engine_core import OnProgress

_BAR = re.compile(r"^\s*(?P<what>[^\r\n:%]*):\s+(?P<percent>\d{1,3})%\|")


@contextlib.contextmanager
def progress_bars_to(on_progress: OnProgress, start: float, end: float) -> Iterator[None]:
    """Report every progress bar drawn inside as ``start..end``; everything else reaches standard error as before."""
    # The library draws on ``sys.stderr`` and offers no hook for its GGUF conversion, the slowest part.
    enable_progress_bar()  # type: ignore[no-untyped-call]  # an expert-parallel rank of this process switches them off
    interval = tqdm.monitor_interval
    tqdm.monitor_interval = 0  # else the first bar starts a thread that watches bars for as long as the process lives
    try:
        with contextlib.redirect_stderr(_BarReader(sys.stderr, on_progress, start, end)):
            yield
    finally:
        tqdm.monitor_interval = interval


class _BarReader(io.TextIOBase):
    """A standard error that reads progress bars instead of showing them."""

    def __init__(self, stderr: TextIO, on_progress: OnProgress, start: float, end: float) -> None:
        self._stderr = stderr
        self._on_progress = on_progress
        self._start = start
        self._span = end - start
        self._percent = -1
        self._after_bar = False

    def write(self, text: str) -> int:
        bar = _BAR.match(text.lstrip("\r"))
        if bar is not None:
            self._report(bar["what"].rstrip("."), int(bar["percent"]))
        elif text.strip() or not self._after_bar:  # what is blank behind a bar only ends or wipes the bar
            self._stderr.write(text)
        self._after_bar = bar is not None or (self._after_bar and not text.strip())
        return len(text)

    def _report(self, what: str, percent: int) -> None:
        if percent > self._percent:  # a second bar starts over; progress that went back would confuse
            self._percent = percent
            self._on_progress(what, self._start + self._span * percent / 100)
