"""The register of scale operations: one runs at a time, one per key, the last ones are remembered. Pure."""

from collections.abc import Mapping
from typing import Any

from orchestrator.scaling.operation import ScaleOperation
from orchestrator.scaling.plan import RefusalKind, ScaleLimits, ScalePlan, ScaleRefusedError, ScaleRequest, plan_scale
from orchestrator.scaling.steps import ENDS, ScaleDeadlines

NUM_REMEMBERED = 64


class ScaleOperations:
    """The operations of a deployment. is_lockstep: whether its ranks form a group. limits, deadlines: of every one."""

    def __init__(self, limits: ScaleLimits, deadlines: ScaleDeadlines, is_lockstep: bool = False) -> None:
        self.limits = limits
        self.is_lockstep = is_lockstep
        self._deadlines = deadlines
        self._operations: dict[str, ScaleOperation] = {}
        self._num_begun = 0

    @property
    def running(self) -> ScaleOperation | None:
        """Return the one that is not over, if any."""
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
        # Also among those that are over: a caller that repeats its request must not scale twice.
        known = next((op for op in self._operations.values() if key is not None and op.key == key), None)
        if known is not None and known.request != request:
            message = f"this key named operation {known.id}, which was asked for something else"
            raise ScaleRefusedError(RefusalKind.INVALID, message, "idempotency_key")
        return known

    def plan(self, request: ScaleRequest, ranks: Mapping[int, bool]) -> ScalePlan:
        """Return the plan of a new operation; see ``plan_scale``.

        Raises:
            ScaleRefusedError: another one is running, or the request is invalid.
        """
        running = self.running
        if running is not None:
            message = f"operation {running.id} is running, in phase {running.phase}; wait for it or cancel it"
            raise ScaleRefusedError(RefusalKind.CONFLICT, message)
        return plan_scale(request, ranks, self.limits)

    def begin(
        self, request: ScaleRequest, key: str | None, plan: ScalePlan, now: float, created_at: float
    ) -> ScaleOperation:
        """Begin what was planned; no other operation may have begun meanwhile.

        now: monotonic seconds, as in ``ScaleOperation.advance``. created_at: Unix time, for people.
        """
        assert self.running is None, "one at a time"
        self._num_begun += 1
        operation_id = f"scale-{self._num_begun}"
        operation = ScaleOperation(operation_id, key, request, plan, self.is_lockstep, self._deadlines, now, created_at)
        self._operations[operation_id] = operation
        # The oldest go first, and never the running one, which is the newest.
        while len(self._operations) > NUM_REMEMBERED:
            del self._operations[next(iter(self._operations))]
        return operation


def describe_operation(operation: ScaleOperation, now: float) -> dict[str, Any]:
    """Return an operation as plain data, for the API and for events. Durations are seconds, ``created`` is Unix time.

    ``status`` is ``running`` or how it ended; ``eta_s`` is an estimate, null while there is nothing to estimate from.
    """
    eta_s = operation.eta_s(now)
    plan, request = operation.plan, operation.request
    return {
        "id": operation.id,
        "idempotency_key": operation.key,
        "created": int(operation.created_at),
        "target": {"size": plan.size_after, "remove": list(request.remove)},
        "drain_timeout_s": request.drain_timeout_s,
        "size_before": plan.size_before,
        "joining": list(plan.joining),
        "leaving": list(plan.leaving),
        "status": str(operation.phase) if operation.phase in ENDS else "running",
        "phase": str(operation.phase),
        "progress": round(operation.progress, 4),
        "elapsed_s": round(operation.elapsed_s(now), 3),
        "eta_s": None if eta_s is None else round(eta_s, 3),
        "can_cancel": not operation.is_over and not operation.is_committed,
        "blocking_ranks": list(operation.blocking_ranks),
        "error": operation.error,
        "history": [
            {
                "phase": str(record.phase),
                "since_s": round(record.since_s, 3),
                "duration_s": None if record.duration_s is None else round(record.duration_s, 3),
            }
            for record in operation.history
        ],
    }
