"""The two seams inside an engine: EngineCore, which the process drives, and Runner, which the core drives.

``EngineCore`` is what a process puts its threads and its busy loop around (``engine/proc``), and what offline use
drives in a thread. Shoal's own is ``engine.core.native.NativeCore``; a core around another engine would implement the
same. ``Runner`` is the device behind a native core: torch, sim, or a rank of a lockstep group
(``engine.core.lockstep``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.interfaces.plan import Sample, SequenceKey, StepPlan
from engine.wire.ids import ClientId
from engine.wire.load import Load
from engine.wire.messages import AddRequest, EngineCoreOutput

OnProgress = Callable[[str, float], None]
"""Called with what is being done, in a few words, and how far it is, 0..1."""

OutputsByClient = Mapping[ClientId, list[EngineCoreOutput]]
"""What one step has for each client; the caller owns the lists. Clients without outputs are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """What a runner learned while it loaded.

    num_blocks: KV blocks of ``block_size`` tokens. eos_token_ids: tokens that end a sequence by themselves.
    features, hidden_size: see ``EngineReady``.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    eos_token_ids: frozenset[int]
    device: str
    dtype: str
    features: frozenset[str] = frozenset()
    hidden_size: int = 0


class Runner(Protocol):
    """Runs one planned step on a device, or pretends to."""

    @property
    def limits(self) -> RunnerLimits:
        """Return what the loaded model can do."""

    def run(self, plan: StepPlan) -> Sequence[Sample]:
        """Run the step; one sample per chunk with ``samples`` set, in plan order.

        Whatever it raises is the engine's death: what the KV cache holds is unknown then.
        """

    def sleep(self, level: int) -> None:
        """Give memory back until ``wake_up``; what the KV cache held is lost. Called awake, or for a deeper level.

        level: 1 frees the KV cache and moves the weights off the device, 2 drops the weights.
        """

    def wake_up(self, on_progress: OnProgress) -> None:
        """Take the memory again and load what was dropped; the limits stay what they were."""

    def close(self) -> None:
        """Free the device."""


class RequestScheduler(Protocol):
    """The sequences an engine has, as its process steers them between two steps; implemented by ``Scheduler``.

    Nothing here runs a token or waits. Each call may be made at any time but inside ``EngineCore.step``.
    """

    def free_client(self, client_id: ClientId) -> None:
        """Free every sequence of a client that has gone; no output follows."""

    def stall_client(self, client_id: ClientId) -> None:
        """Give the sequences of a client that takes nothing no more compute; outputs that wait still go out."""

    def resume_client(self, client_id: ClientId) -> None:
        """Let the sequences of a client that was stalled go on."""

    def give_back_all(self) -> None:
        """Free every sequence; each is given back with a REROUTE output, to go on with another engine."""

    def hold_new_requests(self) -> None:
        """Let sequences that come from now on wait until ``release_held_requests``; idempotent."""

    def release_held_requests(self) -> None:
        """Let those that were held back run like all others; idempotent."""

    def has_earlier(self) -> bool:
        """Tell whether there are sequences that are not held back, also such as cannot run now."""

    def abort_earlier(self) -> None:
        """Free every sequence that is not held back; each ends with an ABORT output."""

    def flush(self) -> OutputsByClient:
        """Return the outputs that wait, and run nothing."""


class EngineCore(Protocol):
    """One rank's engine, driven from one thread. No sockets, no clock of its own.

    The life of a request: ``add_request``, then outputs of ``step`` until one has a finish reason. Every request that
    was added ends in exactly one such output, but for those of a client that was freed.
    """

    @property
    def limits(self) -> RunnerLimits:
        """Return what the loaded model can do, with ``max_model_len`` as far as the KV cache allows."""

    @property
    def scheduler(self) -> RequestScheduler:
        """Return what steers the sequences between two steps."""

    def add_request(self, request: AddRequest, received_at: float) -> None:
        """Queue one sequence. An impossible one is not raised: it ends with an ERROR output of the next step.

        received_at: monotonic seconds.
        """

    def abort_requests(self, keys: Sequence[tuple[SequenceKey, int]]) -> None:
        """End sequences, each named by (key, attempt), with an ABORT output of the next step.

        Unknown ones, and other attempts of known ones, are ignored: their end may be on its way already.
        """

    def has_work(self) -> bool:
        """Tell whether the next step would run a token or return an output."""

    def step(self, now: float, on_planned: Callable[[], object] | None = None) -> OutputsByClient:
        """Run one step and return its outputs.

        now: monotonic seconds at its start. on_planned: called when it is decided which sequences run and before that
        takes its time; ``load`` shows it then.
        """

    def load(self) -> Load:
        """Return the counters as they are now (``num_queued`` is the process's to fill)."""

    def sleep(self, level: int) -> None:
        """Give the device's memory back (see ``Runner.sleep``); running sequences wait, to be computed anew."""

    def wake_up(self, on_progress: OnProgress) -> None:
        """Undo ``sleep``; steps may run again."""

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Run a registered utility method.

        Raises:
            UnknownMethodError: no such method; names those there are.
        """

    def close(self) -> None:
        """Free the device."""
