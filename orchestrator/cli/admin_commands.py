"""The admin commands, from ``shoal pause`` to ``shoal abort``: each is one admin call, and prints its answer."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.cli.http_client import DeploymentClient, add_address
from orchestrator.cli.parser import Command

_DEFAULT_TIMEOUT_S = 60.0
_MARGIN_S = 10.0  # the server's own deadline comes first: its answer holds more than ours


@dataclass(frozen=True, slots=True)
class AdminCall:
    """The HTTP call of one command. path: with its arguments in braces. query: arguments that go into the query."""

    help: str
    path: str
    query: tuple[str, ...] = ()


_CALLS: Mapping[str, AdminCall] = {
    "pause": AdminCall("let no rank step until resume; returns once none does", "/pause", ("mode",)),
    "resume": AdminCall("let the ranks step again", "/resume"),
    "sleep": AdminCall("give the devices' memory back until wake-up", "/sleep", ("level",)),
    "wake-up": AdminCall("take the memory again and go on", "/wake_up"),
    "cordon": AdminCall("let a rank take no new requests", "/v1/cluster/ranks/{rank}/cordon"),
    "uncordon": AdminCall("let a rank take new requests again", "/v1/cluster/ranks/{rank}/uncordon"),
    "drain": AdminCall("cordon a rank and wait until it has nothing left", "/v1/cluster/ranks/{rank}/drain"),
    "rebalance": AdminCall(
        "place the experts of a lockstep group anew, by how often each was chosen", "/v1/cluster/rebalance"
    ),
    "abort": AdminCall("end requests, by x-request-id or by the id of the reply", "/abort_requests"),
}


def _add_arguments(name: str, call: AdminCall, parser: argparse.ArgumentParser) -> None:
    if "{rank}" in call.path:
        parser.add_argument("rank", type=int, metavar="RANK", help="number of the rank, as in shoal status")
    if "mode" in call.query:
        what = "what becomes of running requests: they end, finish first, or freeze"
        parser.add_argument("--mode", choices=("abort", "wait", "keep"), default="abort", help=what)
    if "level" in call.query:
        what = "1: weights off the device, 2: weights dropped and read again"
        parser.add_argument("--level", type=int, choices=(1, 2), default=1, help=what)
    if name == "abort":
        requests = parser.add_mutually_exclusive_group(required=True)
        requests.add_argument("--all", action="store_true", help="all requests")
        requests.add_argument("--id", action="append", metavar="ID", help="one request; repeatable")
    parser.add_argument("--timeout", type=float, metavar="X", default=_DEFAULT_TIMEOUT_S, help="seconds to wait")
    add_address(parser)


def _run(name: str, call: AdminCall, options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    client = DeploymentClient(options.url, options.run_dir, options.key, environment)
    body = _abort_body(options) if name == "abort" else None
    query = "&".join(f"{argument}={getattr(options, argument)}" for argument in (*call.query, "timeout"))
    path = call.path.format(**vars(options))
    answer = client.call("POST", f"{path}?{query}", options.timeout + _MARGIN_S, body)
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    return 0


def _abort_body(options: argparse.Namespace) -> dict[str, Any]:
    return {"all": True} if options.all else {"request_ids": options.id}


COMMANDS: Mapping[str, Command] = {
    name: Command(
        help=call.help,
        description=f"{call.help.capitalize()}. Without --url, of the deployment on this machine.",
        add_arguments=partial(_add_arguments, name, call),
        run=partial(_run, name, call),
    )
    for name, call in _CALLS.items()
}
