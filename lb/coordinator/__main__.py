"""The command ``python -m lb.coordinator``: spec on standard input, endpoints on standard output."""

import json
import signal
import sys
from types import FrameType

from engine.wire.errors import ShoalError
from engine.wire.process import configure_logging, die_with_parent, leave_process_group, read_spec
from lb.coordinator.config import CoordinatorSpec
from lb.coordinator.process import Coordinator


def main() -> int:
    """Run the coordinator until SIGTERM; return the exit status."""
    die_with_parent()
    leave_process_group()
    signal.signal(signal.SIGTERM, _stop)
    try:
        spec = read_spec(CoordinatorSpec)
        configure_logging("coordinator", spec.log_level)
        coordinator = Coordinator(spec)
    except ShoalError as error:
        sys.stderr.write(f"coordinator: {error}\n")
        return 1
    ready = {"report_endpoint": coordinator.report_endpoint, "state_endpoint": coordinator.state_endpoint}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    try:
        coordinator.run()
    finally:
        coordinator.close()
    return 0


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
