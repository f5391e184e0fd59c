"""The progress of a start: one bar per rank on a terminal, one log line per event elsewhere."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from engine.wire.ids import EngineId
from orchestrator.ranks.replica_table import Replica

_LOG = logging.getLogger(__name__)


class StartProgress(Protocol):
    """Follows the start of a deployment."""

    def show(self, replica: Replica) -> None:
        """Show what a replica is doing now."""

    def show_step(self, text: str) -> None:
        """Show one step of the start that belongs to no rank."""


class LineProgress:
    """Logs one line per event; a percent more is no event."""

    def __init__(self) -> None:
        self._shown: dict[int, tuple[EngineId, str]] = {}

    def show(self, replica: Replica) -> None:
        """Log what a replica is doing when that has changed."""
        rank, news = replica.engine_id.rank, (replica.engine_id, replica.activity)
        if self._shown.get(rank) != news:
            self._shown[rank] = news
            _LOG.info("rank %d: %s", rank, replica.activity)

    def show_step(self, text: str) -> None:
        """Log one step."""
        _LOG.info("%s", text)


class BarProgress:
    """Draws one bar per rank below the log lines."""

    def __init__(self, progress: Progress, num_ranks: int) -> None:
        self._progress = progress
        self._bars: list[TaskID] = [
            progress.add_task(f"rank {rank}", total=1.0, activity="starting") for rank in range(num_ranks)
        ]

    def show(self, replica: Replica) -> None:
        """Move a rank's bar."""
        self._progress.update(self._bars[replica.engine_id.rank], completed=replica.progress, activity=replica.activity)

    def show_step(self, text: str) -> None:
        """Print one step above the bars."""
        self._progress.console.print(text, highlight=False)


@contextmanager
def start_progress(num_ranks: int) -> Iterator[StartProgress]:
    """Show the start of ranks 0..n-1 on standard error until the block ends."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield LineProgress()
        return
    activity = TextColumn("{task.fields[activity]}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), activity)
    with Progress(*columns, console=console, transient=True) as progress, _logs_above_bars():
        yield BarProgress(progress, num_ranks)


@contextmanager
def _logs_above_bars() -> Iterator[None]:
    # While bars are drawn, rich puts a proxy at sys.stderr that prints above them; log handlers hold the old stream.
    handlers = [h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler)]
    streams = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, streams, strict=True):
            if stream is not None:
                handler.setStream(stream)
