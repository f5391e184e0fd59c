"""The entry point of an engine process: ``python -m engine.main`` with an ``EngineSpec`` as JSON on standard input.

It is the composition root: I/O threads first, so that reports flow while the core loads, then the core, then the busy
loop around both.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from engine.config.engine_config import EngineKind
from engine.config.engine_spec import EngineSpec
from engine.loading import load_core, load_lockstep_core
from engine.proc.proc import EngineCoreProc, EngineIO
from engine.wire.build import build_id
from engine.wire.errors import StartupError
from engine.wire.process import configure_logging, die_with_parent, leave_process_group, read_spec

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

log = logging.getLogger("engine.main")


def main() -> int:
    """Run one engine from spec to exit status: 0 after a stop that was asked for, 1 after a crash."""
    die_with_parent()
    leave_process_group()
    try:
        spec = read_spec(EngineSpec)
        configure_logging(f"engine-{spec.engine_id}", spec.log_level)
        _check(spec)
    except StartupError as error:
        sys.exit(f"engine: {error}")
    _limit_threads(spec)
    return _run(spec)


def _run(spec: EngineSpec) -> int:
    is_lockstep = spec.engine.parallel.enable_expert_parallel
    io, load = _lockstep_rank(spec) if is_lockstep else _independent_rank(spec)
    _stop_on_sigterm(io, while_loading=True)
    io.start()
    try:
        proc = load()
        _stop_on_sigterm(io, while_loading=False)
    except SystemExit:
        io.abandon("stopped while loading")
        raise
    except Exception as error:
        # A StartupError is meant for people and says it all; anything else needs its traceback.
        log.critical("cannot load: %s", error, exc_info=not isinstance(error, StartupError))
        io.abandon(f"cannot load: {error}")
        return 1
    # What was loaded lives as long as the process: the collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    return proc.serve()


def _independent_rank(spec: EngineSpec) -> tuple[EngineIO, Callable[[], EngineCoreProc]]:
    """Return the I/O of a rank and what loads its core and makes its busy loop."""
    io = EngineIO(spec)
    return io, lambda: EngineCoreProc(io, load_core(spec.engine, io.on_progress))


def _lockstep_rank(spec: EngineSpec) -> tuple[EngineIO, Callable[[], EngineCoreProc]]:
    """Return the same of a rank of a lockstep group."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a peer that dies fills the log with C++ frames
    # Imported here, because they import torch, which an independent sim engine does not need.
    from engine.proc.group_inbox import GroupInbox
    from engine.proc.lockstep import DPEngineCoreProc

    inbox = GroupInbox()
    io = EngineIO(spec, inbox)
    return io, lambda: DPEngineCoreProc(io, load_lockstep_core(spec.engine, io.on_progress), inbox)


def _check(spec: EngineSpec) -> None:
    if spec.build_id != build_id():
        raise StartupError(f"this host runs build {build_id()}, the deployment runs {spec.build_id}")
    if spec.engine.kind is EngineKind.TORCH and spec.engine.model is None:
        raise StartupError("a torch engine needs a model")


def _limit_threads(spec: EngineSpec) -> None:
    """Set the thread counts before a numeric library reads them; two ranks with all cores each collapse."""
    num_threads = spec.engine.model.num_threads if spec.engine.model is not None else 1
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(num_threads)


def _stop_on_sigterm(io: EngineIO, *, while_loading: bool) -> None:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        if while_loading:
            raise SystemExit(0)
        io.stop("SIGTERM")

    signal.signal(signal.SIGTERM, stop)


def _leave(status: int) -> NoReturn:
    """End the process as it is, once everything is sent and closed.

    A thread that forms or closes a group may be inside the collective library, and an interpreter that ends by itself
    stops it there, which the library takes for a crash: SIGABRT instead of the exit status.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main())
