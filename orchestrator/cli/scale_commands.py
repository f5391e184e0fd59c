"""The commands ``shoal scale`` and ``shoal events``: change the number of ranks of a deployment, and follow it."""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from engine.wire.errors import ShoalError
from engine.wire.ids import name_ranks
from orchestrator.cli.http_client import DeploymentClient, add_address
from orchestrator.cli.parser import Command
from orchestrator.config.defaults import DRAIN_TIMEOUT_S

_TIMEOUT_S = 20.0
_POLL_S = 0.1
_SIZE = re.compile(r"[+-]?\d+")
_FILE_WIDTH = 140


class OperationFailedError(ShoalError):
    """The operation that was waited for failed or was cancelled."""


def _add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "size", nargs="?", type=_size, metavar="N", help="ranks there shall be; +K or -K: more or fewer"
    )
    what = "a rank that shall go; repeatable; with N ranks beyond that are replaced"
    parser.add_argument("--remove", type=int, action="append", default=[], metavar="RANK", help=what)
    what = f"seconds that requests of leaving ranks may finish there before they move (default: {DRAIN_TIMEOUT_S:g})"
    parser.add_argument("--drain-timeout", type=float, default=DRAIN_TIMEOUT_S, metavar="S", help=what)
    parser.add_argument(
        "--wait", action="store_true", help="show the progress, return when it is over: status 0 if done"
    )
    parser.add_argument("--cancel", metavar="ID", help="undo an operation that is not beyond its point of no return")
    parser.add_argument("--key", dest="idempotency_key", metavar="KEY", help="the same key never begins twice")
    add_address(parser)


def _add_events_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--after", type=int, metavar="NUMBER", help="begin behind this event; 0: all that are remembered"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    add_address(parser)


def run_scale(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Begin or cancel an operation, and wait for its end if that was asked for; return 0.

    Raises:
        ShoalError: no deployment, no answer, an error answer, or an end that is not the one that was asked for.
    """
    client = DeploymentClient(options.url, options.run_dir, options.key, environment)
    if options.cancel is not None:
        operation = client.call("POST", f"/v1/cluster/operations/{options.cancel}/cancel", _TIMEOUT_S)
    else:
        operation = client.call("POST", "/v1/cluster/scale", _TIMEOUT_S, _scale_body(options, client))
    if not options.wait:
        sys.stdout.write(f"{describe(operation)}\n")
        return 0
    return _wait(client, operation)


def run_events(options: argparse.Namespace, environment: Mapping[str, str]) -> NoReturn:
    """Print events until the deployment ends or somebody stops it.

    Raises:
        ShoalError: no deployment, no answer, or its end.
    """
    client = DeploymentClient(options.url, options.run_dir, options.key, environment)
    query = "" if options.after is None else f"?after={options.after}"
    for event in _read_events(client.stream_lines(f"/v1/cluster/events{query}")):
        sys.stdout.write(f"{json.dumps(event) if options.json else describe_event(event)}\n")
        # One by one: whoever reads through a pipe follows what happens.
        sys.stdout.flush()
    raise ShoalError("the deployment tells no more events: it has ended, or its API process has")


def describe(operation: Mapping[str, Any]) -> str:
    """Return an operation in one line."""
    target = f"{operation['size_before']} -> {operation['target']['size']} ranks"
    ranks = [f"{word} {', '.join(map(str, operation[word]))}" for word in ("joining", "leaving") if operation[word]]
    reason = f": {operation['error']}" if operation["error"] else ""
    return f"{operation['id']}: {target} ({'; '.join(ranks) or 'nothing to do'}): {operation['phase']}{reason}"


def describe_event(event: Mapping[str, Any]) -> str:
    """Return an event in one line."""
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    facts = event["facts"]
    if event["kind"] == "scale":
        return f"{at} {event['number']:>5} scale {describe(facts['operation'])}"
    rest = "".join(f", {name} {value}" for name, value in facts.items() if name not in ("rank", "engine_id"))
    return f"{at} {event['number']:>5} {event['kind']} rank {facts['rank']} (engine {facts['engine_id']}){rest}"


def _size(text: str) -> str:
    if not _SIZE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be a number of ranks, +K or -K, not {text!r}")
    return text


def _scale_body(options: argparse.Namespace, client: DeploymentClient) -> dict[str, Any]:
    body: dict[str, Any] = {"remove": options.remove, "drain_timeout": options.drain_timeout}
    if options.idempotency_key is not None:
        body["idempotency_key"] = options.idempotency_key
    if options.size is None:
        return body
    # The API takes absolute sizes alone: a relative one that is repeated would be applied twice.
    is_relative = options.size[0] in "+-"
    before = client.call("GET", "/v1/cluster/capacity", _TIMEOUT_S)["ranks"] if is_relative else 0
    return body | {"size": before + int(options.size)}


def _wait(client: DeploymentClient, operation: dict[str, Any]) -> int:
    console = Console(stderr=True, width=None if sys.stderr.isatty() else _FILE_WIDTH)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[doing]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(operation["id"], total=1.0, doing="")
        while operation["status"] == "running":
            _show(progress, bar, operation)
            time.sleep(_POLL_S)
            operation = client.call("GET", f"/v1/cluster/operations/{operation['id']}", _TIMEOUT_S)
    if operation["status"] != "done":
        raise OperationFailedError(describe(operation))
    sys.stdout.write(f"{describe(operation)} after {operation['elapsed_s']:.1f} s\n")
    return 0


def _show(progress: Progress, bar: TaskID, operation: Mapping[str, Any]) -> None:
    waits = f", waits for {name_ranks(operation['blocking_ranks'])}" if operation["blocking_ranks"] else ""
    eta = f", about {operation['eta_s']:.0f} s left" if operation["eta_s"] else ""
    progress.update(bar, completed=operation["progress"], doing=f"{operation['phase']}{waits}{eta}")


def _read_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream of server-sent ones, until the one that ends it."""
    kind = ""
    for line in lines:
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: ") and kind != "end":
            yield json.loads(line.removeprefix("data: "))


COMMANDS: Mapping[str, Command] = {
    "scale": Command(
        usage="shoal scale [N|+K|-K] [OPTIONS]",
        help="change the number of ranks while the deployment serves",
        description="Change the number of ranks of a running deployment. Without --url, of the one on this machine.",
        add_arguments=_add_scale_arguments,
        run=run_scale,
    ),
    "events": Command(
        help="print what happens to the ranks, line by line, until stopped",
        description="Follow a running deployment: ranks that come, go, die and come back, and scale operations.",
        add_arguments=_add_events_arguments,
        run=run_events,
    ),
}
