"""The output processor, the only loop over tokens: one engine message in, text on the streams it concerns out.

Everything that happens per token happens here and nowhere else, so this is where its cost is kept low: the clock is
read once per batch, each reader is called once per batch, counters are raised once per batch.
"""

import logging
from collections import defaultdict
from dataclasses import dataclass, field

from engine.wire.errors import EngineError, InvalidRequestError, ShoalError
from engine.wire.messages import EngineCoreOutput, EngineCoreOutputs, ErrorKind, FinishReason
from metrics.stats import ServingStats
from orchestrator.llm.detokenizer import StopChecker
from orchestrator.llm.stream import Choice, RequestStream

logger = logging.getLogger(__name__)

SequenceName = tuple[int, int]
"""(request_id, sample_index), as the engines know a choice."""

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
_ERRORS = {ErrorKind.ENGINE: EngineError, ErrorKind.REQUEST: InvalidRequestError}


@dataclass(slots=True)
class _BatchWork:
    """One message while it is applied.

    rank: of its engine. now: monotonic seconds. orphans: sequences that ended here but not on their engine. gaps: time
    of a sequence's last token -> single tokens that follow it; mostly it is one time for all.
    """

    rank: int
    now: float
    orphans: list[SequenceName] = field(default_factory=list)
    gaps: defaultdict[float, int] = field(default_factory=lambda: defaultdict(int))


