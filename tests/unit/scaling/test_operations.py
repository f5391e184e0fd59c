"""One scale operation at a time, and one for each key."""

import pytest

from orchestrator.scaling.observed_state import ObservedState
from orchestrator.scaling.operation import ScaleOperation
from orchestrator.scaling.operations import NUM_REMEMBERED, ScaleOperations
from orchestrator.scaling.plan import RefusalKind, ScaleLimits, ScaleRefusedError, ScaleRequest
from orchestrator.scaling.steps import ScaleDeadlines

RANKS = {0: True, 1: True}
GROW = ScaleRequest(size=3)


def register() -> ScaleOperations:
    return ScaleOperations(ScaleLimits(), ScaleDeadlines())


def begin(operations: ScaleOperations, request: ScaleRequest, key: str | None = None) -> ScaleOperation:
    return operations.begin(request, key, operations.plan(request, RANKS), 0.0, 0.0)


def test_a_competitor_is_refused_with_the_operation_that_runs() -> None:
    operations = register()
    running = begin(operations, GROW)
    with pytest.raises(ScaleRefusedError, match=f"operation {running.id} is running, in phase reserve") as refused:
        operations.plan(ScaleRequest(size=1), RANKS)
    assert refused.value.kind is RefusalKind.CONFLICT
    running.cancel()
    assert running.advance(ObservedState(), 1.0) == []
    assert operations.plan(ScaleRequest(size=1), RANKS).leaving == (1,)


def test_the_same_key_names_the_same_operation_also_when_that_is_over() -> None:
    operations = register()
    done = begin(operations, ScaleRequest(size=2), "k")
    assert done.is_over
    assert operations.repeated(ScaleRequest(size=2), "k") is done
    assert operations.repeated(ScaleRequest(size=2), "other") is None
    assert operations.repeated(ScaleRequest(size=2), None) is None
    with pytest.raises(ScaleRefusedError, match=f"named operation {done.id}") as refused:
        operations.repeated(GROW, "k")
    assert refused.value.field == "idempotency_key"


def test_the_newest_operations_are_remembered() -> None:
    operations = register()
    ids = [begin(operations, ScaleRequest(size=2)).id for _ in range(NUM_REMEMBERED + 2)]
    assert [operation.id for operation in operations.all()] == list(reversed(ids[2:]))
    with pytest.raises(ScaleRefusedError, match="no operation scale-1;") as refused:
        operations.get(ids[0])
    assert refused.value.kind is RefusalKind.NOT_FOUND
    assert operations.get(ids[-1]).id == ids[-1]
