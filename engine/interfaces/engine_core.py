"""The two seams inside an engine: what the process wraps (EngineCore) and what the scheduler drives (Runner)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.interfaces.plan import Sample, SequenceKey, StepPlan
from engine.wire.ids import ClientId
from engine.wire.load import Load
from engine.wire.messages import AddRequest, EngineCoreOutput

OnProgress = Callable[[str, float], None]
"""Told what is being done, in a few words, and how far it is, 0..1."""


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
        """Run the step; one sample per chunk with ``samples`` set, in plan order."""

    def sleep(self, level: int) -> None:
        """Give memory back until ``wake_up``; what the KV cache held is lost. Called awake, or for a deeper level.

        level: 1 frees the KV cache and moves the weights off the device, 2 drops the weights.
        """

    def wake_up(self, on_progress: OnProgress) -> None:
        """Take the memory again and load what was dropped; the limits stay what they were."""

    def close(self) -> None:
        """Free the device."""


class EngineCore(Protocol):
    """One rank's engine, driven from one thread. No sockets, no clocks of its own."""

    @property
    def limits(self) -> RunnerLimits:
        """Return what the loaded model can do."""

    def add_request(self, request: AddRequest, received_at: float) -> None:
        """Queue one sequence. An impossible one is not raised: it ends with an ERROR output of the next step."""

    def abort_requests(self, keys: Sequence[tuple[SequenceKey, int]]) -> None:
        """Free sequences, each named by (key, attempt); each known one ends with an ABORT output of the next step."""

    def free_client(self, client_id: ClientId) -> None:
        """Free every sequence of a client that has gone; nothing more is said to it."""

    def stall_client(self, client_id: ClientId) -> None:
        """Give the sequences of a client that takes nothing no more compute; what is known is still told."""

    def resume_client(self, client_id: ClientId) -> None:
        """Let the sequences of a client that was stalled go on."""

    def give_back_all(self) -> None:
        """Free every sequence; each is given back with a REROUTE output of the next step, to go on elsewhere."""

    def has_work(self) -> bool:
        """Tell whether the next step has anything to do or to say."""

    def step(
        self, now: float, on_planned: Callable[[], object] | None = None
    ) -> Mapping[ClientId, list[EngineCoreOutput]]:
        """Run one step and return what to tell each client.

        on_planned: called when it is decided who runs and before it takes its time; ``load`` shows it then.
        """

    def flush(self) -> Mapping[ClientId, list[EngineCoreOutput]]:
        """Return what there is to tell each client, and run nothing."""

    def hold_new_requests(self) -> None:
        """Let sequences that come from now on wait until ``release_held_requests``; idempotent."""

    def release_held_requests(self) -> None:
        """Let those that were held back run like the others; idempotent."""

    def has_earlier(self) -> bool:
        """Tell whether there are sequences that are not held back, also such as cannot run now."""

    def abort_earlier(self) -> None:
        """Free every sequence that is not held back; each ends with an ABORT output."""

    def sleep(self, level: int) -> None:
        """Give the device's memory back (see ``Runner.sleep``); running sequences wait, to be computed anew."""

    def wake_up(self, on_progress: OnProgress) -> None:
        """Undo ``sleep``; steps may run again."""

    def load(self) -> Load:
        """Return the counters as they are now (``num_queued`` is the process's to fill)."""

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Run a registered utility method; raises ``ValueError`` for an unknown one, naming those known."""

    def close(self) -> None:
        """Free the device."""
