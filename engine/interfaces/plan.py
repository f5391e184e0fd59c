"""The plan of one step and its results: what the scheduler asks of a runner, and what a runner returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from engine.wire.ids import ClientId
from engine.wire.logprobs import Logprobs
from engine.wire.messages import ErrorKind
from engine.wire.sampling import PoolingParams, SamplingParams
from engine.wire.tensors import Tensor

SequenceKey = tuple[int, int]
"""(request_id, sample_index): names one token stream inside an engine."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class SequenceState:
    """One token stream inside the engine. The scheduler owns and writes it; the runner only reads.

    What a runner keeps for a sequence it keeps under a weak reference, so that it goes with the sequence, whatever its
    end. ``token_ids`` only ever grows, and so does ``block_table`` while the sequence runs.

    token_ids: prompt, then output tokens of earlier attempts, then output tokens of this one.
    num_prompt_tokens: how many of ``token_ids`` are the user's prompt.
    num_computed: tokens whose keys and values are in the cache; always < len(token_ids) while unfinished.
    block_table: KV blocks in order; block i holds positions [i * block_size, (i + 1) * block_size).
    received_at: monotonic seconds of this process at receipt.
    num_resumed: output tokens of earlier attempts, already known when this attempt began.
    arrival: position in the order of arrival at this engine; kept across preemptions, so that a preempted sequence
        comes before every later one. Migrated ones come before all that began here.
    scheduled_at: start of the step that first ran a part of it.
    cache_salt: sequences share cached blocks only with those of the same salt; None is a salt of its own.
    num_cached: tokens that the prefix cache held when this attempt began to run.
    block_hashes: names of its first full blocks, as far as they were needed (see ``prefix_cache.py``).
    is_promoted: it was overtaken for so long that it comes before every priority now (see ``request_queues.py``).
    prompt_embeds: [num_prompt_tokens, hidden_size], instead of the embeddings of the prompt's tokens, which are
        placeholders then.
    pooling: it ends with a vector of its prompt, and draws no token.
    is_held: it came during a pause and waits for its end.
    """

    client_id: ClientId
    request_id: int
    sample_index: int
    attempt: int
    sampling: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    received_at: float
    priority: int = 0
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    num_resumed: int = 0
    arrival: int = 0
    scheduled_at: float | None = None
    cache_salt: str | None = None
    num_cached: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    is_promoted: bool = False
    prompt_embeds: Tensor | None = None
    pooling: PoolingParams | None = None
    is_held: bool = False

    @property
    def key(self) -> SequenceKey:
        """Return the name of this stream inside the engine."""
        return self.request_id, self.sample_index

    @property
    def num_output_tokens(self) -> int:
        """Return the output tokens so far, over all attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Tell whether every prompt token must be computed, because its log-probability goes out with the next one."""
        return self.sampling.num_prompt_logprobs is not None and self.num_output_tokens == self.num_resumed


class ScheduledChunk(Struct, frozen=True, eq=False):
    """Tokens ``[start, start + num_tokens)`` of one sequence run in this step.

    samples: the chunk reaches the end of what is known, so its last position yields one new token, or the vector of a
        sequence that is pooled.

    A struct, because a frozen dataclass costs 1 us to make, and a step makes one per running sequence.
    """

    sequence: SequenceState
    start: int
    num_tokens: int
    samples: bool

    @property
    def draws(self) -> bool:
        """Tell whether the last position yields a token."""
        return self.samples and self.sequence.pooling is None

    @property
    def pools(self) -> bool:
        """Tell whether the last position yields a vector."""
        return self.samples and self.sequence.pooling is not None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: ragged chunks, prefill and decode mixed. ``plan`` reserves, ``apply`` commits."""

    chunks: Sequence[ScheduledChunk]

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the runner found for one chunk that samples.

    token_id: the new token; meaningless when ``error`` is set. error: one sentence when this sequence alone failed.
    error_kind: whose fault that is. logprobs, prompt_logprobs: what goes out with the token, when asked for.
    pooled: the vector of a sequence that is pooled, which has no token.
    """

    token_id: int
    error: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    error_kind: ErrorKind = ErrorKind.ENGINE
    pooled: Tensor | None = None
