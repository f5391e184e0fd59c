"""Traces: sequences of events in a short notation, replayed on the machines.

``die0`` is the event of that name at rank 0; ``die0*`` is its other way (a death that breaks no connection, work that
ends with the step). ``get0`` delivers the newest state, ``get0-1`` the one before it. ``restart`` has no rank.
"""

import re

from tests.model.enabled import Event
from tests.model.events import Rules
from tests.model.settle import settlers
from tests.model.world import ViolationError, World

_STEP = re.compile(r"([a-z]+)(\d*)(?:-(\d+))?(\*?)")


def read_step(step: str, world: World) -> Event:
    """Return the event that a step of a trace means in a world."""
    match = _STEP.fullmatch(step)
    assert match is not None, f"{step} is no step"
    name, rank, back, star = match.groups()
    way = world.num_states - 1 - int(back or 0) if name == "get" else int(bool(star))
    return name, int(rank) if rank else -1, way


def write_step(event: Event, world: World) -> str:
    """Return the step that means an event in a world."""
    name, rank, way = event
    back = world.num_states - 1 - way if name == "get" else 0
    return (
        name + (str(rank) if rank >= 0 else "") + (f"-{back}" if back else "") + ("*" if way and name != "get" else "")
    )


def write(trace: tuple[Event, ...], rules: Rules, start: World) -> str:
    """Return a trace in the notation."""
    world, steps = start.copy(), []
    for event in trace:
        steps.append(write_step(event, world))
        try:
            rules.happen(world, event)
        except ViolationError:
            break
    return " ".join(steps)


def play(trace: str, rules: Rules, world: World) -> None:
    """Let the steps of a trace happen that can.

    Raises:
        ViolationError: one breaks a rule.
    """
    for step in trace.split():
        event = read_step(step, world)
        if event in set(rules.enabled(world)):
            rules.happen(world, event)


def broken_by(trace: str, rules: Rules, start: World) -> str | None:
    """Return which rule a trace breaks, on the way or by what comes of it; None when it breaks none.

    A step that cannot happen, because the machines did something else, is left out.
    """
    world = start.copy()
    try:
        play(trace, rules, world)
        for settler in settlers(rules):
            settler.check(world)
    except ViolationError as error:
        return str(error)
    return None
