"""Searches: breadth first through every world that can come about, and long random walks."""

import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tests.model.enabled import Event
from tests.model.events import Rules
from tests.model.settle import Settler, settlers
from tests.model.world import ViolationError, World


@dataclass(frozen=True)
class Found:
    """Result of a search. is_exhausted: all worlds were seen. problem: the first rule broken, after trace."""

    num_worlds: int
    num_events: int
    is_exhausted: bool
    problem: str | None = None
    trace: tuple[Event, ...] = ()


class Search:
    """Visits each world once, nearest first, and checks that it comes to rest."""

    def __init__(self, rules: Rules, max_worlds: int = 10**9, max_s: float = float("inf")) -> None:
        """max_s: of this process's CPU, so that a busy machine sees as much."""
        self._rules = rules
        self._settlers = settlers(rules)
        self._max_worlds = max_worlds
        self._max_s = max_s

    def run(self, start: World) -> Found:
        """Search from a world on until all is seen, or a bound is reached, or a rule is broken."""
        key = start.key()
        came: dict[int, tuple[int, Event]] = {}
        seen = {key}
        queue = deque([(start, key)])
        num_events = 0
        ends_at = time.process_time() + self._max_s
        while queue:
            world, key = queue.popleft()
            try:
                self._settlers[len(seen) % len(self._settlers)].check(world)
            except ViolationError as error:
                return Found(len(seen), num_events, False, str(error), _trace(came, key))
            for event in self._rules.enabled(world):
                num_events += 1
                try:
                    following = self._rules.after(world, event)
                except ViolationError as error:
                    return Found(len(seen), num_events, False, str(error), (*_trace(came, key), event))
                following_key = following.key()
                if following_key not in seen:
                    seen.add(following_key)
                    came[following_key] = (key, event)
                    queue.append((following, following_key))
            if len(seen) >= self._max_worlds or time.process_time() > ends_at:
                return Found(len(seen), num_events, False)
        return Found(len(seen), num_events, True)


def _trace(came: dict[int, tuple[int, Event]], key: int) -> tuple[Event, ...]:
    events = []
    while key in came:
        key, event = came[key]
        events.append(event)
    return tuple(reversed(events))


_WEIGHTS = {
    "restart": 1,
    "pause": 1,
    "join": 2,
    "cordon": 1,
    "restore": 1,
    "rebalance": 1,
    "die": 1,
    "fail": 2,
    "replacement": 2,
    "request": 3,
    "finish": 3,
    "firstreq": 2,
}
_USUAL = 8


class Walker:
    """Walks at random through worlds too large to be searched, and checks now and then that they come to rest."""

    def __init__(self, rules: Rules, seed: int, num_steps: int = 120, check_every: int = 10) -> None:
        self._rules = rules
        self._random = random.Random(seed)
        self._settler = Settler(
            rules, is_backwards=seed % 2 == 1, are_lost=seed % 3 == 1, are_joining_mute=seed % 5 == 1
        )
        self._num_steps = num_steps
        self._check_every = check_every

    def run(self, start: World) -> Found:
        """Walk from a world on until a rule is broken, nothing can happen, or the steps are done."""
        world, trace = start.copy(), []
        for step in range(1, self._num_steps + 1):
            events = list(self._rules.enabled(world))
            if not events:
                break
            event = self._random.choices(events, [_WEIGHTS.get(name, _USUAL) for name, _, _ in events])[0]
            trace.append(event)
            try:
                self._rules.happen(world, event)
                if step % self._check_every == 0:
                    self._settler.check(world)
            except ViolationError as error:
                return Found(step, step, False, str(error), tuple(trace))
        return Found(len(trace), len(trace), False)


def shortened(rules: Rules, start: World, trace: tuple[Event, ...]) -> tuple[Event, ...]:
    """Return a trace from which no event can be left out without losing that it breaks some rule."""
    checks = settlers(rules)
    size = max(1, len(trace) // 2)
    while True:
        for at in range(0, len(trace), size):
            candidate = trace[:at] + trace[at + size :]
            kept = _broken_by(rules, checks, start, candidate)
            if kept is not None:
                trace = kept
                break
        else:
            if size == 1:
                return trace
            size //= 2


def _broken_by(rules: Rules, checks: list[Settler], start: World, trace: Iterable[Event]) -> tuple[Event, ...] | None:
    """Return the events of a trace up to where a rule breaks, without those that cannot happen; None if none does."""
    world, kept = start.copy(), []
    try:
        for event in trace:
            if event in set(rules.enabled(world)):
                kept.append(event)
                rules.happen(world, event)
        for settler in checks:
            settler.check(world)
    except ViolationError:
        return tuple(kept)
    return None
