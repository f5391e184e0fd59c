"""The Ray cluster: one of our own inside the run folder, or a connection to one that runs.

As a program (``python -m orchestrator.launch.ray_cluster``) it tries to join a cluster in a process that can be killed:
``ray.init`` with the address of something that is not Ray waits for more than two minutes and cannot be interrupted.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # nothing public tells nodes apart without a dashboard

from engine.wire.errors import StartupError
from engine.wire.process import die_with_parent, leave_process_group, read_spec
from orchestrator.launch.placement import NodeResources
from orchestrator.processes.child_process import LineSink, start_child

PROBE_MODULE = "orchestrator.launch.ray_cluster"

_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # nothing travels through Ray's object store
_CONNECT_S = 30.0
_PROBE_STOP_S = 0.5
_DEFAULT_PORT = 6379


def start_cluster(folder: Path, num_cpus: int) -> None:
    """Start a Ray cluster of this machine whose every file lives in ``folder``, and join it.

    Blocks for 3 s and more. Call it from the main thread: Ray's daemons die with the thread that started them.

    Raises:
        StartupError: Ray does not start; with its reason.
    """
    with _keeping_signals():
        try:
            ray.init(
                num_cpus=max(num_cpus, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(folder / "ray"),
                log_to_driver=False,
                configure_logging=False,
            )
        except Exception as error:
            raise StartupError(f"the embedded Ray does not start: {' '.join(str(error).split())}") from error


async def join_cluster(address: str, on_line: LineSink) -> None:
    """Join the running Ray cluster at ``address`` (``host:port`` or ``auto``).

    Raises:
        StartupError: nothing answers there, it is not Ray, or this host does not belong to it.
    """
    if address != "auto":
        await _check_reachable(address)
    await _probe(address, on_line)
    with _keeping_signals():
        ray.init(address=address, log_to_driver=False, configure_logging=False)


def living_nodes() -> list[NodeResources]:
    """Return what each living node has in all."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    return [NodeResources(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in resources]


def free_resources() -> dict[str, float]:
    """Return what is free in the cluster as a whole."""
    return dict(ray.available_resources())  # type: ignore[no-untyped-call]


def free_on_nodes() -> list[dict[str, float]]:
    """Return what is free on each living node. Ray's own view of other nodes is a moment old."""
    nodes: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return list(nodes.values())


def own_address() -> str:
    """Return the address under which the other nodes of the cluster know this host."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def leave_cluster() -> None:
    """Disconnect; a cluster of our own is stopped. Blocks for a second; idempotent."""
    ray.shutdown()


async def _check_reachable(address: str) -> None:
    # Before the probe, which loads Ray: a wrong port is found out in milliseconds.
    host, _, port = address.rpartition(":")
    try:
        connecting = asyncio.open_connection(host.strip("[]") or address, int(port) if host else _DEFAULT_PORT)
        _, writer = await asyncio.wait_for(connecting, _CONNECT_S)
    except (OSError, TimeoutError, ValueError) as error:
        reason = str(error) or f"no answer within {_CONNECT_S:g} s"
        raise StartupError(f"the Ray cluster at {address} (--ray-address) is unreachable: {reason}") from error
    writer.close()


async def _probe(address: str, on_line: LineSink) -> None:
    child = await start_child(PROBE_MODULE, address, on_line)
    try:
        await asyncio.wait_for(child.ready_line(), _CONNECT_S)
    except TimeoutError:
        raise StartupError(
            f"what answers at {address} (--ray-address) is not a Ray cluster this host can join"
        ) from None
    except StartupError as error:
        raise StartupError(f"cannot join the Ray cluster at {address} (--ray-address): {error}") from None
    finally:
        await child.stop(_PROBE_STOP_S)


@contextlib.contextmanager
def _keeping_signals() -> Iterator[None]:
    # ray.init takes SIGTERM for itself and would end this process without an ordered stop.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        raise StartupError("stopped while Ray was starting") from error
    finally:
        signal.signal(signal.SIGTERM, handler)


def main() -> int:
    """Join the cluster whose address comes on standard input, and leave; return 0, or 1 with the reason logged last."""
    die_with_parent()
    leave_process_group()
    address = read_spec(str)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:  # noqa: BLE001 - whatever Ray raises is the reason, in one line
        print(" ".join(str(error).split()), file=sys.stderr)  # noqa: T201 - the parent shows the last line
        return 1
    ray.shutdown()
    sys.stdout.write("joined\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
