"""The event log of a deployment: what happened to its ranks, numbered, the newest kept for callers that follow it."""

import asyncio
import itertools
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

NUM_REMEMBERED = 1024


class EventKind(StrEnum):
    """The kinds of events. The words are part of the API."""

    RANK_JOINING = "rank_joining"
    RANK_READY = "rank_ready"
    RANK_SUSPECT = "rank_suspect"
    RANK_RECOVERED = "rank_recovered"
    RANK_HUNG = "rank_hung"
    RANK_DEAD = "rank_dead"
    RANK_REPLACEMENT = "rank_refill"
    RANK_LEFT = "rank_left"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. number: counts from 1. time: Unix seconds on the supervisor's host, for people."""

    number: int
    kind: EventKind
    time: float
    facts: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


class EventLog:
    """Keeps the newest events. A slow reader misses old ones; it never delays what happens."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=NUM_REMEMBERED)
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()

    def add(self, kind: EventKind, **facts: Any) -> None:
        """Note what has just happened. facts: plain data."""
        self._events.append(Event(next(self._numbers), kind, time.time(), facts))
        # A new event object for each note: whoever waits for the old one has been woken by it.
        self._news.set()
        self._news = asyncio.Event()

    @property
    def last_number(self) -> int:
        """Return the number of the newest event, 0 before the first."""
        return self._events[-1].number if self._events else 0

    def after(self, number: int) -> list[Event]:
        """Return the remembered events behind a number, oldest first."""
        return [event for event in self._events if event.number > number]

    async def wait_after(self, number: int, timeout_s: float) -> list[Event]:
        """Return the events behind a number as soon as there are any; none when ``timeout_s`` have passed."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (events := self.after(number)):
                    await self._news.wait()
                return events
        except TimeoutError:
            return []
