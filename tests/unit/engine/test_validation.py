"""The engine's own validation refuses what its runner could not follow, by name."""

import math
from typing import Any

import pytest

from engine.core.validation import sampling_fault
from engine.interfaces.engine_core import RunnerLimits
from engine.wire.sampling import SamplingParams

VOCAB_SIZE = 50
ALL = frozenset({"logprobs", "grammar"})


def fault(features: frozenset[str] = ALL, **fields: Any) -> str | None:
    limits = RunnerLimits(
        max_model_len=99,
        vocab_size=VOCAB_SIZE,
        num_blocks=9,
        block_size=4,
        eos_token_ids=frozenset(),
        device="cpu",
        dtype="none",
        features=features,
    )
    return sampling_fault(SamplingParams(**{"max_tokens": 3, **fields}), limits)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "top_p": 1.0, "top_k": 7, "min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.1},
        {"logit_bias": {0: -100.0, 49: 100.0}, "allowed_token_ids": (0, 49), "bad_words": ((1,), (2, 3))},
        {"num_logprobs": 20, "num_prompt_logprobs": 0, "grammar": "x", "stop_token_ids": (49,)},
    ],
)
def test_what_can_be_followed_passes(fields: dict[str, Any]) -> None:
    assert fault(**fields) is None


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {50: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"stop_token_ids": (50,)}, "stop_token_ids"),
        ({"bad_words": ((1, 50),)}, "bad_words"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"num_logprobs": 21}, "logprobs"),
        ({"num_prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_followed_is_named(fields: dict[str, Any], name: str) -> None:
    sentence = fault(**fields)
    assert sentence is not None
    assert sentence.startswith(name)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_logprobs": 0}, "logprobs"),
        ({"num_prompt_logprobs": 1}, "prompt_logprobs"),
        ({"grammar": "x"}, "response_format"),
    ],
)
def test_what_an_engine_cannot_do_at_all_is_named(fields: dict[str, Any], name: str) -> None:
    sentence = fault(frozenset(), **fields)
    assert sentence is not None
    assert sentence.startswith(name)
