"""The load of an engine: gauges and counters, as its reports carry them."""

from msgspec import Struct


class Load(Struct, array_like=True, frozen=True, gc=False):
    """The load of one engine. The first five are gauges, the rest are counters of one incarnation.

    num_queued: sequences received but not yet seen by the scheduler.
    kv_usage: used share of the KV cache, 0..1.
    num_prefix_query_tokens, num_prefix_hit_tokens: tokens of the sequences that began to run, and those of them that
        the prefix cache held already.
    """

    num_queued: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0
    kv_usage: float = 0.0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0

    @property
    def num_sequences(self) -> int:
        """Return how many sequences the engine has, wherever in it they are."""
        return self.num_queued + self.num_waiting + self.num_running
