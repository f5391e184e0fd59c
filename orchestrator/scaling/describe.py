"""An operation as plain data, for the API and for events."""

from typing import Any

from orchestrator.scaling.operation import ScaleOperation
from orchestrator.scaling.steps import ENDS


def describe_operation(operation: ScaleOperation, now: float) -> dict[str, Any]:
    """Return all that is known of an operation. Durations are seconds, ``created`` is Unix time.

    ``status`` is ``running`` or how it ended; ``eta_s`` is a guess, null while there is nothing to guess from.
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
