"""Offline use with a real, small model: its texts are those of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.llm.offline import LLM
from orchestrator.llm.params import GenerationParams
from orchestrator.llm.tokenizer import byte_tokenizer
from tests.unit.runner.families import VOCAB_SIZE, embed, generate, pooled, save_family

PROMPTS = ["A shoal", "of fish", "A shoal moves as one", "x"]
NUM_TOKENS = 12


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[LLM]:
    """Save a small model and load it; its tokenizer's ids up to the vocabulary are all that is drawn."""
    save_family("llama", folder)
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    with LLM(str(folder), dtype="float32", device="cpu", kv_cache_memory="1MiB", progress=False, **options) as llm:
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
        full, plain, echoed = llm.generate(["of fish"] * 3, wanted, progress=False)
    assert full.prompt_logprobs is not None
    assert [token.token_id for token in full.prompt_logprobs] == full.prompt_token_ids
    assert [(token.logprob is None, len(token.top)) for token in full.prompt_logprobs] == [(True, 0)] + [(False, 1)] * 6
    for sample in full.outputs:
        assert sample.logprobs is not None
        assert [token.token_id for token in sample.logprobs] == sample.token_ids
        # what is drawn greedily is the best one itself
        assert [token.top[0][0] for token in sample.logprobs] == sample.token_ids
        assert [token.top[0][2] for token in sample.logprobs] == [token.logprob for token in sample.logprobs]
        assert all(len(token.top) == 2 for token in sample.logprobs)
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs) == (None, None)
    assert echoed.outputs[0].logprobs is not None
    assert [t.token_id for t in echoed.outputs[0].logprobs] == echoed.prompt_token_ids + echoed.outputs[0].token_ids
    values = [token.logprob for token in echoed.outputs[0].logprobs[1:7]]
    assert values == pytest.approx([token.logprob for token in full.prompt_logprobs[1:]], abs=1e-5)


def test_vectors_and_embeddings_are_those_of_transformers(tmp_path: Path) -> None:
    params = GenerationParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    tokens = [list(prompt.encode()) for prompt in PROMPTS]
    with opened(tmp_path, data_parallel_size=2) as llm:
        vectors = llm.embed([*PROMPTS, "x" * 1000], progress=False)
        short = llm.embed(PROMPTS[0], dimensions=5, progress=False)[0].embedding
        own = embed(tmp_path, tokens)
        outputs = llm.generate([own[0], own[1].numpy(), tokens[2], own[3].double()], params, progress=False)
    expected = torch.stack(pooled(tmp_path, tokens))
    found = torch.tensor([output.embedding for output in vectors[:-1]])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert vectors[0].prompt_token_ids == tokens[0]
    assert vectors[-1].embedding == []
    assert "1000 tokens" in str(vectors[-1].error)
    torch.testing.assert_close(torch.tensor(short), torch.nn.functional.normalize(expected[0][:5], dim=0))
    assert [output.outputs[0].token_ids for output in outputs] == generate(tmp_path, tokens, NUM_TOKENS)
    assert [output.prompt_token_ids for output in outputs] == [[], [], tokens[2], []]
