"""Reports that decode and yet make no sense: what the coordinator publishes behind them can be encoded."""

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from engine.wire.codec import encode, report_decoder
from engine.wire.errors import MalformedMessageError
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import ClientReport, EngineReport
from engine.wire.states import EnginePhase
from lb.coordinator.state import CoordinatorState
from tests.unit.wire.mutations import mutations
from tests.unit.wire.test_codec import EXAMPLES

NUM_MUTATIONS = 20_000
REPORTS_PER_LIFE = 20
HUGE = 2**64 - 1

ENGINE = EngineReport(EngineId(0, 1), 1, 0, 0, 0, 0, EnginePhase.IDLE, 0, False, {ClientId(0, 1): 1}, Load())


def publish(state: CoordinatorState, now: float) -> None:
    """Do what the process does after each batch of reports."""
    state.expire(now)
    state.next_expiry(now)
    state.is_observed()
    encode(state.group_state())
    encode(state.load_snapshot())


@pytest.mark.parametrize("kinds", [[EngineReport], [EngineReport, ClientReport], []], ids=["engines", "both", "all"])
def test_mutated_reports_never_break_what_is_published(kinds: list[type]) -> None:
    examples = [report for report in EXAMPLES[report_decoder] if not kinds or type(report) in kinds]
    decoder, num_taken = report_decoder(), 0
    state = CoordinatorState(1, client_silence_s=10.0, stall_timeout_s=60.0)
    for frame in itertools.islice(mutations([encode(report) for report in examples], seed=5), NUM_MUTATIONS):
        try:
            report = decoder.decode(frame)
        except MalformedMessageError:
            continue
        num_taken += 1
        if num_taken % REPORTS_PER_LIFE == 0:  # one odd number may shadow all reports that come after it
            state = CoordinatorState(1, client_silence_s=10.0, stall_timeout_s=60.0)
        state.on_report(report, now=0.01 * num_taken)
        publish(state, now=0.01 * num_taken)
    assert num_taken > REPORTS_PER_LIFE


@pytest.mark.parametrize(
    "changes",
    [
        {"max_epoch_seen": HUGE},
        {"epoch": HUGE, "ready_epoch": HUGE, "wave": HUGE, "coll_seq": HUGE},
        {"report_seq": HUGE, "settings_seq": HUGE, "applied": {ClientId(0, 1): HUGE}},
        {"load": Load(num_steps=HUGE, num_waiting_tokens=HUGE, kv_usage=float("nan"))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_largest_numbers_that_decode_can_be_published_and_others_still_join(changes: dict[str, Any]) -> None:
    state = CoordinatorState(1, client_silence_s=10.0, stall_timeout_s=60.0)
    state.on_report(replace(ENGINE, engine_id=EngineId(7, 1), **changes), now=0.0)
    publish(state, now=0.0)
    state.on_report(ENGINE, now=0.1)
    publish(state, now=0.1)
    assert ENGINE.engine_id in state.group_state().committed.members
