"""Log-probabilities are the model's own, of drawn tokens and of prompts, whatever the chunks."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.runner.torch_runner import TorchRunner
from engine.wire.logprobs import Logprobs
from tests.unit.runner.driver import Driver
from tests.unit.runner.families import save_family
from tests.unit.runner.sampling import logits, params, sample, sequence

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19]
TOLERANCE = 2e-4


def test_a_drawn_token_comes_with_its_own_and_the_best_log_probabilities() -> None:
    rows = logits(3)
    samples = sample(
        rows,
        [
            sequence(params(num_logprobs=4, temperature=2.0, top_k=9, logit_bias={9: 50.0}, repetition_penalty=1.5)),
            sequence(params()),
            sequence(params(num_logprobs=0, temperature=0.0)),
        ],
    )
    expected = rows.log_softmax(dim=-1)
    assert samples[0].logprobs is not None
    (position,) = samples[0].logprobs.positions()
    assert samples[0].token_id == 9
    assert position.chosen == pytest.approx(expected[0, 9].item(), abs=1e-5)
    best, ids = expected[0].topk(4)
    assert position.top_ids == tuple(ids.tolist())
    assert position.top_values == pytest.approx(best.tolist(), abs=1e-5)
    assert samples[1].logprobs is None
    assert samples[2].logprobs is not None
    (position,) = samples[2].logprobs.positions()
    assert position.chosen == pytest.approx(expected[2].max().item(), abs=1e-5)
    assert position.top_ids == ()


def test_more_best_tokens_than_there_are_tokens() -> None:
    (only,) = sample(logits(1, vocabulary=7), [sequence(params(num_logprobs=20))])
    assert only.logprobs is not None
    assert only.logprobs.num_top == 7


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_family("llama", tmp_path)
    return tmp_path


def reference(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities [n - 1, vocabulary] of what follows each token but the last."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        raw: torch.Tensor = model(torch.tensor([token_ids])).logits[0, :-1]
    return raw.log_softmax(dim=-1)


def check(logprobs: Logprobs | None, expected: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    assert logprobs is not None
    assert len(logprobs) == len(expected)
    for position, row, token in zip(logprobs.positions(), expected, token_ids, strict=True):
        assert position.chosen == pytest.approx(row[token].item(), abs=TOLERANCE)
        assert position.top_values == pytest.approx(row.topk(num_top).values.tolist(), abs=TOLERANCE)
        assert [row[i].item() for i in position.top_ids] == pytest.approx(position.top_values, abs=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_a_prompt_in_any_chunks_and_company_gives_the_models_log_probabilities(llama: Path, chunk: int) -> None:
    runner = TorchRunner(
        ModelConfig(model=str(llama), dtype="float32"), SchedulerConfig(block_size=4), lambda what, share: None
    )
    driver = Driver(runner)
    wanting = params(temperature=0.0, num_prompt_logprobs=3, num_logprobs=2)
    asking, other, one = driver.add(PROMPT, wanting), driver.add(PROMPT[3:]), driver.add(PROMPT[:1], wanting)
    expected = reference(llama, PROMPT)
    delivered = []
    while asking.num_output_tokens < 3:
        work = [(other, chunk), (asking, chunk), *([(one, 1)] if one.num_output_tokens == 0 else [])]
        sampling = [s for s, limit in work if len(s.token_ids) - s.num_computed <= limit]
        for sampled, drawn in zip(sampling, driver.step(work), strict=True):
            if sampled is one:
                assert drawn.prompt_logprobs is not None
                assert len(drawn.prompt_logprobs) == 0
            elif sampled is asking:
                delivered.append(drawn)
            else:
                assert drawn.prompt_logprobs is None
                assert drawn.logprobs is None
    check(delivered[0].prompt_logprobs, expected, PROMPT[1:], 3)
    assert [drawn.prompt_logprobs for drawn in delivered[1:]] == [None, None], "they are told once"
    output = asking.token_ids[len(PROMPT) :]
    expected = reference(llama, asking.token_ids)[len(PROMPT) - 1 :]
    for index, drawn in enumerate(delivered):
        check(drawn.logprobs, expected[index : index + 1], output[index : index + 1], 2)
    runner.close()


def test_a_prompt_that_begins_anew_halfway_is_told_whole(llama: Path) -> None:
    runner = TorchRunner(
        ModelConfig(model=str(llama), dtype="float32"), SchedulerConfig(block_size=4), lambda what, share: None
    )
    driver = Driver(runner)
    asking = driver.add(PROMPT, params(temperature=0.0, num_prompt_logprobs=1))
    driver.step([(asking, 5)])
    driver.free(asking)
    asking.num_computed = 0
    (drawn,) = driver.step([(asking, 64)])
    check(drawn.prompt_logprobs, reference(llama, PROMPT), PROMPT[1:], 1)
    runner.close()


def test_a_sequence_that_moved_is_told_its_prompt_without_its_output(llama: Path) -> None:
    runner = TorchRunner(
        ModelConfig(model=str(llama), dtype="float32"), SchedulerConfig(block_size=4), lambda what, share: None
    )
    driver = Driver(runner)
    moved = driver.add(PROMPT, params(temperature=0.0, num_prompt_logprobs=1))
    moved.token_ids += [30, 31]
    moved.num_resumed = 2
    (drawn,) = driver.step([(moved, 64)])
    check(drawn.prompt_logprobs, reference(llama, PROMPT), PROMPT[1:], 1)
    runner.close()
