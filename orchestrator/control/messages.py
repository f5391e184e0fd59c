"""The messages of the control channel, between processes of one start on one host; so no lock file holds its layout.

A new operation is a struct here, a member of ``Operation``, and a handler on the side that serves it.
"""

from typing import Any

from msgspec import Struct

from engine.wire.control import PauseMode
from engine.wire.ids import ClientId

# --- operations -----------------------------------------------------------------------------------------------------


class Pause(Struct, frozen=True, array_like=True, tag="pause"):
    """Let no engine step any more. mode: what becomes of the sequences that are there, not RUN."""

    mode: PauseMode


class Resume(Struct, frozen=True, array_like=True, tag="resume"):
    """Let the engines step again."""


class Sleep(Struct, frozen=True, array_like=True, tag="sleep"):
    """Give the devices' memory back. level: 1 or 2; an engine never gets lighter but by waking up."""

    level: int


class WakeUp(Struct, frozen=True, array_like=True, tag="wake"):
    """Undo ``Sleep``."""


class Cordon(Struct, frozen=True, array_like=True, tag="cordon"):
    """Let a rank take no new requests, or again (``is_on`` false)."""

    rank: int
    is_on: bool


class Rebalance(Struct, frozen=True, array_like=True, tag="rebalance"):
    """Place the experts of a lockstep group anew, by how often each was chosen."""


class SetLogLevel(Struct, frozen=True, array_like=True, tag="log"):
    """Change the least severe level that every process writes; empty gives each its own again."""

    level: str


class GetSettings(Struct, frozen=True, array_like=True, tag="settings"):
    """Ask for the settings as they are wanted now."""


class AbortRequests(Struct, frozen=True, array_like=True, tag="abort"):
    """End requests, whichever API process has them; each answers with the names it knew.

    names: x-request-ids or reply ids; None means all.
    """

    names: list[str] | None


class Scale(Struct, frozen=True, array_like=True, tag="scale"):
    """Begin a scale operation; the result is the operation. key: idempotency; the rest: see ``ScaleRequest``."""

    size: int | None
    remove: list[int]
    drain_timeout_s: float
    key: str | None


class ListScales(Struct, frozen=True, array_like=True, tag="scales"):
    """Ask for the scale operations that are remembered, the newest first."""


class GetScale(Struct, frozen=True, array_like=True, tag="get_scale"):
    """Ask for one scale operation."""

    operation_id: str


class CancelScale(Struct, frozen=True, array_like=True, tag="cancel_scale"):
    """Undo a scale operation that is not beyond its point of no return."""

    operation_id: str


class GetCapacity(Struct, frozen=True, array_like=True, tag="capacity"):
    """Ask how far the deployment could grow."""


class WaitEvents(Struct, frozen=True, array_like=True, tag="events"):
    """Ask for the events behind a number as soon as there are any, at the latest after ``wait_s``.

    after: None asks for the newest number alone, at once.
    """

    after: int | None
    wait_s: float


class ListReached(Struct, frozen=True, array_like=True, tag="reached"):
    """Ask an API process to which engines it can send requests; answered with their names."""


SettingsChange = Pause | Resume | Sleep | WakeUp | Cordon | Rebalance | SetLogLevel
"""Operations that change ``ClusterSettings``; answered with the new ones."""

ScaleCall = Scale | ListScales | GetScale | CancelScale | GetCapacity | WaitEvents
"""Operations of the scale service."""

Operation = SettingsChange | GetSettings | AbortRequests | ScaleCall | ListReached


# --- envelopes ------------------------------------------------------------------------------------------------------


class Fault(Struct, frozen=True, array_like=True):
    """Why an operation was not done.

    is_callers: the call itself is at fault, so a repetition fails again. subject: the field of it at fault. code: one
    word for programs.
    """

    message: str
    is_callers: bool = False
    subject: str = ""
    code: str = ""


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """First message of an API process: from now on it can be called. A newer incarnation replaces an older one."""

    client_id: ClientId


class Call(Struct, frozen=True, array_like=True, tag=2):
    """Call for an operation; answered by one ``CallResult`` of the same ``call_id``, which the caller draws.

    timeout_s: the caller waits no longer.
    """

    call_id: int
    operation: Operation
    timeout_s: float


class CallResult(Struct, frozen=True, array_like=True, tag=3):
    """The one answer of a call; ``result`` means something when there is no ``fault``."""

    call_id: int
    result: Any = None
    fault: Fault | None = None


Message = Hello | Call | CallResult
"""Both directions: either side may call the other."""
