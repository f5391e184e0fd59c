"""The command ``shoal status``: a table of the ranks of a running deployment."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.wire.errors import ShoalError
from engine.wire.ids import name_ranks
from engine.wire.states import EngineState
from orchestrator.cli.http_client import DeploymentClient, add_address
from orchestrator.cli.parser import Command

_TIMEOUT_S = 10.0
_FILE_WIDTH = 140
_STATE_STYLES = {
    EngineState.READY: "green",
    EngineState.LOADING: "yellow",
    EngineState.LEAVING: "yellow",
    EngineState.SUSPECT: "magenta",
    EngineState.DEAD: "red",
}


def print_status(
    url: str | None, run_dir: Path | None, key: str | None = None, *, as_json: bool, console: Console | None = None
) -> int:
    """Print the ranks of one deployment; return 0, or 1 when no rank is ready.

    url: base URL; None looks for the one deployment of this machine. key: one of its keys; None takes the
    environment's.

    Raises:
        ShoalError: none or several were found, or it does not answer.
    """
    client = DeploymentClient(url, run_dir, key, os.environ)
    cluster = _get_cluster(client)
    ranks = cluster["ranks"]
    # A file or a pipe has no width of its own; rich would take 80 columns, and cut the table.
    console = console or Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    if as_json:
        console.print(json.dumps(cluster, indent=2), highlight=False, markup=False, soft_wrap=True)
    else:
        console.print(make_table(client.url, ranks))
        for line in describe_group(cluster.get("group")):
            console.print(line)
        for line in describe_settings(cluster.get("settings", {})):
            console.print(line)
        console.print(describe_api_servers(cluster.get("api_servers", [])), highlight=False, soft_wrap=True)
    return 0 if any(rank["state"] == EngineState.READY for rank in ranks) else 1


def make_table(url: str, ranks: list[dict[str, Any]]) -> Table:
    """Return the table of ``/v1/cluster``."""
    table = Table(title=f"{url}: {len(ranks)} ranks", title_justify="left")
    for heading in ("rank", "engine", "state", "node", "device"):
        table.add_column(heading)
    for heading in ("pid", "restarts", "waiting", "running", "KV use", "picks"):
        table.add_column(heading, justify="right")
    for rank in ranks:
        table.add_row(
            str(rank["rank"]),
            str(rank["engine_id"]),
            _describe_state(rank),
            str(rank["node"]),
            str(rank["device"]),
            str(rank["pid"] or ""),
            str(rank["restarts"]),
            str(rank["waiting"]),
            str(rank["running"]),
            f"{rank['kv_usage']:.1%}",
            str(rank["picks"]),
        )
    return table


def describe_group(group: dict[str, Any] | None) -> list[Text]:
    """Return a line about the lockstep group, if there is one, and one about the membership that is being prepared."""
    if group is None:
        return []
    lines = [Text(f"lockstep group: epoch {group['epoch']}, wave {group['wave']}, {name_ranks(group['members'])}")]
    if proposal := group["proposal"]:
        why = " because a rank died or is parked" if proposal["direct"] else ""
        about = f"epoch {proposal['epoch']} is being prepared{why}: {name_ranks(proposal['members'])}"
        lines.append(Text(about, style="yellow"))
    return lines


def describe_settings(settings: dict[str, Any]) -> list[Text]:
    """Return a line for each setting that keeps requests waiting or away."""
    lines = []
    if settings.get("pause", "run") != "run":
        lines.append(f"paused ({settings['pause']}): requests wait for shoal resume")
    if settings.get("sleep_level"):
        lines.append(f"asleep (level {settings['sleep_level']}): requests wait for shoal wake-up")
    if settings.get("cordoned"):
        lines.append(f"cordoned: rank {', '.join(map(str, settings['cordoned']))}")
    return [Text(line, style="yellow") for line in lines]


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


def _get_cluster(client: DeploymentClient) -> Any:
    cluster = client.call("GET", "/v1/cluster", _TIMEOUT_S)
    if not isinstance(cluster, dict) or not isinstance(cluster.get("ranks"), list):
        raise ShoalError(f"{client.url} does not answer like a deployment of Shoal: its /v1/cluster names no ranks")
    return cluster


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_address(parser, "--api-key", "a key of the deployment; default: SHOAL_ADMIN_API_KEY or SHOAL_API_KEY")
    parser.add_argument("--json", action="store_true", help="print the answer of /v1/cluster as it is")


def _run(options: argparse.Namespace, _environment: Mapping[str, str]) -> int:
    return print_status(options.url, options.run_dir, options.key, as_json=options.json)


COMMAND = Command(
    help="show the ranks of a running deployment",
    description="Show the ranks of a running deployment; without --url, of the one on this machine.",
    add_arguments=_add_arguments,
    run=_run,
)
