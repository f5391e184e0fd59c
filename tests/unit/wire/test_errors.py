"""Errors carry what their handler needs."""

from engine.wire.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    UnknownMethodError,
    UtilityError,
    UtilityErrorCode,
)
from engine.wire.ids import EngineId
from engine.wire.messages import UtilityOutput


def test_a_dead_engine_is_named() -> None:
    assert str(EngineDeadError("signal 9", EngineId(2, 1))) == "engine 2.1: signal 9"
    assert EngineDeadError().engine_id is None


def test_a_partial_failure_names_each_rank_and_keeps_the_others_results() -> None:
    error = UtilityError("sleep", {3: "busy", 1: "dead"}, {0: "ok"})
    assert str(error) == "sleep failed on rank 1: dead, rank 3: busy"
    assert (error.failures, error.results) == ({1: "dead", 3: "busy"}, {0: "ok"})
    assert error.codes == dict.fromkeys((1, 3), UtilityErrorCode.FAILED)


def test_the_kind_of_a_failure_travels_beside_its_text() -> None:
    unknown = UtilityOutput.of_error(7, UnknownMethodError("nothing", ["echo"]))
    assert (unknown.call_id, unknown.error_code) == (7, UtilityErrorCode.UNKNOWN_METHOD)
    assert unknown.error == "no utility method 'nothing'; there are echo"
    raised = UtilityOutput.of_error(7, ValueError("UnknownMethodError: not really"))
    assert raised.error == "ValueError: UnknownMethodError: not really"
    assert raised.error_code is UtilityErrorCode.FAILED


def test_request_errors_say_which_field_or_when_to_come_back() -> None:
    assert InvalidRequestError("too long", "prompt").field == "prompt"
    assert OverloadedError("full", 2.5).retry_after_s == 2.5
