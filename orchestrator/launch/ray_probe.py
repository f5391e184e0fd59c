"""Tries to join a Ray cluster in a process that can be killed: ``python -m orchestrator.launch.ray_probe``.

``ray.init`` with the address of something that is not Ray waits for more than two minutes, deaf to everything. The
address comes as a JSON string on standard input; a line on standard output says that it works.
"""

import sys

import ray

from engine.wire.process import die_with_parent, leave_process_group, read_spec


def main() -> int:
    """Join and leave; return 0, or 1 with the reason as the last line of standard error."""
    die_with_parent()
    leave_process_group()
    address = read_spec(str)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:  # noqa: BLE001 - whatever Ray raises is the answer, in one line
        print(" ".join(str(error).split()), file=sys.stderr)  # noqa: T201 - the caller shows the last line
        return 1
    ray.shutdown()
    sys.stdout.write("joined\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
