"""A child process that follows orders: ``python -m tests.unit.launch.puppet`` with a list of orders on stdin.

Orders: ``say TEXT`` and ``log TEXT`` (standard output and error), ``exit STATUS``, ``kill`` (itself), ``deaf`` to
SIGTERM, ``wait`` for ever, ``grandchild`` (leaves a process that holds the pipes open).
"""

import os
import signal
import subprocess
import sys

from engine.wire.process import die_with_parent, read_spec


def main() -> None:
    die_with_parent()
    for order in read_spec(list[str]):
        word, _, text = order.partition(" ")
        if word == "say":
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        elif word == "log":
            sys.stderr.write(text)
            sys.stderr.flush()
        elif word == "exit":
            os._exit(int(text))
        elif word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif word == "grandchild":
            subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(1)"], stdin=int(text))
        else:
            signal.pause()


if __name__ == "__main__":
    main()
