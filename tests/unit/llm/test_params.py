"""What a caller asked for, and what becomes of it for one prompt."""

import pytest

from engine.wire.errors import InvalidRequestError
from orchestrator.llm.grammar import Grammar
from orchestrator.llm.params import EncodedRules, GenerationParams

LIMIT = 100


@pytest.mark.parametrize(
    ("params", "num_prompt_tokens", "expected"),
    [
        (GenerationParams(), 40, 60),
        (GenerationParams(default_max_tokens=16), 40, 16),
        (GenerationParams(default_max_tokens=16), 95, 5),
        (GenerationParams(max_tokens=60), 40, 60),
        (GenerationParams(), 99, 1),
        (GenerationParams(max_tokens=0, default_max_tokens=16), 40, 0),
        (GenerationParams(max_tokens=0), 100, 0),
    ],
)
def test_the_output_gets_what_was_asked_or_the_room_there_is(
    params: GenerationParams, num_prompt_tokens: int, expected: int
) -> None:
    assert params.for_prompt(num_prompt_tokens, LIMIT, 0, "prompt").max_tokens == expected


@pytest.mark.parametrize(
    ("params", "num_prompt_tokens", "field", "limit"),
    [
        (GenerationParams(), 100, "messages", "100"),
        (GenerationParams(max_tokens=61), 40, "max_tokens", "60"),
        (GenerationParams(max_tokens=0), 101, "messages", "context is 100 tokens$"),
        (GenerationParams(), 0, "messages", "one token"),
        (GenerationParams(max_tokens=5, min_tokens=6), 40, "min_tokens", "5"),
    ],
)
def test_what_does_not_fit_is_refused_with_field_and_limit(
    params: GenerationParams, num_prompt_tokens: int, field: str, limit: str
) -> None:
    with pytest.raises(InvalidRequestError, match=limit) as caught:
        params.for_prompt(num_prompt_tokens, LIMIT, 0, "messages")
    assert caught.value.field == field


def test_the_callers_seed_wins_over_the_drawn_one() -> None:
    assert GenerationParams(seed=7).for_prompt(1, LIMIT, 8, "prompt").seed == 7
    assert GenerationParams().for_prompt(1, LIMIT, 8, "prompt").seed == 8


def test_a_negative_seed_travels_as_a_number_engines_can_read() -> None:
    assert 0 <= GenerationParams(seed=-1).for_prompt(1, LIMIT, 0, "prompt").seed < 2**63


def test_rules_travel_as_they_were_encoded_and_everything_else_as_it_was_given() -> None:
    params = GenerationParams(
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={7: -1.0},
        allowed_token_ids=(1, 7),
        bad_words=("ab",),
        logprobs=3,
        prompt_logprobs=1,
        grammar=Grammar.regex("a"),
    )
    sampling = params.for_prompt(1, LIMIT, 0, "prompt", EncodedRules(((97, 98),), "start: /a/"))
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == ({7: -1.0}, (1, 7))
    assert (sampling.bad_words, sampling.grammar) == (((97, 98),), "start: /a/")
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (3, 1)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (GenerationParams(), None),
        (GenerationParams(echo=True), None),
        (GenerationParams(logprobs=4), None),
        (GenerationParams(logprobs=4, echo=True), 4),
        (GenerationParams(logprobs=0, echo=True, prompt_logprobs=2), 2),
        (GenerationParams(prompt_logprobs=0), 0),
    ],
)
def test_prompts_are_scored_when_they_are_told_by_themselves_or_with_the_text(
    params: GenerationParams, expected: int | None
) -> None:
    assert params.num_prompt_logprobs == expected
