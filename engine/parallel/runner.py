"""The runner of one member of a lockstep group: it runs its own tokens, and its experts for the tokens of all."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from engine.config.engine_config import ModelConfig, ParallelConfig, SchedulerConfig
from engine.interfaces.engine_core import OnProgress, RunnerLimits
from engine.interfaces.plan import Sample, StepPlan
from engine.model.loader import LoadedModel
from engine.model.model_info import describe
from engine.model.placement import select_device
from engine.model.progress import progress_bars_to
from engine.parallel.checkpoint import failures_as_startup_errors, max_rows, open_checkpoint
from engine.parallel.expert_rows import ExpertRows, PeerRows
from engine.parallel.experts import (
    CallRecorder,
    ExpertsCall,
    ExpertsHook,
    ExpertTable,
    SharedExperts,
    install_rows,
    register_experts,
    replay,
)
from engine.parallel.transport import GroupBrokenError, Transport
from engine.runner.attention import register_attention
from engine.runner.probe import run_one_token
from engine.runner.torch_runner import TorchRunner

_LOGGER = logging.getLogger(__name__)


class ParallelRunner:
    """A mixture-of-experts decoder behind the ``LockstepRunner`` protocol, with dense weights alone until ``join``.

    ``load_rows`` may run in another thread while steps go on; everything else belongs to the thread that runs steps.

    _calls: what one forward pass calls of the experts; empty where the weights were dropped. _rows: the experts that
    are installed. _shared: the experts of its group; None until it joined one. _asleep: while it sleeps, the experts to
    load at the end; None while it is awake. _loads: see ``expert_loads``, of the groups before.
    """

    def __init__(
        self,
        model: ModelConfig,
        scheduler: SchedulerConfig,
        parallel: ParallelConfig,
        on_progress: OnProgress,
    ) -> None:
        """Load the dense weights and allocate the cache; leave room for the experts.

        Raises:
            StartupError: see ``TorchRunner``; or the model's experts cannot be shared out.
        """
        register_experts()
        register_attention()
        self._hook = ExpertsHook(CallRecorder())
        self._device = select_device(model.device)
        self._checkpoint = open_checkpoint(model, self._device)
        self._runner = TorchRunner(
            model,
            scheduler,
            on_progress,
            load=self._load_dense,
            reserved_bytes=max_rows(self.num_experts, parallel) * self._checkpoint.expert_bytes,
        )
        self._calls = self._record_calls()
        # Experts are loaded while it serves, and nobody watches; bars would also start a thread.
        disable_progress_bar()  # type: ignore[no-untyped-call]
        self._rows = self._no_rows()
        self._shared: SharedExperts | None = None
        self._asleep: tuple[int, ...] | None = None
        self._loads = torch.zeros(self.num_experts, dtype=torch.int64, device=self._device)

    @property
    def limits(self) -> RunnerLimits:
        """Return what the loaded model can do."""
        return self._runner.limits

    @property
    def num_experts(self) -> int:
        """Return the experts of each layer."""
        return self._checkpoint.num_experts

    @property
    def rows(self) -> ExpertRows:
        """Return the experts that are installed."""
        return self._rows

    @property
    def device(self) -> torch.device:
        """Return where rows are sent from and received."""
        return self._device

    @property
    def row_device(self) -> str:
        """Return the same by name."""
        return str(self._device)

    def expert_loads(self) -> list[int]:
        """Return how often this rank's own tokens chose each expert, over all layers; only grows."""
        counted: list[int] = (self._loads if self._shared is None else self._loads + self._shared.loads).tolist()
        return counted

    # --- experts ------------------------------------------------------------------------------------------------------

    def load_rows(self, expert_ids: Sequence[int], peers: PeerRows | None = None) -> ExpertRows:
        """Return the rows of some experts: what is installed, else what peers give, else what the checkpoint holds.

        Asleep it takes no memory for them: the result names them, and ``wake_up`` reads them.

        Raises:
            GroupBrokenError: a peer is gone.
            StartupError: the checkpoint cannot be read any more.
        """
        rows = self._rows  # taken once: the other thread may install others meanwhile
        given = [] if peers is None else [peers.exchange(rows)]
        if self._asleep is not None:
            return ExpertRows(tuple(sorted(expert_ids)), {})
        at_hand = {expert for source in (rows, *given) for expert in source.expert_ids}
        missing = tuple(sorted(set(expert_ids) - at_hand))
        if not given and not missing and tuple(sorted(expert_ids)) == rows.expert_ids:
            return rows
        num_given = sum(len(source.expert_ids) for source in given)
        _LOGGER.info("experts: %d from peers, %d from the checkpoint", num_given, len(missing))
        loaded = ExpertRows(missing, self._checkpoint.load_experts(missing))
        return rows.gather(expert_ids, *given, loaded)

    def join(self, rows: ExpertRows, placement: Sequence[Sequence[int]], index: int, transport: Transport) -> None:
        """Step in this group from the next step on; see ``LockstepRunner``."""
        table = ExpertTable(placement, index, self.num_experts, self.device)
        if self._shared is not None:
            self._loads += self._shared.loads
        self.install(rows, SharedExperts(transport, table, index, self.num_experts, self.device))

    def install(self, rows: ExpertRows, shared: SharedExperts) -> None:
        """Compute these experts, in this group, from the next step on; while asleep only note which."""
        self._shared = shared
        self._hook.step = shared
        if self._asleep is not None:
            self._asleep = rows.expert_ids
            return
        if not rows.tensors:  # prepared asleep, and woken before it was committed
            rows = self.load_rows(rows.expert_ids)
        install_rows(self._model, rows.tensors)
        self._rows = rows

    def _no_rows(self) -> ExpertRows:
        empty = self._checkpoint.load_experts(())
        on_device = {
            name: {parameter: tensor.to(self._device) for parameter, tensor in parameters.items()}
            for name, parameters in empty.items()
        }
        return ExpertRows((), on_device)

    # --- steps --------------------------------------------------------------------------------------------------------

    def run_shared(self, plan: StepPlan, sizes: Sequence[int]) -> Sequence[Sample]:
        """Take part in a step; one sample per chunk with ``samples`` set, in plan order.

        sizes: tokens of each member, this one's plan included; one of them at least has some.

        Raises:
            GroupBrokenError: a member is gone, or this one was ordered to leave.
        """
        assert self._shared is not None, "it joined no group"
        self._shared.begin(sizes)
        try:
            samples = self._run_own(plan, self._shared)
            self._shared.end()
        except GroupBrokenError:
            self._shared.abandon()
            raise
        return samples

    def _run_own(self, plan: StepPlan, shared: SharedExperts) -> Sequence[Sample]:
        if plan.chunks:
            return self._runner.run(plan)
        with torch.inference_mode():
            replay(self._calls, shared)
        return ()

    def run(self, plan: StepPlan) -> Sequence[Sample]:
        """Run a step of a group of one."""
        return self.run_shared(plan, [plan.num_tokens])

    def _record_calls(self) -> Sequence[ExpertsCall]:
        """Return what a forward pass calls of the experts, in order; no token gets to any expert."""
        recorder, step = CallRecorder(), self._hook.step
        self._hook.step = recorder
        try:
            zero = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
            run_one_token(self._model, self._device, input_ids=zero)
        finally:
            self._hook.step = step
        return tuple(recorder.calls)

    # --- memory -------------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Give memory back until ``wake_up``: 1 the cache and the weights' place on the device, 2 the weights too.

        The experts are dropped at either level.
        """
        if self._asleep is None:  # else it goes to a deeper level
            self._asleep = self._rows.expert_ids
        self._rows = self._no_rows()
        if self._runner.loaded is not None:
            install_rows(self._model, self._rows.tensors)
        if level > 1:
            self._calls = ()  # they hold the modules
        self._runner.sleep(level)

    def wake_up(self, on_progress: OnProgress) -> None:
        """Put the weights back, read again where they were dropped, the experts always.

        Raises:
            StartupError: the weights can no longer be read.
            RuntimeError: the device has not the memory any more.
        """
        self._runner.wake_up(on_progress)
        self._calls = self._calls or self._record_calls()
        expert_ids, self._asleep = self._asleep or (), None
        rows = self.load_rows(expert_ids)
        install_rows(self._model, rows.tensors)
        self._rows = rows

    def close(self) -> None:
        """Free the device; idempotent."""
        self._shared = None
        self._runner.close()

    @property
    def _model(self) -> Any:
        loaded = self._runner.loaded
        assert loaded is not None, "the runner sleeps without weights, or is closed"
        return loaded.model

    def _load_dense(self, config: ModelConfig, _attention: str, on_progress: OnProgress) -> LoadedModel:
        on_progress("reading the dense weights", 0.0)
        with progress_bars_to(on_progress, 0.1, 0.9), failures_as_startup_errors(config):
            model = self._checkpoint.load_dense().to(self._device)
        self._hook.attach(model)
        return LoadedModel(
            model=model, info=describe(model.config, model.generation_config), device=self._device, dtype=model.dtype
        )
