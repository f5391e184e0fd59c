"""``shoal status``: a table of the ranks of a running deployment."""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.wire.errors import ShoalError
from lb.views import EngineState
from orchestrator.run_dir import live_runs

_TIMEOUT_S = 10.0
_FILE_WIDTH = 140
_STATE_STYLES = {
    EngineState.READY: "green",
    EngineState.LOADING: "yellow",
    EngineState.LEAVING: "yellow",
    EngineState.DEAD: "red",
}


def print_status(url: str | None, run_dir: Path | None, *, as_json: bool, console: Console | None = None) -> int:
    """Print the ranks of one deployment; return 0, or 1 when no rank is ready.

    url: base URL; None looks for the one deployment of this machine.

    Raises:
        ShoalError: none or several were found, or it does not answer.
    """
    url = (url or find_url(run_dir)).rstrip("/")
    cluster = _ask(url)
    ranks = cluster["ranks"]
    console = console or Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    if as_json:
        console.print(json.dumps(cluster, indent=2), highlight=False, markup=False, soft_wrap=True)
    else:
        console.print(make_table(url, ranks))
        console.print(describe_api_servers(cluster.get("api_servers", [])), highlight=False, soft_wrap=True)
    return 0 if any(rank["state"] == EngineState.READY for rank in ranks) else 1


def find_url(run_dir: Path | None) -> str:
    """Return where the one deployment of this machine answers.

    Raises:
        ShoalError: there is none, or more than one.
    """
    runs = list(live_runs(run_dir))
    if not runs:
        raise ShoalError("no deployment is ready on this machine; start one with shoal serve, or give --url")
    if len(runs) > 1:
        urls = ", ".join(run.url for run in runs)
        raise ShoalError(f"{len(runs)} deployments run on this machine: {urls}; choose one with --url")
    return runs[0].url


def make_table(url: str, ranks: list[dict[str, Any]]) -> Table:
    """Return the table of ``/v1/cluster``."""
    table = Table(title=f"{url}: {len(ranks)} ranks", title_justify="left")
    for heading in ("rank", "engine", "state", "node", "device"):
        table.add_column(heading)
    for heading in ("pid", "waiting", "running", "KV use", "picks"):
        table.add_column(heading, justify="right")
    for rank in ranks:
        table.add_row(
            str(rank["rank"]),
            str(rank["engine_id"]),
            _describe_state(rank),
            str(rank["node"]),
            str(rank["device"]),
            str(rank["pid"] or ""),
            str(rank["waiting"]),
            str(rank["running"]),
            f"{rank['kv_usage']:.1%}",
            str(rank["picks"]),
        )
    return table


def describe_api_servers(servers: list[dict[str, Any]]) -> Text:
    """Return one line about the API processes of ``/v1/cluster``."""
    text = Text("API processes: ")
    for server in servers:
        label = f"{server['index']} " + (f"(pid {server['pid']})" if server["pid"] else "is restarting")
        text.append(label + "  ", style="green" if server["pid"] else "red")
    return text


def _describe_state(rank: dict[str, Any]) -> Text:
    text = f"{rank['state']}: {rank['reason']}" if rank["reason"] else str(rank["state"])
    return Text(text, style=_STATE_STYLES.get(rank["state"], ""))


def _ask(url: str) -> Any:
    try:
        answer = httpx.get(f"{url}/v1/cluster", timeout=_TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
        cluster = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ShoalError(f"{url} does not answer like a deployment of Shoal: {error}") from error
    if not isinstance(cluster, dict) or not isinstance(cluster.get("ranks"), list):
        raise ShoalError(f"{url} does not answer like a deployment of Shoal: its /v1/cluster names no ranks")
    return cluster
