"""Why one sequence of a step cannot go on."""

from typing import NamedTuple

from engine.wire.messages import ErrorKind


class Fault(NamedTuple):
    """reason: one sentence for the user. kind: whose fault it is."""

    reason: str
    kind: ErrorKind
