"""Draws follow the distribution that was asked for, and depend on nothing else in the batch."""

import random
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.runner.filters import Filters
from engine.runner.sampler import Sampler
from engine.wire.messages import ErrorKind
from engine.wire.sampling import SamplingParams
from tests.unit.runner.sampling import (
    EOS,
    VOCABULARY,
    expected_distribution,
    logits,
    params,
    sample,
    sequence,
    tokens,
)

NUM_DRAWS = 8_000
NUM_SEEDS = 40
PROMPT = [3, 3, 17, 40]
OUTPUT = [5, 9, 5, 5, 17, 30]


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
        params(presence_penalty=1.5),
        params(frequency_penalty=0.7),
        params(frequency_penalty=-0.5, presence_penalty=-0.3),
        params(repetition_penalty=1.8),
        params(repetition_penalty=0.7, temperature=0.8),
        params(logit_bias={5: 2.0, 7: -3.0, 59: 1.0}),
        params(allowed_token_ids=(5, 9, 17, 30, 31, 32, 59)),
        params(bad_words=((8,), (17, 30, 5), (30, 11), (31, 12))),
        params(min_tokens=7, stop_token_ids=(11, 12)),
        params(
            temperature=1.2,
            top_p=0.95,
            top_k=30,
            presence_penalty=0.4,
            frequency_penalty=0.2,
            repetition_penalty=1.2,
            logit_bias={1: 1.5},
            bad_words=((30, 6),),
            min_tokens=9,
        ),
    ],
    ids=[
        "plain",
        "cold",
        "hot",
        "top-k",
        "top-p",
        "min-p",
        "filters",
        "presence",
        "frequency",
        "negative",
        "repetition",
        "repetition-below-1",
        "bias",
        "allowed",
        "bad-words",
        "min-tokens",
        "everything",
    ],
)
def test_draws_follow_the_analytic_distribution(sampling: SamplingParams) -> None:
    row = logits(1)
    counts = np.zeros(VOCABULARY)
    sampler = Sampler(frozenset({EOS}))
    per_seed = NUM_DRAWS // NUM_SEEDS
    drawing = [sequence(sampling, OUTPUT, prompt=PROMPT, sample_index=index) for index in range(per_seed)]
    for seed in range(NUM_SEEDS):
        for one in drawing:
            one.sampling = msgspec.structs.replace(sampling, seed=seed)
        counts += np.bincount(tokens(row.expand(per_seed, -1), drawing, sampler), minlength=VOCABULARY)
    expected = expected_distribution(row[0], sampling, PROMPT, OUTPUT) * NUM_DRAWS
    assert counts[expected == 0].sum() == 0, "a token that was filtered out was drawn"
    frequent = expected >= 5
    chi_square = float(((counts - expected)[frequent] ** 2 / expected[frequent]).sum())
    freedom = int(frequent.sum()) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_positions_draw_independently_too() -> None:
    row = logits(1)
    drawn = [tokens(row, [sequence(params(seed=3), [1] * position)])[0] for position in range(800)]
    expected = expected_distribution(row[0], params()) * len(drawn)
    frequent = expected >= 5
    counts = np.bincount(drawn, minlength=VOCABULARY)
    chi_square = float(((counts - expected)[frequent] ** 2 / expected[frequent]).sum())
    assert chi_square < frequent.sum() + 4 * np.sqrt(2 * frequent.sum())


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
        Case(0.01, params(top_p=0.999)),
        Case(1.0, params(top_k=63)),
        Case(1.0, params(top_k=64)),
        Case(1.0, params(top_k=65)),
        Case(1.0, params(top_k=2_000)),
        Case(1.0, params(top_k=9_999, top_p=0.99)),
        Case(1.0, params(top_k=1_500, top_p=0.99)),
        Case(1.0, params(min_p=0.001)),
        Case(1.0, params(top_k=9_999, top_p=0.3, min_p=0.3)),
    ],
    ids=lambda case: f"{case.spread} {case.sampling.top_k} {case.sampling.top_p} {case.sampling.min_p}",
)
def test_exactly_the_right_tokens_are_kept_however_wide_the_mass_is_spread(case: Case) -> None:
    row = logits(1, vocabulary=9_999, spread=case.spread)
    expected = expected_distribution(row[0], case.sampling)
    seeded = [sequence(msgspec.structs.replace(case.sampling, seed=seed)) for seed in range(300)]
    drawn = np.array(tokens(row.expand(len(seeded), -1), seeded))
    values = row[0].numpy()
    assert (values[drawn] >= values[expected > 0].min() - 1e-6).all(), "a token below the cut was drawn"
    # Outcomes must spread over the vocabulary as the mass does (Kolmogorov-Smirnov, one in a million).
    share = np.bincount(drawn, minlength=len(values)) / len(drawn)
    assert np.abs(np.cumsum(share) - np.cumsum(expected)).max() < 2.7 / np.sqrt(len(drawn))
    # ... and over the logits: the weakest tokens kept come as often as they should
    order = np.argsort(values)
    assert np.abs(np.cumsum(share[order]) - np.cumsum(expected[order])).max() < 2.7 / np.sqrt(len(drawn))