class OutputProcessor:
    """Knows every open choice and turns engine outputs into text for it. No clock, no I/O."""

    def __init__(self, stats: ServingStats) -> None:
        self._stats = stats
        self._open: dict[SequenceName, tuple[Choice, RequestStream]] = {}
        self.num_unknown = 0  # outputs for choices that had ended here: a late token after an abort, mostly

    @property
    def num_open(self) -> int:
        """Return how many choices have not ended."""
        return len(self._open)

    def open_streams(self) -> list[RequestStream]:
        """Return the streams that have not ended."""
        return list(dict.fromkeys(stream for _, stream in self._open.values()))

    def register(self, stream: RequestStream) -> None:
        """Expect outputs for all choices of a stream; before they are sent, so that no output comes too early."""
        for choice in stream.choices:
            self._open[choice.key] = choice, stream

    def forget(self, stream: RequestStream) -> list[SequenceName]:
        """Drop a stream that could not be sent whole; return what was registered of it, to abort on the engines."""
        return [choice.key for choice in stream.choices if self._open.pop(choice.key, None) is not None]

    def process(self, batch: EngineCoreOutputs, now: float) -> list[SequenceName]:
        """Apply one message.

        now: monotonic seconds, the same clock as ``RequestStream.created_at``.

        Returns the sequences that ended here but not on their engine, to abort there.
        """
        work = _BatchWork(batch.engine_id.rank, now)
        num_tokens = 0
        touched: dict[RequestStream, None] = {}  # ordered, so that readers are called in the order of the outputs
        find, gaps = self._open.get, work.gaps
        for output in batch.outputs:
            found = find((output.request_id, output.sample_index))
            if found is None:
                self.num_unknown += 1
                continue
            choice, stream = found
            token_ids = output.new_token_ids
            num_tokens += len(token_ids)
            try:
                if choice.is_plain and len(token_ids) == 1 and output.finish_reason is None:
                    # The next token and nothing else, as nearly always: no call that is not needed.
                    gaps[choice.last_token_at] += 1
                    choice.last_token_at = now
                    choice.num_output_tokens += 1
                    text = choice.detokenizer.feed(token_ids)
                    write = choice.write_text
                    # What waits goes first.
                    if text and (write is None or choice.parts or not write(text)):
                        stream.add_text(choice, text)
                        touched[stream] = None
                else:
                    touched[stream] = None
                    self._apply(choice, stream, output, work)
            except Exception as error:  # one request's trouble must not end the loop of all others
                logger.exception("request %d: its output could not be processed", output.request_id)
                work.orphans += self.fail(stream, ShoalError(f"the output could not be processed: {error}"), now)
        self._observe_batch(work, num_tokens)
        for stream in touched:
            work.orphans += self._notify(stream, now)
        return work.orphans

    def finish(self, stream: RequestStream, reason: str, now: float) -> list[SequenceName]:
        """End what is still open of a stream and call its reader; return the sequences to abort on their engines."""
        names = []
        for choice in stream.choices:
            if choice.finish_reason is None and choice.key in self._open:
                names.append(choice.key)
                self._end(choice, stream, self._rest(choice), reason, now)
        self._notify(stream, now)
        return names

    def fail(self, stream: RequestStream, error: ShoalError, now: float) -> list[SequenceName]:
        """End a whole stream with an error, without calling its reader; return the sequences to abort."""
        names = [choice.key for choice in stream.choices if self._open.pop(choice.key, None) is not None]
        if stream.fail(error):
            reason = "reject" if isinstance(error, InvalidRequestError) else "error"
            for choice in stream.choices:
                if choice.key in names:
                    self._observe_end(choice, stream, reason, now)
        return names

    def fail_all(self, error: ShoalError, now: float) -> None:
        """End every open stream with an error and call its reader."""
        for stream in self.open_streams():
            self.fail(stream, error, now)
            self._notify(stream, now)

    def _apply(self, choice: Choice, stream: RequestStream, output: EngineCoreOutput, work: _BatchWork) -> None:
        if choice.rank < 0:  # the output came before the sending returned
            choice.rank = work.rank
        if choice.echo or choice.logprobs is not None:
            self._begin(choice, stream, output)
        text, stopped = self._read_tokens(choice, stream, output, work) if output.new_token_ids else ("", False)
        if stopped:
            self._end(choice, stream, text, "stop", work.now)
            if output.finish_reason is None:
                work.orphans.append(choice.key)
        elif output.finish_reason is None:
            if text:
                stream.add_text(choice, text)
        elif output.finish_reason is FinishReason.ERROR:
            # One error for the whole request: its caller can do nothing with the choices that are left.
            error = _ERRORS[output.error_kind](output.error or "the engine failed this request")
            names = self.fail(stream, error, work.now)
            work.orphans += [name for name in names if name != choice.key]
        elif output.finish_reason is not FinishReason.REROUTE:  # the client picks another engine for that one
            self._finish_from_engine(choice, stream, output, text, work)

    def _read_tokens(
        self, choice: Choice, stream: RequestStream, output: EngineCoreOutput, work: _BatchWork
    ) -> tuple[str, bool]:
        """Return the text of new tokens that may go out, and whether a stop string ends with it."""
        token_ids, stopped = output.new_token_ids, False
        if choice.stop is None:
            feed = choice.detokenizer.feed
            text = feed(token_ids) if choice.logprobs is None else choice.logprobs.feed(output, feed)
        else:
            text, num_read, stopped = _read_until_stop(choice, choice.stop, output)
            token_ids = token_ids[:num_read]
        self._observe_tokens(choice, stream, output, token_ids, work)
        return text, stopped

    def _begin(self, choice: Choice, stream: RequestStream, output: EngineCoreOutput) -> None:
        """Let a prompt that begins the text out, and its log-probabilities, with the first output that is no error."""
        if choice.last_token_at or output.finish_reason in (FinishReason.ERROR, FinishReason.REROUTE):
            return
        echo, choice.echo = choice.echo, ""
        if choice.logprobs is not None:
            choice.logprobs.begin(output.prompt_logprobs, echo)
        if echo:
            stream.add_text(choice, echo)

    def _finish_from_engine(
        self, choice: Choice, stream: RequestStream, output: EngineCoreOutput, text: str, work: _BatchWork
    ) -> None:
        assert output.finish_reason is not None
        choice.pooled = output.pooled
        has_run = output.queue_time_s is not None and output.finish_reason is not FinishReason.ABORT
        if has_run and not choice.is_prompt_read:  # and ends without a token: none was wanted, or it was a stop token
            choice.is_prompt_read = True
            choice.num_cached_tokens = output.num_cached_tokens
        rest, stopped = self._last_text(choice)
        self._end(choice, stream, text + rest, "stop" if stopped else _REASONS[output.finish_reason], work.now)

    def _rest(self, choice: Choice) -> str:
        return self._last_text(choice)[0]

    def _last_text(self, choice: Choice) -> tuple[str, bool]:
        """Return what was held back, and whether it completes a stop string."""
        tail = choice.detokenizer.flush()
        # The tail may complete a stop string that was held back, in whose place the text then ends.
        if choice.stop is None:
            return tail, False
        text, stopped = choice.stop.feed(tail)
        return (text, True) if stopped else (text + choice.stop.flush(), False)

    def _end(self, choice: Choice, stream: RequestStream, text: str, reason: str, now: float) -> None:
        self._open.pop(choice.key, None)
        if stream.end_choice(choice, text, reason):
            self._observe_end(choice, stream, reason, now)

    def _notify(self, stream: RequestStream, now: float) -> list[SequenceName]:
        """Call a stream's reader; one that fails loses its request, whose open sequences are returned."""
        try:
            stream.notify()
        except Exception as error:  # its trouble must not end the loop of all others
            logger.exception("a request's reader failed")
            stream.detach()
            return self.fail(stream, ShoalError(f"the response could not be written: {error}"), now)
        return []

    def _observe_batch(self, work: _BatchWork, num_tokens: int) -> None:
        if num_tokens:
            self._stats.on_tokens(work.rank, num_tokens)
        for before, count in work.gaps.items():
            self._stats.on_inter_token(work.rank, (work.now - before) * count, count)

    def _observe_tokens(
        self, choice: Choice, stream: RequestStream, output: EngineCoreOutput, token_ids: list[int], work: _BatchWork
    ) -> None:
        rank, now = work.rank, work.now
        choice.num_output_tokens += len(token_ids)
        if choice.token_ids is not None:
            choice.token_ids += token_ids
        if choice.last_token_at:
            self._stats.on_inter_token(rank, now - choice.last_token_at, len(token_ids))
        else:
            choice.rank = rank
            choice.is_prompt_read = True
            choice.first_token_at = now
            choice.queue_time_s = output.queue_time_s
            choice.num_cached_tokens = output.num_cached_tokens
            self._stats.on_first_token(rank, now - stream.created_at, output.queue_time_s)
        choice.last_token_at = now
        choice.is_plain = choice.stop is None and choice.logprobs is None and choice.token_ids is None

    def _observe_end(self, choice: Choice, stream: RequestStream, reason: str, now: float) -> None:
        num_read = choice.num_prompt_tokens if choice.is_prompt_read else 0
        self._stats.on_finished(choice.rank, reason, now - stream.created_at, num_read)


def _read_until_stop(choice: Choice, stop: StopChecker, output: EngineCoreOutput) -> tuple[str, int, bool]:
    """Return the text of new tokens that may go out, how many were read for it, and whether a stop string ends it.

    They are read one by one: none behind a stop string counts, however many came at once.
    """
    feed, text = choice.detokenizer.feed, ""
    one_by_one = ([token_id] for token_id in output.new_token_ids)
    pieces = map(feed, one_by_one) if choice.logprobs is None else choice.logprobs.pieces(output, feed)
    for num_read, piece in enumerate(pieces, start=1):
        out, stopped = stop.feed(piece)
        text += out
        if stopped:
            return text, num_read, True
    return text, len(output.new_token_ids), False
