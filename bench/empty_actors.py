"""The reference of ``bench.footprint``, a bare Ray with empty actors: ``python -m bench.empty_actors FOLDER NUMBER``.

Prints one line when they are up and holds them until standard input ends.
"""

import signal
import sys
from pathlib import Path
from typing import Any

from engine.wire.process import die_with_parent
from orchestrator.launch.ray_environment import prepare_environment


class Empty:
    """An actor like the one around an engine: plain, one method that never returns."""

    def run(self) -> None:
        """Wait for ever."""
        while True:
            signal.pause()

    def ready(self) -> None:
        """Answer once, so that the driver knows it is up."""


def main(folder: Path, number: int) -> None:
    """Start the actors, hold them, leave."""
    die_with_parent()
    prepare_environment(folder)
    import ray

    from orchestrator.launch.ray_cluster import leave_cluster, start_cluster

    start_cluster(folder, number)
    actors: list[Any] = [ray.remote(Empty).options(num_cpus=1).remote() for _ in range(number)]
    ray.get([actor.ready.remote() for actor in actors])
    waiting = [actor.run.remote() for actor in actors]
    print(f"{len(waiting)} up", flush=True)
    sys.stdin.read()
    leave_cluster()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
