"""Engine reports for tests."""

from typing import Any

from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.messages import EngineReport
from engine.wire.states import EnginePhase


def report(engine_id: EngineId, seq: int, phase: EnginePhase = EnginePhase.IDLE, **fields: Any) -> EngineReport:
    """Return a report of an engine without work."""
    return EngineReport(
        engine_id=engine_id,
        report_seq=seq,
        epoch=0,
        ready_epoch=0,
        max_epoch_seen=0,
        wave=0,
        phase=phase,
        coll_seq=0,
        has_work=False,
        applied={},
        load=Load(),
        **fields,
    )
