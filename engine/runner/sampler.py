"""The sampler: one token for every sampling row, greedy or drawn from the filtered distribution.

In order: token rules (penalties, biases, bans), grammar, then greedy, or temperature, filters and a draw. The choice
for a row depends on its own logits, parameters, tokens and randomness only, never on what shares the batch.
"""

from collections.abc import Mapping, Sequence

import torch

from engine.interfaces.plan import Sample, SequenceState, StepPlan
from engine.runner.draw import draw, uniforms
from engine.runner.grammar import Grammars
from engine.runner.logprobs import PromptLogprobs, RawLogits
from engine.runner.token_rules import TokenRules
from engine.wire.logprobs import Logprobs
from engine.wire.messages import ErrorKind

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy; dividing by them would overflow."""

_VALID, _NOT_A_NUMBER, _ALL_FORBIDDEN = 0, 1, 2
_FAILURES = {
    _NOT_A_NUMBER: Sample(
        0,
        "the model produced no valid probabilities for this sequence (not a number)",
        error_kind=ErrorKind.ENGINE,
    ),
    _ALL_FORBIDDEN: Sample(
        0,
        "no token is left to choose: response_format, allowed_token_ids, bad_words and min_tokens together forbid all",
        error_kind=ErrorKind.REQUEST,
    ),
}


class Sampler:
    """Samples the steps of one runner. What it keeps per sequence goes with the sequence."""

    def __init__(self, eos_token_ids: frozenset[int], grammars: Grammars | None = None) -> None:
        """Prepare. grammars: None when this model's tokens cannot be matched with a grammar."""
        self._rules = TokenRules(eos_token_ids)
        self._prompts = PromptLogprobs()
        self._grammars = grammars

    def prepare(self, plan: StepPlan) -> None:
        """Start on what takes long, to be called before the forward pass."""
        if self._grammars is not None:
            self._grammars.prepare(chunk.sequence for chunk in plan.chunks)

    def sample(self, logits: torch.Tensor, plan: StepPlan) -> list[Sample]:
        """Choose one token for each chunk that draws.

        logits: [num_draws + num_prompt_positions, vocabulary], any float type: the drawing rows in plan order, then
        those of ``prompt_logprob_positions``. They may be overwritten.

        A row without a choice fails alone: its sample has an error.
        """
        sequences = [chunk.sequence for chunk in plan.chunks if chunk.draws]
        self._prompts.record(logits[len(sequences) :], plan)
        if not sequences:
            return []
        logits = logits[: len(sequences)].float()  # comparing in bfloat16 is slower and ties more
        raw = RawLogits.keep(logits, sequences)
        self._rules.apply(logits, sequences)
        failures = {} if self._grammars is None else self._grammars.apply(logits, sequences)
        tokens, states = _choose(logits, sequences)
        logprobs = {} if raw is None else raw.logprobs_of(tokens)
        token_ids, codes = torch.stack([tokens, states]).tolist()  # where the host waits for the device
        # Of two reasons the grammar's is kept: it is the more precise one.
        failures = {row: _FAILURES[code] for row, code in enumerate(codes) if code != _VALID} | failures
        return self._samples(sequences, token_ids, failures, logprobs)

    def _samples(
        self,
        sequences: Sequence[SequenceState],
        token_ids: list[int],
        failures: Mapping[int, Sample],
        logprobs: Mapping[int, Logprobs],
    ) -> list[Sample]:
        return [
            failures[row]
            if row in failures
            else Sample(token_id, None, logprobs.get(row), self._prompts.take(sequence))
            for row, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True))
        ]


def _choose(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one token per row [R] and whether it means anything [R]: ``_VALID``, or a key of ``_FAILURES``."""
    best, tokens = logits.max(dim=-1)
    states = torch.where(best.isfinite(), _VALID, torch.where(best.isneginf(), _ALL_FORBIDDEN, _NOT_A_NUMBER))
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature >= _GREEDY_BELOW]
    if not rows:
        return tokens, states
    drawing = [sequences[row] for row in rows]
    draws = uniforms([(s.sampling.seed, s.sample_index, s.num_output_tokens) for s in drawing])
    numbers = torch.from_numpy(draws).to(logits.device)
    params = [sequence.sampling for sequence in drawing]
    if len(rows) == len(sequences):
        return draw(logits, best, params, numbers), states
    # Greedy and drawn rows in one batch: the drawn ones are copied, because ``draw`` overwrites its rows.
    index = torch.tensor(rows, device=logits.device)
    return tokens.index_copy(0, index, draw(logits[index], best[index], params, numbers)), states
