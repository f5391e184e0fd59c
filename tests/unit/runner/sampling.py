"""Sequences and steps for the sampler alone, and the plain way to say what it should do."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.interfaces.plan import Sample, ScheduledChunk, SequenceState, StepPlan
from engine.runner.sampler import Sampler
from engine.wire.ids import ClientId
from engine.wire.sampling import SamplingParams

VOCABULARY = 60
EOS = 2


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, **fields})


def sequence(
    sampling: SamplingParams, output: Sequence[int] = (), *, prompt: Sequence[int] = (0,), sample_index: int = 0
) -> SequenceState:
    return SequenceState(
        client_id=ClientId(0, 1),
        request_id=1,
        sample_index=sample_index,
        attempt=0,
        sampling=sampling,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        received_at=0.0,
    )


def plan_of(sequences: Sequence[SequenceState]) -> StepPlan:
    return StepPlan([ScheduledChunk(s, len(s.token_ids) - 1, 1, True) for s in sequences])


def sample(logits: torch.Tensor, sequences: Sequence[SequenceState], sampler: Sampler | None = None) -> list[Sample]:
    """Run one step whose logits are given; they are left as they are."""
    return (sampler or Sampler(frozenset({EOS}))).sample(logits.clone(), plan_of(sequences))


def tokens(logits: torch.Tensor, sequences: Sequence[SequenceState], sampler: Sampler | None = None) -> list[int]:
    samples = sample(logits, sequences, sampler)
    assert not any(drawn.error for drawn in samples), samples
    return [drawn.token_id for drawn in samples]


def logits(rows: int, vocabulary: int = VOCABULARY, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(5)) * spread


def expected_logits(row: torch.Tensor, sampling: SamplingParams, prompt: list[int], output: list[int]) -> NDArray[Any]:
    """Apply every rule the plain way: token by token, in double precision."""
    values = row.double().numpy().copy()
    for token in {*prompt, *output}:
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    for token, bias in sampling.logit_bias.items():
        values[token] += bias
    forbidden = set(range(len(values))) - set(sampling.allowed_token_ids) if sampling.allowed_token_ids else set()
    for *beginning, last in sampling.bad_words:
        if output[len(output) - len(beginning) :] == beginning:
            forbidden.add(last)
    if len(output) < sampling.min_tokens:
        forbidden |= {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    values[sorted(forbidden)] = -np.inf
    return values


def expected_distribution(
    row: torch.Tensor, sampling: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None
) -> NDArray[np.float64]:
    """Filter the plain way: sort, then top-k, top-p within it, min-p."""
    values = expected_logits(row, sampling, prompt or [0], output or [])
    probabilities = np.exp((values - values.max()) / sampling.temperature)
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    kept = order[: sampling.top_k or None]
    within = probabilities[kept] / probabilities[kept].sum()
    kept = kept[np.cumsum(within) - within < sampling.top_p]
    kept = kept[probabilities[kept] >= sampling.min_p * probabilities.max()]
    result = np.zeros(len(probabilities))
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result
