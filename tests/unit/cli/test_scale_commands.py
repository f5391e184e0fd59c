"""``shoal scale`` and ``shoal events``: what is asked for, and what is printed."""

from typing import Any

import pytest

from orchestrator.cli.http_client import DeploymentClient
from orchestrator.cli.main import COMMANDS
from orchestrator.cli.parser import make_parser
from orchestrator.cli.scale_commands import _read_events, _scale_body, describe, describe_event

OPERATION = {
    "id": "scale-3",
    "size_before": 2,
    "target": {"size": 2, "remove": [0]},
    "joining": [2],
    "leaving": [0],
    "phase": "failed",
    "error": "no place for rank 2",
}


class FiveRanks(DeploymentClient):
    """A deployment of five ranks."""

    def __init__(self) -> None:
        super().__init__("http://x", None, None, {})

    def call(self, method: str, path: str, timeout_s: float, body: Any = None) -> Any:
        assert (method, path) == ("GET", "/v1/cluster/capacity")
        return {"ranks": 5}


@pytest.mark.parametrize(
    ("arguments", "size", "remove"),
    [
        (["4"], 4, []),
        (["+2"], 7, []),
        (["-2"], 3, []),
        (["5", "--remove", "0", "--remove", "3"], 5, [0, 3]),
        (["--remove", "1"], None, [1]),
    ],
)
def test_what_is_requested_is_absolute(arguments: list[str], size: int | None, remove: list[int]) -> None:
    body = _scale_body(make_parser(COMMANDS).parse_args(["scale", *arguments]), FiveRanks())
    assert (body.get("size"), body["remove"], body["drain_timeout"]) == (size, remove, 120.0)


def test_what_is_no_number_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        make_parser(COMMANDS).parse_args(["scale", "many"])
    assert caught.value.code == 2
    assert "must be a number of ranks, +K or -K, not 'many'" in capsys.readouterr().err


def test_an_operation_is_one_line_with_its_reason() -> None:
    said = describe(OPERATION)
    assert said == "scale-3: 2 -> 2 ranks (joining 2; leaving 0): failed: no place for rank 2"


def test_events_are_read_until_their_end_and_printed_line_by_line() -> None:
    event = {"number": 7, "kind": "rank_dead", "time": 0.0, "facts": {"rank": 1, "engine_id": "1.2", "reason": "lost"}}
    lines = [": hello", "id: 7", "event: rank_dead", 'data: {"number": 7}', "", "event: end", 'data: {"reason": "x"}']
    assert list(_read_events(iter(lines))) == [{"number": 7}]
    assert describe_event(event).endswith("7 rank_dead rank 1 (engine 1.2), reason lost")
    scale = {"number": 8, "kind": "scale", "time": 0.0, "facts": {"operation": OPERATION}}
    assert describe_event(scale).endswith(f"8 scale {describe(OPERATION)}")
