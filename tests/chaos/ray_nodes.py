"""A Ray cluster of several nodes on one machine: ``python -m tests.chaos.ray_nodes FOLDER NUM_NODES``.

The head has one CPU, as has each other node. Prints its address, then executes one command per line of standard input
and prints a line when it is done: ``remove`` takes the newest node away as a crash would, ``add`` adds another one.
"""

import os
import sys
from pathlib import Path
from typing import Any

from engine.wire.process import die_with_parent
from orchestrator.launch.ray_environment import prepare_environment

_OBJECT_STORE_BYTES = 80 * 1024 * 1024


def main(folder: Path, num_nodes: int) -> None:
    die_with_parent()
    prepare_environment(folder)
    (folder / "ray").mkdir()
    os.environ["RAY_TMPDIR"] = str(folder)  # the cluster's own note of its address ignores the folder it is given
    from ray.cluster_utils import Cluster

    shape: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": _OBJECT_STORE_BYTES}
    head: dict[str, Any] = {**shape, "include_dashboard": False, "temp_dir": str(folder / "ray")}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(**shape) for _ in range(num_nodes - 1)]
    cluster.wait_for_nodes()
    write_line(cluster.address)
    for command in sys.stdin:
        if command.strip() == "remove":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        else:
            nodes.append(cluster.add_node(**shape))
        write_line("done")
    cluster.shutdown()  # type: ignore[no-untyped-call]


def write_line(line: str) -> None:
    """Write one line to the process that started this one."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
