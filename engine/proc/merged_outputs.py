"""Outputs that wait for one client, one entry per sequence however many steps they come from."""

from copy import copy
from itertools import islice

from engine.wire.logprobs import Logprobs
from engine.wire.messages import EngineCoreOutput

_Key = tuple[int, int, int]


class MergedOutputs:
    """Joins outputs per sequence and attempt; pure.

    One step's outputs, the usual case, are handed through as they are. From the second on they are joined into copies
    of its own, which grow in place: a client that takes nothing costs each step its new tokens, not all that wait.
    """

    def __init__(self) -> None:
        self._step: list[EngineCoreOutput] = []
        self._joined: dict[_Key, EngineCoreOutput] = {}

    def __len__(self) -> int:
        return len(self._joined) or len(self._step)

    def add(self, outputs: list[EngineCoreOutput]) -> None:
        """Take one step's outputs; they stay as they are."""
        if not self:
            self._step = outputs
            return
        for output in self._step:
            self._join(output)
        self._step = []
        for output in outputs:
            self._join(output)

    def first(self, count: int) -> list[EngineCoreOutput]:
        """Return that many of those that have waited longest, or all; the next ``add`` may change them."""
        if self._joined:
            return list(islice(self._joined.values(), count))
        return self._step if len(self._step) <= count else self._step[:count]

    def remove_first(self, count: int) -> None:
        """Take out what ``first`` returned."""
        if self._joined:
            for key in list(islice(self._joined, count)):
                del self._joined[key]
        else:
            self._step = self._step[count:]

    def clear(self) -> None:
        """Forget what waits."""
        self._step = []
        self._joined = {}

    def _join(self, output: EngineCoreOutput) -> None:
        key = (output.request_id, output.sample_index, output.attempt)
        waiting = self._joined.get(key)
        if waiting is None:
            self._joined[key] = _copy(output)
        else:
            _absorb(waiting, output)


def _copy(output: EngineCoreOutput) -> EngineCoreOutput:
    copied = copy(output)
    copied.new_token_ids = output.new_token_ids.copy()
    return copied


def _absorb(waiting: EngineCoreOutput, later: EngineCoreOutput) -> None:
    """Add a later output of the same attempt: tokens joined, first facts kept, the end from the later one."""
    waiting.new_token_ids += later.new_token_ids
    waiting.finish_reason = later.finish_reason
    waiting.stop_token_id = later.stop_token_id
    waiting.error = later.error
    waiting.error_kind = later.error_kind
    if waiting.queue_time_s is None:
        waiting.queue_time_s = later.queue_time_s
    waiting.num_cached_tokens = waiting.num_cached_tokens or later.num_cached_tokens
    waiting.logprobs = _join_logprobs(waiting.logprobs, later.logprobs)
    waiting.prompt_logprobs = waiting.prompt_logprobs or later.prompt_logprobs
    waiting.pooled = later.pooled  # it comes with the end


def _join_logprobs(before: Logprobs | None, after: Logprobs | None) -> Logprobs | None:
    return before + after if before is not None and after is not None else before or after
