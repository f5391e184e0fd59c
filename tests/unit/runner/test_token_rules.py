"""Penalties, biases and bans: what they count, what they forbid, and that they follow from the tokens alone."""

import random
from collections import Counter

import pytest
import torch

from engine.runner.token_rules import BadWords, TokenCounts, TokenRules
from tests.unit.runner.sampling import EOS, expected_logits, logits, params, sequence, tokens

PROMPT = [3, 3, 17]


def test_counts_that_grow_equal_counts_made_at_once() -> None:
    rng = random.Random(4)
    grown = sequence(params(), prompt=PROMPT)
    counts = TokenCounts(grown, with_prompt=True)
    for _ in range(30):
        grown.token_ids += [rng.randrange(200) for _ in range(rng.randrange(12))]
        counts.update(grown)
        anew = TokenCounts(grown, with_prompt=True)
        seen = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
        assert seen == dict(zip(anew.ids.tolist(), anew.counts.tolist(), strict=True))
        assert seen == dict.fromkeys(PROMPT, 0) | Counter(grown.token_ids[len(PROMPT) :])


def test_without_the_prompt_only_output_is_counted() -> None:
    counts = TokenCounts(sequence(params(), [8, 8, 3], prompt=PROMPT), with_prompt=False)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {8: 2.0, 3: 1.0}


def test_a_bad_word_is_forbidden_only_behind_its_beginning_and_only_in_the_output() -> None:
    words = BadWords([(5,), (1, 2), (1, 2, 3), (1, 4), (1, 2)])
    assert set(words.forbidden([9, 9], 2)) == {5}
    assert set(words.forbidden([9, 1], 2)) == {5}, "the prompt's end is not the beginning of a word"
    assert set(words.forbidden([9, 1], 1)) == {5, 2, 4}
    assert set(words.forbidden([9, 1, 2], 1)) == {5, 3}
    assert set(words.forbidden([1, 1, 2, 9], 1)) == {5}


def test_rules_forget_a_sequence_that_ended() -> None:
    rules = TokenRules(frozenset({EOS}))
    living, ended = (sequence(params(presence_penalty=1.0)) for _ in range(2))
    rules.apply(logits(2), [living, ended])
    assert len(rules) == 2
    del ended
    assert len(rules) == 1


def test_rows_without_rules_are_left_as_they_are() -> None:
    rules = TokenRules(frozenset({EOS}))
    rows = logits(2)
    before = rows.clone()
    rules.apply(rows, [sequence(params()), sequence(params(logit_bias={4: 1.0}))])
    assert torch.equal(rows[0], before[0])
    assert rows[1, 4] == before[1, 4] + 1.0


@pytest.mark.parametrize("num_output", [0, 1, 6])
def test_a_batch_of_rules_equals_the_plain_way(num_output: int) -> None:
    everything = params(
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        logit_bias={7: 1.5, 3: -2.0},
        allowed_token_ids=(*tuple(range(0, 60, 2)), 3, 7),
        bad_words=((8,), (8, 7)),
        min_tokens=3,
        stop_token_ids=(10, 12),
    )
    some = [everything, params(repetition_penalty=0.8), params(), params(min_tokens=2, ignore_eos=True)]
    sequences = [sequence(p, [8, 7, 8, 9, 9, 8][:num_output], prompt=PROMPT) for p in some]
    rows = logits(len(some))
    expected = [
        expected_logits(row, s.sampling, PROMPT, s.token_ids[len(PROMPT) :])
        for row, s in zip(rows, sequences, strict=True)
    ]
    TokenRules(frozenset({EOS})).apply(rows, sequences)
    for row, wanted in zip(rows, expected, strict=True):
        torch.testing.assert_close(row.double(), torch.from_numpy(wanted), rtol=1e-5, atol=1e-5)


def test_a_sequence_is_worked_out_anew_after_a_move_as_it_was_before() -> None:
    sampling = params(temperature=0.0, presence_penalty=0.6, frequency_penalty=0.9, bad_words=((4, 4), (7, 9)))
    rows = logits(40, spread=1.0)
    whole = sequence(sampling, prompt=PROMPT)
    rules = TokenRules(frozenset({EOS}))
    for step in range(40):
        moved = sequence(sampling, whole.token_ids[len(PROMPT) :], prompt=PROMPT)
        stays, goes = rows[step : step + 1].clone(), rows[step : step + 1].clone()
        rules.apply(stays, [whole])
        TokenRules(frozenset({EOS})).apply(goes, [moved])
        assert torch.equal(stays, goes)
        whole.token_ids.append(int(stays.argmax()))


def test_end_tokens_come_only_behind_min_tokens() -> None:
    row = torch.zeros(1, 60)
    row[0, EOS], row[0, 11] = 9.0, 8.0
    sampling = params(temperature=0.0, min_tokens=2, stop_token_ids=(11,))
    assert tokens(row, [sequence(sampling, [1])])[0] not in (EOS, 11)
    assert tokens(row, [sequence(sampling, [1, 1])]) == [EOS]
    ignoring = params(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert tokens(row, [sequence(ignoring, [1])]) == [EOS], "it ends nothing, so nothing is to be held back"
