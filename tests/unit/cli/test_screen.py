"""What a person sees: progress, banner, status table."""

import io
import json
import logging

import httpx
import pytest
from rich.console import Console
from rich.progress import Progress

from engine.wire.errors import ShoalError
from engine.wire.ids import EngineId
from engine.wire.states import EnginePhase
from orchestrator.cli import status
from orchestrator.processes.exits import ProcessExit
from orchestrator.processes.restarts import RestartRule
from orchestrator.ranks.progress import BarProgress, LineProgress, start_progress
from orchestrator.ranks.replica_table import ReplicaTable
from orchestrator.supervisor.supervisor import print_banner
from tests.unit.ranks.reports import report

E0 = EngineId(0, 1)

RANK = {
    "rank": 1,
    "engine_id": "1.1",
    "state": "dead",
    "reason": "killed by SIGKILL",
    "node": "node[7]",
    "device": "cpu",
    "pid": 4711,
    "restarts": 4,
    "waiting": 3,
    "running": 2,
    "kv_usage": 0.125,
    "picks": 9,
}


REQUEST = httpx.Request("GET", "http://x/v1/cluster")


def test_lines_name_each_new_activity_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    table, progress = ReplicaTable([E0], RestartRule(max_in_row=0)), LineProgress()
    for seq, percent in enumerate((0.1, 0.2), start=1):
        table.on_report(report(E0, seq, EnginePhase.LOADING, detail="weights", progress=percent), 0.0)
        progress.show(next(iter(table)))
    table.on_report(report(E0, 3, node="n", device="cpu", pid=7), 0.0)
    progress.show(next(iter(table)))
    assert caplog.messages == ["rank 0: loading: weights", "rank 0: ready on cpu of n (pid 7)"]


def test_a_lockstep_group_is_shown_with_what_is_prepared_and_why() -> None:
    group = {"epoch": 4, "wave": 2, "members": [0, 2], "proposal": None}
    assert [str(line) for line in status.describe_group(group)] == ["lockstep group: epoch 4, wave 2, ranks 0, 2"]
    group["proposal"] = {"epoch": 6, "members": [2], "direct": True}
    assert str(status.describe_group(group)[1]) == "epoch 6 is being prepared because a rank died or is parked: rank 2"
    assert status.describe_group(None) == []


def test_bars_follow_the_reports() -> None:
    table = ReplicaTable([E0], RestartRule(max_in_row=0))
    with Progress(console=Console(file=io.StringIO())) as bars:
        progress = BarProgress(bars, 1)
        table.on_report(report(E0, 1, EnginePhase.LOADING, detail="weights", progress=0.25), 0.0)
        progress.show(next(iter(table)))
        assert bars.tasks[0].completed == 0.25
        table.on_report(report(E0, 2), 0.0)
        progress.show(next(iter(table)))
        assert bars.tasks[0].completed == 1.0


def test_without_a_terminal_there_are_lines() -> None:
    with start_progress(2) as progress:
        assert isinstance(progress, LineProgress)


def test_a_dead_rank_shows_its_reason() -> None:
    table = ReplicaTable([E0], RestartRule(max_in_row=0))
    replica = table.on_exit(E0, ProcessExit(1, "exit status 1: no weights"), 0.0)
    assert replica.activity == "dead: exit status 1: no weights"


def test_the_banner_holds_an_example_that_is_valid_json_on_a_line_of_its_own() -> None:
    console = Console(file=io.StringIO(), width=40)
    print_banner("http://127.0.0.1:8000", "m", 1, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "m on 1 rank\n" in text
    (body,) = [line for line in text.splitlines() if line.startswith("  -d ")]
    assert json.loads(body.removeprefix("  -d '").removesuffix("'"))["model"] == "m"


def test_the_table_shows_every_column_and_brackets_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(status.make_table("http://x", [RANK]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for shown in ("1.1", "dead: killed by SIGKILL", "node[7]", "cpu", "4711", "12.5%", "9"):
        assert shown in text


def test_the_api_processes_are_named_and_one_that_is_away_too() -> None:
    servers = [{"index": 0, "pid": 4712}, {"index": 1, "pid": 0}]
    text = str(status.describe_api_servers(servers))
    assert text == "API processes: 0 (pid 4712)  1 is restarting  "


def test_the_exit_status_says_whether_any_rank_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"dead": 1, "ready": 0}
    for state, expected in answers.items():
        body = {"ranks": [RANK | {"state": state}]}
        monkeypatch.setattr(
            httpx, "request", lambda *_, body=body, **__: httpx.Response(200, json=body, request=REQUEST)
        )
        console = Console(file=io.StringIO())
        assert status.print_status("http://x/", None, as_json=False, console=console) == expected


@pytest.mark.parametrize("body", [[], {"ranks": 1}, "no JSON"])
def test_another_service_at_the_url_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch, body: object) -> None:
    request = httpx.Request("GET", "http://x/v1/cluster")
    answer = httpx.Response(200, request=request, text=body if isinstance(body, str) else json.dumps(body))
    monkeypatch.setattr(httpx, "request", lambda *_, **__: answer)
    with pytest.raises(ShoalError, match="does not answer like a deployment of Shoal: "):
        status.print_status("http://x", None, as_json=False)


def test_something_else_at_the_url_is_an_error_of_one_line() -> None:
    with pytest.raises(ShoalError, match="does not answer like a deployment of Shoal: "):
        status.print_status("http://127.0.0.1:1", None, as_json=True)


def test_status_says_what_keeps_requests_waiting() -> None:
    at_rest = {"seq": 0, "pause": "run", "sleep_level": 0, "cordoned": []}
    assert status.describe_settings(at_rest) == status.describe_settings({}) == []
    lines = status.describe_settings({"seq": 3, "pause": "keep", "sleep_level": 2, "cordoned": [0, 4]})
    assert [line.plain for line in lines] == [
        "paused (keep): requests wait for shoal resume",
        "asleep (level 2): requests wait for shoal wake-up",
        "cordoned: rank 0, 4",
    ]
