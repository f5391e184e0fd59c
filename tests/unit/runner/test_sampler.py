"""Draws follow the distribution that was asked for, and depend on nothing else in the batch."""

import random
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.runner.filters import lowest_kept
from engine.runner.sampler import sample
from engine.scheduler.plan import SequenceState
from engine.wire.ids import ClientId
from engine.wire.sampling import SamplingParams

VOCABULARY = 60
NUM_DRAWS = 20_000


def sequence(sampling: SamplingParams, position: int = 0, sample_index: int = 0) -> SequenceState:
    return SequenceState(
        client_id=ClientId(0, 1),
        request_id=1,
        sample_index=sample_index,
        attempt=0,
        sampling=sampling,
        token_ids=[0] * (position + 1),
        num_prompt_tokens=1,
        received_at=0.0,
    )


def params(**fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=9, **fields)  # type: ignore[arg-type]


def logits(rows: int, vocabulary: int = VOCABULARY, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(5)) * spread


def expected_distribution(row: torch.Tensor, sampling: SamplingParams) -> NDArray[np.float64]:
    """Filter the plain way: sort, then top-k, top-p within it, min-p."""
    probabilities = np.exp(row.double().numpy() / sampling.temperature)
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    kept = order[: sampling.top_k or None]
    within = probabilities[kept] / probabilities[kept].sum()
    kept = kept[np.cumsum(within) - within < sampling.top_p]
    kept = kept[probabilities[kept] >= sampling.min_p * probabilities.max()]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


@pytest.mark.parametrize(
    "sampling",
    [
        params(),
        params(temperature=0.6),
        params(temperature=1.7),
        params(top_k=5),
        params(top_p=0.8),
        params(min_p=0.1),
        params(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "cold", "hot", "top-k", "top-p", "min-p", "all"],
)
def test_draws_follow_the_analytic_distribution(sampling: SamplingParams) -> None:
    row = logits(1)
    counts = np.zeros(VOCABULARY)
    for seed in range(NUM_DRAWS // 500):
        seeded = msgspec.structs.replace(sampling, seed=seed)
        tokens = [drawn.token_id for drawn in sample(row.expand(500, -1), [sequence(seeded, i) for i in range(500)])]
        counts += np.bincount(tokens, minlength=VOCABULARY)
    expected = expected_distribution(row[0], sampling) * NUM_DRAWS
    assert counts[expected == 0].sum() == 0, "a token that was filtered out was drawn"
    frequent = expected >= 5
    chi_square = float(((counts - expected)[frequent] ** 2 / expected[frequent]).sum())
    freedom = int(frequent.sum()) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


@dataclass(frozen=True)
class Case:
    spread: float
    sampling: SamplingParams


@pytest.mark.parametrize(
    "case",
    [
        Case(3.0, params(top_p=0.5)),
        Case(1.0, params(top_p=0.5)),
        Case(0.01, params(top_p=0.9)),
        Case(1.0, params(top_k=64)),
        Case(1.0, params(top_k=65)),
        Case(1.0, params(top_k=2_000)),
        Case(1.0, params(top_k=1_500, top_p=0.99)),
        Case(1.0, params(top_k=9_999, top_p=0.3, min_p=0.3)),
    ],
    ids=lambda case: f"{case.spread} {case.sampling.top_k} {case.sampling.top_p}",
)
def test_exactly_the_right_tokens_are_kept_however_wide_the_mass_is_spread(case: Case) -> None:
    row = logits(1, vocabulary=3_000, spread=case.spread)
    scores = row - row.max()
    kept = (scores >= lowest_kept(scores, [case.sampling])[:, None])[0].numpy()
    expected = expected_distribution(row[0], case.sampling) > 0
    assert abs(int(kept.sum()) - int(expected.sum())) <= 1, "float32 may put the edge one token further"
    assert (kept ^ expected).sum() <= 1


def test_tokens_that_tie_with_the_last_one_kept_stay() -> None:
    scores = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    assert lowest_kept(scores, [params(top_k=2)]).tolist() == [-1.0]
    assert lowest_kept(scores, [params(min_p=1.0)]).tolist() == [0.0]


def mixed_parameters(count: int) -> list[SamplingParams]:
    rng = random.Random(9)
    return [
        params(
            temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
            top_k=rng.choice([0, 0, 1, 40, 500]),
            top_p=rng.choice([1.0, 0.3, 0.95]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.getrandbits(64),
        )
        for _ in range(count)
    ]


def test_a_row_draws_the_same_token_whatever_shares_the_batch() -> None:
    rows = logits(48, vocabulary=2_000, spread=1.0)
    sequences = [sequence(p, position=i % 7, sample_index=i % 3) for i, p in enumerate(mixed_parameters(48))]
    together = sample(rows, sequences)
    alone = [sample(rows[i : i + 1], [sequences[i]])[0] for i in range(48)]
    order = random.Random(1).sample(range(48), 48)
    shuffled = sample(rows[order], [sequences[i] for i in order])
    assert alone == together
    assert shuffled == [together[i] for i in order]


def test_seed_sample_and_position_each_change_the_draw() -> None:
    row = torch.zeros(1, 5_000)
    draws = [
        sample(row, [sequence(params(seed=seed), position, sample_index)])[0].token_id
        for seed, position, sample_index in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]
    ]
    assert len(set(draws)) == len(draws)


def test_greedy_takes_the_best_and_so_does_the_tiniest_temperature() -> None:
    rows = logits(3)
    best = rows.argmax(dim=-1).tolist()
    for temperature in (0.0, 1e-30, 1e-4):
        samples = sample(rows, [sequence(params(temperature=temperature)) for _ in range(3)])
        assert [drawn.token_id for drawn in samples] == best


def test_half_precision_logits_and_forbidden_tokens() -> None:
    rows = logits(1).to(torch.bfloat16)
    rows[0, ::2] = -torch.inf
    tokens = [sample(rows, [sequence(params(temperature=5.0), position)])[0].token_id for position in range(200)]
    assert all(token % 2 == 1 for token in tokens)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3, "min_p": 0.1}])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_a_number_fails_alone(fields: dict[str, float], bad: float) -> None:
    rows = logits(3)
    expected = sample(rows, [sequence(params(**fields))] * 3)
    rows[1, 17] = bad
    samples = sample(rows, [sequence(params(**fields))] * 3)
    assert samples[1].error is not None
    assert "this sequence" in samples[1].error
    assert [samples[0], samples[2]] == [expected[0], expected[2]]


def test_a_row_with_nothing_allowed_fails() -> None:
    assert sample(torch.full((1, 4), -torch.inf), [sequence(params())])[0].error is not None


def test_no_rows_no_samples() -> None:
    assert sample(torch.empty(0, VOCABULARY), []) == []
