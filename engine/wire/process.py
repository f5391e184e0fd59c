"""The prelude of every process: die with its parent, leave Ctrl-C to the supervisor, read its spec, log alike.

A child is started by exec from its parent's main thread (a child started from another thread would die when that
thread ends), with ``SHOAL_PARENT_PID`` in its environment and its spec as JSON on standard input.
"""

import ctypes
import logging
import os
import signal
import sys
from typing import Literal, TypeVar, get_args

import msgspec

from engine.wire.errors import StartupError

S = TypeVar("S")

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)
"""The levels an operator can choose, the most talkative first."""

PARENT_PID_VARIABLE = "SHOAL_PARENT_PID"
LOG_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(process_name)s %(name)s: %(message)s"

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies, and exit now when it already has. Linux only; else a no-op."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before the kernel was asked: then nobody would send the signal.
    expected = os.environ.get(PARENT_PID_VARIABLE)
    if expected is not None and os.getppid() != int(expected):
        sys.exit("the parent process is gone")


def leave_process_group() -> None:
    """Leave what is signalled to the whole foreground group to the supervisor's ordered stop.

    Ctrl-C, ``timeout`` and some process managers signal a group; an engine that obeyed would end before the drain.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)


def read_spec(spec_type: type[S]) -> S:
    """Read this process's spec from standard input to its end.

    Raises:
        StartupError: the input is not a valid spec of that type.
    """
    try:
        return msgspec.json.decode(sys.stdin.buffer.read(), type=spec_type)
    except msgspec.MsgspecError as error:
        raise StartupError(f"standard input holds no valid {spec_type.__name__}: {error}") from error


def child_environment() -> dict[str, str]:
    """Return the environment a child gets: this one's, plus whose child it is."""
    return {**os.environ, PARENT_PID_VARIABLE: str(os.getpid())}


def configure_logging(process_name: str, level: str = "INFO") -> None:
    """Log to standard error, one line per record, the same in every process of the deployment."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT, "%H:%M:%S", defaults={"process_name": process_name}))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def set_log_level(level: str) -> None:
    """Change the least severe level that this process writes, by name."""
    logging.getLogger().setLevel(level.upper())
