"""Chooses the next token of every sampling row: greedy, or one draw from the filtered distribution.

The choice for a row depends on its own scores, parameters, tokens and randomness only, never on what shares the batch.
In order: token rules (penalties, biases, bans), grammar, then greedy, or temperature, filters and a draw.
"""

from collections.abc import Mapping, Sequence

import torch

from engine.interfaces.plan import Sample, SequenceState, StepPlan
from engine.runner.draw import draw
from engine.runner.fault import Fault
from engine.runner.grammar import Grammars
from engine.runner.logprobs import PromptScores, RawScores
from engine.runner.philox import uniforms
from engine.runner.rules import TokenRules
from engine.wire.logprobs import Logprobs
from engine.wire.messages import ErrorKind

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy; dividing by them would overflow."""

_NO_FAULT = 0
_FAULTS = {
    1: Fault("the model produced no valid probabilities for this sequence (not a number)", ErrorKind.ENGINE),
    2: Fault(
        "no token is left to choose: response_format, allowed_token_ids, bad_words and min_tokens together forbid all",
        ErrorKind.REQUEST,
    ),
}


class Sampler:
    """Samples the steps of one runner. What it keeps per sequence goes with the sequence."""

    def __init__(self, eos_token_ids: frozenset[int], grammars: Grammars | None = None) -> None:
        """Prepare. grammars: None when this model's tokens cannot be matched with a grammar."""
        self._rules = TokenRules(eos_token_ids)
        self._prompts = PromptScores()
        self._grammars = grammars

    def prepare(self, plan: StepPlan) -> None:
        """Start on what takes long, to be called before the forward pass."""
        if self._grammars is not None:
            self._grammars.prepare(chunk.sequence for chunk in plan.chunks)

    def sample(self, logits: torch.Tensor, plan: StepPlan) -> list[Sample]:
        """Choose one token for each chunk that draws.

        logits: [num_draws + num_scored, vocabulary], any float type: the drawing rows in plan order, then those of
        ``scored_positions``. The content is used up.

        A row without a choice fails alone, with a sentence in its sample.
        """
        sequences = [chunk.sequence for chunk in plan.chunks if chunk.draws]
        self._prompts.record(logits[len(sequences) :], plan)
        if not sequences:
            return []
        scores = logits[: len(sequences)].float()  # comparing in bfloat16 is slower and ties more
        raw = RawScores(scores, sequences)
        self._rules.apply(scores, sequences)
        faults = {} if self._grammars is None else self._grammars.apply(scores, sequences)
        tokens, states = _choose(scores, sequences)
        logprobs = raw.of(tokens)
        token_ids, codes = torch.stack([tokens, states]).tolist()  # where the host waits for the device
        faults = {row: _FAULTS[code] for row, code in enumerate(codes) if code != _NO_FAULT} | faults
        return self._samples(sequences, token_ids, faults, logprobs)

    def _samples(
        self,
        sequences: Sequence[SequenceState],
        token_ids: list[int],
        faults: Mapping[int, Fault],
        logprobs: Mapping[int, Logprobs],
    ) -> list[Sample]:
        return [
            Sample(0, faults[row].reason, error_kind=faults[row].kind)
            if row in faults
            else Sample(token_id, None, logprobs.get(row), self._prompts.take(sequence))
            for row, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True))
        ]


def _choose(scores: torch.Tensor, sequences: Sequence[SequenceState]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one token per row [R] and whether it means anything [R], as a key of ``_FAULTS``."""
    best, tokens = scores.max(dim=-1)
    states = torch.where(best.isfinite(), _NO_FAULT, torch.where(best.isneginf(), 2, 1))
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature >= _GREEDY_BELOW]
    if not rows:
        return tokens, states
    drawing = [sequences[row] for row in rows]
    draws = uniforms([(s.sampling.seed, s.sample_index, s.num_output_tokens) for s in drawing])
    numbers = torch.from_numpy(draws).to(scores.device)
    params = [sequence.sampling for sequence in drawing]
    if len(rows) == len(sequences):
        return draw(scores, best, params, numbers), states
    index = torch.tensor(rows, device=scores.device)
    return tokens.index_copy(0, index, draw(scores[index], best[index], params, numbers)), states
