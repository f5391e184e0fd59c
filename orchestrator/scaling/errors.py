"""Why a scale operation is refused, before anything was started."""

from enum import StrEnum

from engine.wire.errors import ShoalError


class RefusalKind(StrEnum):
    """What the caller can do about it. The words are part of the API."""

    INVALID = "invalid"  # ask for something else
    CONFLICT = "conflict"  # wait for, or cancel, what goes on
    NO_CAPACITY = "no_capacity"  # give the cluster more, or ask for less
    NOT_FOUND = "not_found"  # ask for something that there is
    NOT_NOW = "not_now"  # the deployment is starting or stopping


class ScaleRefusedError(ShoalError):
    """A scale operation, or a word about one, is refused. field: of the caller's ask, where one is to blame."""

    def __init__(self, kind: RefusalKind, message: str, field: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.field = field
