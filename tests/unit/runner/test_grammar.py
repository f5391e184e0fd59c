"""Outputs stay within their grammar, whatever the logits; a grammar that cannot be matched ends its own request."""

import json
import re
import threading
from collections.abc import Sequence

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from engine.interfaces.plan import SequenceState
from engine.runner.grammar import GrammarCompiler, Grammars
from engine.runner.sampler import Sampler
from engine.wire.messages import ErrorKind
from engine.wire.sampling import SamplingParams
from tests.unit.runner.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer, decode, encode
from tests.unit.runner.sampling import params, plan_of, sample, sequence

PADDED_VOCABULARY = VOCAB_SIZE + 5
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "kind": {"enum": ["fish", "shoal"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"(ab|cd){2,4}x[0-9]{3}"


@pytest.fixture
def sampler() -> Sampler:
    tokenizer = LLTokenizer(byte_tokenizer().to_str(), eos_token=[EOS])
    return Sampler(frozenset({EOS}), Grammars(tokenizer, PADDED_VOCABULARY, num_threads=1))


def schema_params(**fields: object) -> SamplingParams:
    return params(grammar=LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)), **fields)


def regex_params(regex: str = REGEX, **fields: object) -> SamplingParams:
    return params(grammar=LLMatcher.grammar_from_regex(regex), **fields)


def noise(step: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, PADDED_VOCABULARY, generator=torch.Generator().manual_seed(step)) * 3


def run(sampler: Sampler, sequences: Sequence[SequenceState], num_steps: int = 80) -> list[str]:
    """Feed noise until each sequence draws its end; return the texts."""
    running = list(sequences)
    for step in range(num_steps):
        sampler.prepare(plan_of(running))
        for one, drawn in zip(list(running), sample(noise(step, len(running)), running, sampler), strict=True):
            assert drawn.error is None
            if drawn.token_id == EOS:
                running.remove(one)
            else:
                one.token_ids.append(drawn.token_id)
    assert not running, [decode(one.token_ids) for one in running]
    return [decode(one.token_ids[one.num_prompt_tokens :]) for one in sequences]


def test_noise_becomes_what_the_grammar_asks_for(sampler: Sampler) -> None:
    sequences = [
        *(sequence(schema_params(temperature=temperature, seed=7)) for temperature in (0.0, 1.0)),
        *(sequence(regex_params(seed=seed), prompt=[9, 9]) for seed in range(3)),
    ]
    for text in run(sampler, sequences)[:2]:
        answer = json.loads(text)
        assert 0 <= answer["age"] <= 150
        assert answer["kind"] in ("fish", "shoal")
    for one in sequences[2:]:
        assert re.fullmatch(REGEX, decode(one.token_ids[2:]))


def test_rows_without_a_grammar_are_left_as_they_are(sampler: Sampler) -> None:
    rows = noise(1, 3)
    free = [sequence(params(temperature=0.0)) for _ in range(2)]
    drawn = sample(rows, [free[0], sequence(regex_params(temperature=0.0)), free[1]], sampler)
    assert drawn[0].token_id == rows[0].argmax()
    assert drawn[2].token_id == rows[2].argmax()
    assert drawn[1].token_id in encode("ac")


def test_the_state_is_rebuilt_from_the_output_wherever_the_sequence_goes_on(sampler: Sampler) -> None:
    whole = sequence(regex_params(temperature=0.0))
    text = run(sampler, [whole])[0]
    for cut in range(len(text) + 1):
        moved = sequence(regex_params(temperature=0.0), encode(text[:cut]))
        # the noise of a step depends on its number, so the rest may differ, but it must complete what is there
        assert re.fullmatch(REGEX, run(sampler, [moved])[0])


def test_output_that_does_not_match_fails_alone(sampler: Sampler) -> None:
    rows = noise(2, 2)
    wrong, right = sample(rows, [sequence(regex_params(), encode("zz")), sequence(regex_params())], sampler)
    assert wrong.error is not None
    assert "response_format" in wrong.error
    assert "<state>" not in wrong.error
    assert wrong.error_kind is ErrorKind.REQUEST
    assert right.error is None


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (LLMatcher.grammar_from_json_schema('{"type": "strin"}'), "strin"),
        (LLMatcher.grammar_from_regex("a("), "unclosed group"),
        (LLMatcher.grammar_from_lark("start: nowhere"), "nowhere"),
        ("{", "response_format"),
    ],
)
def test_a_grammar_that_is_none_fails_alone_with_its_reason(sampler: Sampler, grammar: str, reason: str) -> None:
    bad, good = sample(noise(3, 2), [sequence(params(grammar=grammar)), sequence(schema_params())], sampler)
    assert bad.error is not None
    assert reason in bad.error
    assert "response_format" in bad.error
    assert good.error is None


@pytest.mark.parametrize(
    "grammar", [LLMatcher.grammar_from_regex(r"[^\s\S]"), LLMatcher.grammar_from_lark('start: "a" start')]
)
def test_a_grammar_that_nothing_matches_fails_alone(sampler: Sampler, grammar: str) -> None:
    hopeless, good = sequence(params(grammar=grammar)), sequence(schema_params())
    for step in range(40):
        bad, fine = sample(noise(step, 2), [hopeless, good], sampler)
        assert fine.error is None
        if bad.error is not None:
            assert "response_format" in bad.error
            return
        hopeless.token_ids.append(bad.token_id)
        assert bad.token_id != EOS
    # an endless rule goes on for ever and never ends by itself


def test_bans_and_a_grammar_that_together_leave_nothing_fail_alone(sampler: Sampler) -> None:
    (none,) = sample(noise(4, 1), [sequence(regex_params("a+", bad_words=((encode("a")[0],),)))], sampler)
    assert none.error is not None
    assert "bad_words" in none.error
    assert none.error_kind is ErrorKind.REQUEST


def test_tokens_the_tokenizer_does_not_know_are_never_drawn(sampler: Sampler) -> None:
    rows = noise(5, 1)
    rows[0, VOCAB_SIZE:] = 100.0
    (drawn,) = sample(rows, [sequence(regex_params("(.|\n)+", temperature=0.0))], sampler)
    assert drawn.token_id < VOCAB_SIZE


def test_an_alternative_end_of_sequence_token_ends_a_grammar_too() -> None:
    tokenizer = LLTokenizer(byte_tokenizer().to_str(), eos_token=[EOS, 0])
    sampler = Sampler(frozenset({EOS, 0}), Grammars(tokenizer, PADDED_VOCABULARY, num_threads=1))
    rows = noise(6, 1)
    rows[0, 0] = 100.0
    complete = sequence(regex_params("ab", temperature=0.0), encode("ab"))
    assert sample(rows, [complete], sampler)[0].token_id == 0


def test_a_grammar_that_takes_too_long_to_compile_fails_alone() -> None:
    patterns = [{"type": "string", "pattern": f"a{{0,{length}}}.*b"} for length in range(10, 21)]
    endless = LLMatcher.grammar_from_json_schema(json.dumps({"allOf": patterns}))
    tokenizer = LLTokenizer(byte_tokenizer().to_str(), eos_token=[EOS])
    compiler = GrammarCompiler(tokenizer, timeout_s=0.001)
    assert compiler.compile(endless).result() is None
    assert compiler.compile(endless) is compiler.compile(endless), "nobody pays for it twice"
    for thread in threading.enumerate():
        if thread.name == "grammar":
            thread.join()
    done = compiler.compile(endless).result()
    assert done is not None
    assert done.is_error(), "once it has ended its own reason is told"
