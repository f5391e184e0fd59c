"""All scale operations of a deployment: one at a time, each with a name, the last ones remembered. Pure."""

import time
from collections.abc import Callable, Mapping

from orchestrator.scaling.errors import RefusalKind, ScaleRefusedError
from orchestrator.scaling.operation import ScaleOperation
from orchestrator.scaling.plan import ScaleLimits, ScalePlan, ScaleRequest, plan_scale
from orchestrator.scaling.steps import ScaleDeadlines

NUM_REMEMBERED = 64


class ScaleOperations:
    """The register of operations. deadlines, limits: of every one. is_lockstep: whether a group changes with them."""

    def __init__(
        self,
        limits: ScaleLimits,
        deadlines: ScaleDeadlines,
        is_lockstep: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._deadlines = deadlines
        self.is_lockstep = is_lockstep
        self._clock = clock
        self._wall_clock = wall_clock
        self._operations: dict[str, ScaleOperation] = {}
        self._num_drawn = 0

    @property
    def running(self) -> ScaleOperation | None:
        """Return the one that is not over."""
        return next((operation for operation in self._operations.values() if not operation.is_over), None)

    def all(self) -> list[ScaleOperation]:
        """Return those that are remembered, the newest first."""
        return list(reversed(self._operations.values()))

    def get(self, operation_id: str) -> ScaleOperation:
        """Return one by its id.

        Raises:
            ScaleRefusedError: there is no such operation, or not any more.
        """
        if operation_id not in self._operations:
            message = f"there is no operation {operation_id}; the last {NUM_REMEMBERED} are remembered"
            raise ScaleRefusedError(RefusalKind.NOT_FOUND, message, "id")
        return self._operations[operation_id]

    def repeated(self, request: ScaleRequest, key: str | None) -> ScaleOperation | None:
        """Return the operation that the same caller began with the same key, None when this is a new one.

        Raises:
            ScaleRefusedError: the key was used for something else.
        """
        known = next((op for op in self._operations.values() if key is not None and op.key == key), None)
        if known is not None and known.request != request:
            message = f"this key named operation {known.id}, which was asked for something else"
            raise ScaleRefusedError(RefusalKind.INVALID, message, "idempotency_key")
        return known

    def plan(self, request: ScaleRequest, ranks: Mapping[int, bool]) -> ScalePlan:
        """Decide what a new operation would do; see ``plan_scale``.

        Raises:
            ScaleRefusedError: another one is running, or the request makes no sense.
        """
        running = self.running
        if running is not None:
            message = f"operation {running.id} is running, in phase {running.phase}; wait for it or cancel it"
            raise ScaleRefusedError(RefusalKind.CONFLICT, message)
        return plan_scale(request, ranks, self.limits)

    def begin(self, request: ScaleRequest, key: str | None, plan: ScalePlan) -> ScaleOperation:
        """Begin what was planned; nobody else may have begun meanwhile."""
        assert self.running is None, "one at a time"
        self._num_drawn += 1
        operation_id = f"scale-{self._num_drawn}"
        operation = ScaleOperation(
            operation_id, key, request, plan, self.is_lockstep, self._deadlines, self._clock(), self._wall_clock()
        )
        self._operations[operation_id] = operation
        while len(self._operations) > NUM_REMEMBERED:
            del self._operations[next(iter(self._operations))]
        return operation
