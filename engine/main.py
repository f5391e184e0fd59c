"""The engine process: ``python -m engine.main`` with an ``EngineSpec`` as JSON on standard input."""

import gc
import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from engine.config.engine_config import EngineKind
from engine.config.engine_spec import EngineSpec
from engine.loading import load_core
from engine.proc.proc import EngineCoreProc
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
    return _run(spec, _make_proc(spec))


def _make_proc(spec: EngineSpec) -> EngineCoreProc:
    if not spec.engine.parallel.enable_expert_parallel:
        return EngineCoreProc(spec)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a peer that dies fills the log with C++ frames
    from engine.proc.lockstep import DPEngineCoreProc  # imports torch, which a dense sim engine does not need

    return DPEngineCoreProc(spec)


def _run(spec: EngineSpec, proc: EngineCoreProc) -> int:
    _stop_on_sigterm(proc, while_loading=True)
    proc.start()
    try:
        core = load_core(spec.engine, proc.on_progress)
        _stop_on_sigterm(proc, while_loading=False)
    except SystemExit:
        proc.abandon("stopped while loading")
        raise
    except Exception as error:
        # A StartupError is meant for people and says it all; anything else needs its traceback.
        log.critical("cannot load: %s", error, exc_info=not isinstance(error, StartupError))
        proc.abandon(f"cannot load: {error}")
        return 1
    # What was loaded lives as long as the process: the collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    return proc.serve(core)


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


def _stop_on_sigterm(proc: EngineCoreProc, *, while_loading: bool) -> None:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        if while_loading:
            raise SystemExit(0)
        proc.stop("SIGTERM")

    signal.signal(signal.SIGTERM, stop)


def _leave(status: int) -> NoReturn:
    """End the process as it is, once everything is said and closed.

    A thread that forms or closes a group may be inside the collective library, and an interpreter that ends by itself
    stops it there, which the library takes for a crash: SIGABRT instead of the exit status.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main())