def test_the_cut_is_found_among_any_number_of_best_tokens_or_not_claimed() -> None:
    row = logits(1, vocabulary=500)
    scaled = (row - row.max()).sort(descending=True).values
    mass = scaled.exp().sum(dim=-1, dtype=torch.float64)
    for sampling in (params(top_p=0.6), params(top_k=20), params(top_k=30, top_p=0.5), params(min_p=0.05)):
        filters = Filters.of([sampling], 500, scaled.device)
        right, holds = filters.cut(scaled, mass)
        assert holds.item()
        kept = int((scaled >= right).sum())
        for width in range(1, 500):
            cut, holds = filters.cut(scaled[:, :width], mass)
            assert not holds.item() or cut.item() == right.item()
            assert holds.item() or width <= max(kept, sampling.top_k)


def test_tokens_that_tie_with_the_last_one_kept_stay() -> None:
    row = torch.tensor([[5.0, 1.0, 4.0, 4.0, 4.0, 1.0]])
    for sampling in (params(top_k=2, temperature=9.0), params(top_k=3, temperature=9.0)):
        seeded = [sequence(msgspec.structs.replace(sampling, seed=seed)) for seed in range(200)]
        assert set(tokens(row.expand(200, -1), seeded)) == {0, 2, 3, 4}
    assert tokens(row, [sequence(params(min_p=1.0, temperature=9.0))]) == [0]


def test_many_ties_at_the_edge_of_what_is_looked_at_are_all_kept() -> None:
    row = torch.zeros(1, 3_000)
    row[0, 0] = 1.0
    seeded = [sequence(params(top_k=64, seed=seed)) for seed in range(300)]
    assert max(tokens(row.expand(300, -1), seeded)) > 2_500


def mixed_parameters(count: int) -> list[SamplingParams]:
    rng = random.Random(9)
    return [
        params(
            temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
            top_k=rng.choice([0, 0, 1, 40, 500]),
            top_p=rng.choice([1.0, 0.3, 0.95]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.getrandbits(63),
            presence_penalty=rng.choice([0.0, 0.0, 0.7]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            logit_bias=rng.choice([{}, {}, {7: 3.0}]),
            min_tokens=rng.choice([0, 5]),
            bad_words=rng.choice([(), ((1, 7), (3,))]),
            num_logprobs=rng.choice([None, None, 3]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("vocabulary", [60, 2_000, 5_000])
def test_a_row_draws_the_same_token_whatever_shares_the_batch(vocabulary: int) -> None:
    count = 48
    rows = logits(count, vocabulary=vocabulary, spread=1.0)
    sequences = [sequence(p, range(i % 7), sample_index=i % 3) for i, p in enumerate(mixed_parameters(count))]
    together = sample(rows, sequences)
    alone = [sample(rows[i : i + 1], [sequences[i]])[0] for i in range(count)]
    order = random.Random(1).sample(range(count), count)
    shuffled = sample(rows[order], [sequences[i] for i in order])
    assert [drawn.token_id for drawn in alone] == [drawn.token_id for drawn in together]
    assert [drawn.token_id for drawn in shuffled] == [together[i].token_id for i in order]


def test_seed_sample_and_position_each_change_the_draw() -> None:
    row = torch.zeros(1, 5_000)
    draws = [
        tokens(row, [sequence(params(seed=seed), [1] * position, sample_index=sample_index)])[0]
        for seed, position, sample_index in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]
    ]
    assert len(set(draws)) == len(draws)


def test_greedy_takes_the_best_and_so_does_the_tiniest_temperature() -> None:
    rows = logits(3)
    best = rows.argmax(dim=-1).tolist()
    for temperature in (0.0, 1e-30, 1e-4):
        assert tokens(rows, [sequence(params(temperature=temperature)) for _ in range(3)]) == best


def test_half_precision_logits_and_tokens_the_model_forbids() -> None:
    rows = logits(1).to(torch.bfloat16)
    rows[0, ::2] = -torch.inf
    drawn = [tokens(rows, [sequence(params(temperature=5.0), [1] * position)])[0] for position in range(200)]
    assert all(token % 2 == 1 for token in drawn)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"top_k": 3, "min_p": 0.1},
        {"repetition_penalty": 1.2, "allowed_token_ids": (1, 2, 3)},
        {"num_logprobs": 2},
    ],
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_a_number_fails_alone(fields: dict[str, Any], bad: float) -> None:
    rows = logits(3)
    expected = sample(rows, [sequence(params(**fields))] * 3)
    rows[1, 2] = bad
    samples = sample(rows, [sequence(params(**fields))] * 3)
    assert samples[1].error is not None
    assert "this sequence" in samples[1].error
    assert samples[1].error_kind is ErrorKind.ENGINE
    assert [samples[0], samples[2]] == [expected[0], expected[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_allowed_fails_alone_and_says_what_may_have_forbidden_it(temperature: float) -> None:
    rows = logits(2)
    nothing = params(temperature=temperature, allowed_token_ids=(4,), bad_words=((4,),))
    bad, good = sample(rows, [sequence(nothing), sequence(params(temperature=0.0))])
    assert bad.error is not None
    assert "allowed_token_ids" in bad.error
    assert good.token_id == rows[1].argmax()


def test_no_rows_no_samples() -> None:
    assert sample(torch.empty(0, VOCABULARY), []) == []
