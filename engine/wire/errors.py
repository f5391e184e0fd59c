"""The error tree of Shoal. Each error carries ids and says in its docstring whether a retry helps.

ShoalError
├── StartupError            a part of the deployment did not come up; names the part and the option
├── WireError
│   ├── MalformedMessageError   bytes that are no message of ours; counted and dropped by every receiver
│   └── AddressError            an endpoint that cannot be bound or connected
├── EngineError
│   ├── EngineDeadError         the engine (or the task that reads its outputs) is gone
│   ├── UtilityError            a utility call failed on some ranks; holds the others' results
│   └── UnknownMethodError      no utility method of that name; names those there are
└── RequestError
    ├── InvalidRequestError     the caller's fault; names the field
    └── OverloadedError         no room now; retry after a while
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from engine.wire.ids import EngineId


class ShoalError(Exception):
    """Root of every error Shoal raises on purpose."""


class StartupError(ShoalError):
    """A part of the deployment did not come up within its deadline, or cannot come up at all. Fix and restart."""


class WireError(ShoalError):
    """Something about the channels between processes."""


class MalformedMessageError(WireError):
    """Bytes that do not decode to a message of this wire. Never retried; the receiver drops them."""


class AddressError(WireError):
    """An endpoint that cannot be bound or connected, with the address and the system's reason."""


class EngineError(ShoalError):
    """Something about an engine."""


class EngineDeadError(EngineError):
    """The engine, or the task that reads the output channel, is gone. A retry reaches another rank.

    engine_id: which engine; None when this client is closed, with its channels to all engines.
    """

    def __init__(self, reason: str = "the client is closed", engine_id: EngineId | None = None) -> None:
        super().__init__(reason if engine_id is None else f"engine {engine_id}: {reason}")
        self.engine_id = engine_id


class UtilityErrorCode(IntEnum):
    """How a utility call failed on one rank.

    FAILED: the method raised. UNKNOWN_METHOD: there is none of that name. The other two never travel, the client finds
    them out itself. NO_ANSWER: not within the caller's time; it may have been done. ENGINE_DEAD: none will come.
    """

    FAILED = 0
    UNKNOWN_METHOD = 1
    NO_ANSWER = 2
    ENGINE_DEAD = 3


class UtilityError(EngineError):
    """A utility call failed on some ranks.

    failures: rank -> reason, for people. codes: rank -> the kind of that failure, for programs; FAILED for those that
    are not named. results: rank -> result of the ranks that did answer.
    """

    def __init__(
        self,
        method: str,
        failures: Mapping[int, str],
        results: Mapping[int, Any],
        codes: Mapping[int, UtilityErrorCode] | None = None,
    ) -> None:
        ranks = ", ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failures.items()))
        super().__init__(f"{method} failed on {ranks}")
        self.method = method
        self.failures = dict(failures)
        self.results = dict(results)
        self.codes = dict.fromkeys(failures, UtilityErrorCode.FAILED) | dict(codes or {})


class UnknownMethodError(EngineError, ValueError):
    """No utility method of that name is registered. A retry fails again. Travels as ``UNKNOWN_METHOD``."""

    def __init__(self, method: str, known: Sequence[str]) -> None:
        super().__init__(f"no utility method {method!r}; there are {', '.join(known)}")


class RequestError(ShoalError):
    """Something about one request; every other request is unaffected."""


class InvalidRequestError(RequestError):
    """The request cannot be served as asked. A retry of the same request fails again.

    field: the request field at fault, in the API's spelling; None when it is the whole body.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class OverloadedError(RequestError):
    """No room for this request now.

    retry_after_s: seconds after which a retry is sensible.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
