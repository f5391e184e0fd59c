"""A Ray head in a process of its own: ``python -m tests.integration.ray_head FOLDER NUM_CPUS``.

Prints its address, then answers each line of standard input with the actors and placement groups on it, as JSON. One
placement group is there from the start and is not one of Shoal.
"""

import json
import sys
from pathlib import Path

from engine.wire.process import die_with_parent
from orchestrator.launch.ray_environment import prepare_environment


def main(folder: Path, num_cpus: int) -> None:
    die_with_parent()
    prepare_environment(folder)
    import ray
    from ray._private.state import actors
    from ray.util.placement_group import placement_group, placement_group_table

    ray.init(num_cpus=num_cpus, num_gpus=0, include_dashboard=False, _temp_dir=str(folder / "ray"), log_to_driver=False)
    ray.get(placement_group([{"memory": 1}]).ready())
    sys.stdout.write(ray.get_runtime_context().gcs_address + "\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
        living = [actor for actor in actors().values() if actor["State"] != "DEAD"]
        sys.stdout.write(json.dumps({"placement_groups": len(groups), "actors": len(living)}) + "\n")
        sys.stdout.flush()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
