"""Offline use with a real, small model: its texts are those of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.llm.offline import LLM, GenerationParams
from orchestrator.llm.tokenizer import byte_tokenizer
from tests.unit.runner.families import VOCAB_SIZE, generate, save_family

PROMPTS = ["A shoal", "of fish", "A shoal moves as one", "x"]
NUM_TOKENS = 12


@contextmanager
def opened(folder: Path, **knobs: Any) -> Iterator[LLM]:
    """Save a small model and load it; its tokenizer's ids up to the vocabulary are all that is drawn."""
    save_family("llama", folder)
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    with LLM(str(folder), dtype="float32", device="cpu", kv_cache_memory="1MiB", progress=False, **knobs) as llm:
        yield llm


def test_two_ranks_in_one_process_answer_as_transformers_does(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    params = GenerationParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with opened(tmp_path, data_parallel_size=2) as llm:
        expected = generate(tmp_path, [list(prompt.encode()) for prompt in PROMPTS], NUM_TOKENS)
        outputs = llm.generate(PROMPTS, params, progress=False)
        picks = [view.num_picks for view in llm.engine_views()]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.outputs[0].text for output in outputs] == [
        tokenizer.backend.decode(token_ids).rstrip("\N{REPLACEMENT CHARACTER}") for token_ids in expected
    ]
    assert max(map(max, expected)) < VOCAB_SIZE
    assert picks == [2, 2]


def test_outputs_carry_a_log_probability_for_each_token_drawn_and_each_token_of_the_prompt(tmp_path: Path) -> None:
    greedy: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    wanted = [
        GenerationParams(**greedy, n=2, logprobs=2, prompt_logprobs=1),
        GenerationParams(**greedy),
        GenerationParams(**greedy, logprobs=1, echo=True),
    ]
    with opened(tmp_path) as llm:
        told, silent, echoed = llm.generate(["of fish"] * 3, wanted, progress=False)
    assert told.prompt_logprobs is not None
    assert [token.token_id for token in told.prompt_logprobs] == told.prompt_token_ids
    assert [(token.logprob is None, len(token.top)) for token in told.prompt_logprobs] == [(True, 0)] + [(False, 1)] * 6
    for sample in told.outputs:
        assert sample.logprobs is not None
        assert [token.token_id for token in sample.logprobs] == sample.token_ids
        # what is drawn greedily is the best one itself
        assert [token.top[0][0] for token in sample.logprobs] == sample.token_ids
        assert [token.top[0][2] for token in sample.logprobs] == [token.logprob for token in sample.logprobs]
        assert all(len(token.top) == 2 for token in sample.logprobs)
    assert (silent.prompt_logprobs, silent.outputs[0].logprobs) == (None, None)
    assert echoed.outputs[0].logprobs is not None
    assert [t.token_id for t in echoed.outputs[0].logprobs] == echoed.prompt_token_ids + echoed.outputs[0].token_ids
    values = [token.logprob for token in echoed.outputs[0].logprobs[1:7]]
    assert values == pytest.approx([token.logprob for token in told.prompt_logprobs[1:]], abs=1e-5)
