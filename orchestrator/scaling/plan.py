"""The plan of a scale operation: from an operator's request to the ranks that join and leave, or a refusal. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, islice

from engine.wire.errors import ShoalError
from orchestrator.config.defaults import DRAIN_TIMEOUT_S, MAX_RANKS


class RefusalKind(StrEnum):
    """What the caller can do about it. The words are part of the API."""

    INVALID = "invalid"  # ask for something else
    CONFLICT = "conflict"  # wait for, or cancel, what goes on
    NO_CAPACITY = "no_capacity"  # give the cluster more, or ask for less
    NOT_FOUND = "not_found"  # ask for something that there is
    NOT_NOW = "not_now"  # the deployment is starting or stopping


class ScaleRefusedError(ShoalError):
    """A call about scaling is refused, before anything was started. field: of the request, where one is at fault."""

    def __init__(self, kind: RefusalKind, message: str, field: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """What an operator asks for: a number of ranks, ranks to remove, or both.

    size: absolute; None is as many as there are, less ``remove``. With both, new ranks join until there are ``size``.
    drain_timeout_s: seconds that a leaving rank may finish its requests in; the rest migrates to other ranks.
    """

    size: int | None = None
    remove: tuple[int, ...] = ()
    drain_timeout_s: float = DRAIN_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    """Sizes a deployment may have, both included. min_size: at least 1."""

    min_size: int = 1
    max_size: int = MAX_RANKS


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """Ranks that join and leave, both ascending, and the sizes before and after. Neither: there is nothing to do."""

    joining: tuple[int, ...]
    leaving: tuple[int, ...]
    size_before: int
    size_after: int


def plan_scale(request: ScaleRequest, ranks: Mapping[int, bool], limits: ScaleLimits) -> ScalePlan:
    """Decide which ranks join and leave.

    ranks: those there are, and whether an engine will ever serve there again.
    New ranks take the lowest free numbers: a rank that was removed comes back under its next incarnation.
    Unless they are named, ranks that will not serve again leave first, then the highest ones.

    Raises:
        ScaleRefusedError: the request is invalid; names the field and what is valid.
    """
    _check_named(request.remove, ranks)
    size = len(ranks) - len(request.remove) if request.size is None else request.size
    _check_size(size, "size" if request.size is not None else "remove", limits)
    staying = [rank for rank in ranks if rank not in request.remove]
    surplus = sorted(staying, key=lambda rank: (ranks[rank], -rank))[: max(0, len(staying) - size)]
    joining = _lowest_free(ranks, max(0, size - len(staying)))
    leaving = tuple(sorted({*request.remove, *surplus}))
    # New ranks serve before old ones leave, so with new ones somebody always will.
    if leaving and not joining and not any(ranks[rank] for rank in ranks if rank not in leaving):
        raise ScaleRefusedError(RefusalKind.INVALID, "no rank that serves would be left", "remove")
    return ScalePlan(joining, leaving, len(ranks), size)


def _check_named(remove: Sequence[int], ranks: Collection[int]) -> None:
    unknown = [rank for rank in remove if rank not in ranks]
    if unknown:
        valid = ", ".join(map(str, sorted(ranks)))
        raise ScaleRefusedError(RefusalKind.INVALID, f"there is no rank {unknown[0]}; valid: {valid}", "remove")
    if len(set(remove)) < len(remove):
        raise ScaleRefusedError(RefusalKind.INVALID, "remove names a rank twice", "remove")


def _check_size(size: int, field: str, limits: ScaleLimits) -> None:
    if size < limits.min_size:
        message = f"{size} ranks are too few: {limits.min_size} must stay (--min-data-parallel-size)"
        raise ScaleRefusedError(RefusalKind.INVALID, message, field)
    if size > limits.max_size:
        message = f"{size} ranks are too many: at most {limits.max_size} (--max-data-parallel-size)"
        raise ScaleRefusedError(RefusalKind.INVALID, message, field)


def _lowest_free(taken: Collection[int], num: int) -> tuple[int, ...]:
    return tuple(islice((rank for rank in count() if rank not in taken), num))
