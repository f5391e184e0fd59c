"""What a request asks of tokens, encoded for one model, or refused by name."""

from typing import Any

import pytest

from engine.wire.errors import InvalidRequestError
from orchestrator.llm.grammar import Grammar
from orchestrator.llm.limits import RuleEncoder, check_features
from orchestrator.llm.params import EncodedRules, GenerationParams
from orchestrator.llm.tokenizer import byte_tokenizer

ALL = frozenset({"logprobs", "grammar"})


async def test_bad_words_become_tokens_at_a_beginning_and_behind_a_space() -> None:
    encoder = RuleEncoder(byte_tokenizer())
    rules = await encoder.encode(GenerationParams(bad_words=("ab", " ab", "c")))
    assert rules == EncodedRules(tuple(tuple(text) for text in (b"ab", b" ab", b"c", b" c")), None)
    await encoder.aclose()


async def test_a_grammar_travels_in_the_engines_form() -> None:
    encoder = RuleEncoder(byte_tokenizer())
    rules = await encoder.encode(GenerationParams(grammar=Grammar.regex("[ab]")))
    assert rules.grammar is not None
    assert "[ab]" in rules.grammar
    await encoder.aclose()


async def test_nothing_asked_nothing_encoded() -> None:
    encoder = RuleEncoder(byte_tokenizer())
    assert await encoder.encode(GenerationParams()) == EncodedRules()
    with pytest.raises(InvalidRequestError, match="bad_words"):
        await encoder.encode(GenerationParams(bad_words=("",)))
    await encoder.aclose()


@pytest.mark.parametrize(
    ("fields", "features", "field"),
    [
        ({"logprobs": 0}, frozenset(), "logprobs"),
        ({"prompt_logprobs": 3}, {"grammar"}, "prompt_logprobs"),
        ({"grammar": Grammar.regex("a")}, {"logprobs"}, "response_format"),
        ({"grammar": Grammar.regex("a", "guided_regex")}, frozenset(), "guided_regex"),
        ({"grammar": Grammar.regex("a"), "ignore_eos": True}, ALL, "ignore_eos"),
        ({"grammar": Grammar.regex("a"), "min_tokens": 2}, ALL, "min_tokens"),
    ],
)
def test_what_engines_cannot_do_is_refused_by_name(
    fields: dict[str, Any], features: frozenset[str], field: str
) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        check_features(GenerationParams(**fields), frozenset(features))
    assert caught.value.field == field


def test_what_engines_can_do_passes() -> None:
    check_features(GenerationParams(logprobs=5, prompt_logprobs=0, grammar=Grammar.regex("a")), ALL)
    check_features(GenerationParams(), frozenset())
