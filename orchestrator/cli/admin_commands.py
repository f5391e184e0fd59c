"""The commands that administer a running deployment: each is one admin call, and prints its answer."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEFAULT_TIMEOUT_S = 60.0
_MARGIN_S = 10.0  # the server's own deadline comes first: its answer says more than ours


@dataclass(frozen=True, slots=True)
class AdminCommand:
    """One command. path: of its call, with the places of its arguments. query: arguments that go into the query."""

    help: str
    path: str
    query: tuple[str, ...] = ()


COMMANDS: Mapping[str, AdminCommand] = {
    "pause": AdminCommand("let no rank step until resume; returns once none does", "/pause", ("mode",)),
    "resume": AdminCommand("let the ranks step again", "/resume"),
    "sleep": AdminCommand("give the devices' memory back until wake-up", "/sleep", ("level",)),
    "wake-up": AdminCommand("take the memory again and go on", "/wake_up"),
    "cordon": AdminCommand("let a rank take no new requests", "/v1/cluster/ranks/{rank}/cordon"),
    "uncordon": AdminCommand("let a rank take new requests again", "/v1/cluster/ranks/{rank}/uncordon"),
    "drain": AdminCommand("cordon a rank and wait until it has nothing left", "/v1/cluster/ranks/{rank}/drain"),
    "rebalance": AdminCommand(
        "place the experts of a lockstep group anew, by how often each was chosen", "/v1/cluster/rebalance"
    ),
    "abort": AdminCommand("end requests, by x-request-id or by the id of the reply", "/abort_requests"),
}


def add_commands(commands: Any) -> None:
    """Add all of them to the parser's commands."""
    for name, command in COMMANDS.items():
        parser = commands.add_parser(
            name,
            help=command.help,
            description=f"{command.help.capitalize()}. Without --url, of the deployment on this machine.",
        )
        _add_arguments(name, command, parser)
        parser.add_argument("--timeout", type=float, metavar="X", default=_DEFAULT_TIMEOUT_S, help="seconds to wait")
        add_address(parser)


def add_address(
    parser: Any, key_flag: str = "--admin-api-key", key_help: str = "the admin key; default: SHOAL_ADMIN_API_KEY"
) -> None:
    """Add what says which deployment is meant, and with which key it is asked."""
    parser.add_argument("--url", help="base URL of the deployment, e.g. http://127.0.0.1:8000")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where to look for deployments of this machine")
    parser.add_argument(key_flag, dest="key", metavar="KEY", help=key_help)


def run(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run one of the commands and print the answer; return 0.

    Raises:
        ShoalError: no deployment, no answer, or an answer that says no.
    """
    from orchestrator.cli.http_client import Asker  # its HTTP client takes longer to import than --help runs

    command = COMMANDS[options.command]
    asker = Asker(options.url, options.run_dir, options.key, environment)
    body = _abort_body(options) if options.command == "abort" else None
    query = "&".join(f"{name}={getattr(options, name)}" for name in (*command.query, "timeout"))
    path = command.path.format(**vars(options))
    answer = asker.ask("POST", f"{path}?{query}", options.timeout + _MARGIN_S, body)
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    return 0


def _add_arguments(name: str, command: AdminCommand, parser: Any) -> None:
    if "{rank}" in command.path:
        parser.add_argument("rank", type=int, metavar="RANK", help="number of the rank, as in shoal status")
    if "mode" in command.query:
        what = "what becomes of running requests: they end, finish first, or freeze"
        parser.add_argument("--mode", choices=("abort", "wait", "keep"), default="abort", help=what)
    if "level" in command.query:
        what = "1: weights off the device, 2: weights dropped and read again"
        parser.add_argument("--level", type=int, choices=(1, 2), default=1, help=what)
    if name == "abort":
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("--all", action="store_true", help="all requests")
        what.add_argument("--id", action="append", metavar="ID", help="one request; repeatable")


def _abort_body(options: argparse.Namespace) -> dict[str, Any]:
    return {"all": True} if options.all else {"request_ids": options.id}
