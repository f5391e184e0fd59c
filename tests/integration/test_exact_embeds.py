"""Exactness of embeddings: as prompts they give transformers' tokens, pooled its vectors, whatever the engine does."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.core.native import NativeCore
from engine.interfaces.engine_core import Runner
from engine.runner.torch_runner import TorchRunner
from engine.wire.load import Load
from engine.wire.messages import EngineCoreOutput, FinishReason
from engine.wire.sampling import PoolingParams
from engine.wire.tensors import Tensor
from tests.integration.exactness import CLIENT, SmallPool, answer, make_request
from tests.unit.runner.families import VOCAB_SIZE, embed, generate, generate_from_embeds, pooled, save_family

FAMILIES = ("llama", "gemma2_softcap", "gemma3_sliding", "gpt2")  # Gemma scales embeddings, GPT-2 adds positions
NUM_PROMPTS = 12
NUM_TOKENS = 8
BLOCK_SIZE = 4
STEP_TOKENS = (1, 7, 64)
SMALL_POOL = 11  # blocks: the longest sequence and little more, while six want to run


def prompts() -> list[list[int]]:
    """Return prompts of several lengths; every third is one that came before."""
    rng = random.Random(13)
    made: list[list[int]] = []
    for index in range(NUM_PROMPTS):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 5, 16, 27)))]
        made.append(made[index - 2] if index % 3 == 2 else own)
    return made


def as_tensor(embeds: torch.Tensor) -> Tensor:
    return Tensor("float32", embeds.shape, embeds.numpy())


@pytest.fixture(params=FAMILIES)
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, TorchRunner]]:
    """Yield a model's folder and a runner of it."""
    save_family(request.param, tmp_path)
    scheduler = SchedulerConfig(block_size=BLOCK_SIZE, max_num_seqs=6, kv_cache_memory_bytes=8 << 20)
    runner = TorchRunner(ModelConfig(model=str(tmp_path), dtype="float32"), scheduler, lambda what, share: None)
    assert {"prompt_embeds", "pooling"} <= runner.limits.features
    yield tmp_path, runner
    runner.close()


def variants(runner: Runner) -> Iterator[tuple[Runner, SchedulerConfig, bool]]:
    """Yield chunk sizes with and without preemption and prefix cache."""
    kinds = itertools.cycle(itertools.product((False, True), repeat=2))
    for num_step_tokens, (preempting, caching) in zip(STEP_TOKENS + STEP_TOKENS[1:], kinds, strict=False):
        scheduler = SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=6,
            max_num_batched_tokens=num_step_tokens,
            enable_prefix_caching=caching,
        )
        yield SmallPool(runner, SMALL_POOL) if preempting else runner, scheduler, preempting


def test_embeddings_give_the_tokens_of_transformers(started: tuple[Path, TorchRunner]) -> None:
    folder, runner = started
    asked = prompts()
    own = embed(folder, asked)
    expected = generate(folder, asked, NUM_TOKENS)
    torch.manual_seed(5)
    shift = 0.3 * float(own[0].std()) * torch.randn(own[0].shape[-1])
    moved = [embeds + shift for embeds in own]
    expected_moved = generate_from_embeds(folder, moved, NUM_TOKENS)
    assert expected_moved != expected, "the shift is too small to matter"
    placeholders = [[0] * len(prompt) for prompt in asked]
    num_preemptions = 0
    for variant, scheduler, preempting in variants(runner):
        for embeds, tokens in ((own, expected), (moved, expected_moved)):
            answers = answer(variant, scheduler, placeholders, NUM_TOKENS, 3, [as_tensor(e) for e in embeds])
            assert answers.tokens == tokens
            assert (answers.load.num_prefix_hit_tokens > 0) == scheduler.enable_prefix_caching
            num_preemptions += preempting * answers.load.num_preemptions
    assert num_preemptions > 0


def test_pooled_vectors_are_those_of_transformers(started: tuple[Path, TorchRunner]) -> None:
    folder, runner = started
    asked = prompts()
    expected = torch.stack(pooled(folder, asked)).numpy()
    for variant, scheduler, _ in variants(runner):
        vectors, load = pool(variant, scheduler, asked)
        np.testing.assert_allclose(vectors, expected, atol=2e-5)
        assert ((vectors * expected).sum(axis=1) > 0.9999).all()
        assert (load.num_running, load.num_waiting, load.num_generation_tokens) == (0, 0, NUM_TOKENS)


@pytest.mark.parametrize("started", ["llama"], indirect=True)
def test_embeddings_that_are_not_numbers_fail_alone(started: tuple[Path, TorchRunner]) -> None:
    folder, runner = started
    asked = prompts()[:4]
    own = [as_tensor(embeds) for embeds in embed(folder, asked)]
    broken = Tensor("float32", own[0].shape, bytes(own[0].data[:-4]) + np.float32(np.nan).tobytes())
    core = NativeCore(SchedulerConfig(block_size=BLOCK_SIZE), runner)
    for pooling in (None, PoolingParams()):
        for index, embeds in enumerate([*own, broken]):
            request = make_request(index, [0] * embeds.shape[0], NUM_TOKENS)
            request.prompt_embeds, request.pooling = embeds, pooling
            core.add_request(request, received_at=0.0)
        ends: dict[int, EngineCoreOutput] = {}
        while core.has_work():
            ends |= {o.request_id: o for o in core.step(now=0.0).get(CLIENT, []) if o.finish_reason is not None}
        wanted = FinishReason.LENGTH if pooling is None else FinishReason.STOP
        assert [ends[index].finish_reason for index in range(5)] == [wanted] * 4 + [FinishReason.ERROR]
        assert "not a number" in (ends[4].error or "")


def pool(runner: Runner, scheduler: SchedulerConfig, asked: list[list[int]]) -> tuple[np.ndarray, Load]:
    """Return the vectors of all prompts from a new core that also generates for one more: both kinds share steps."""
    core = NativeCore(scheduler, runner)
    core.add_request(make_request(len(asked), asked[0], NUM_TOKENS), received_at=0.0)
    for index, prompt in enumerate(asked):
        request = make_request(index, prompt, 0)
        request.pooling = PoolingParams()
        core.add_request(request, received_at=0.0)
    found: dict[int, np.ndarray] = {}
    num_tokens = 0
    while core.has_work():
        for output in core.step(now=0.0).get(CLIENT, []):
            assert output.error is None, output.error
            num_tokens += len(output.new_token_ids)
            if output.pooled is not None:
                assert output.finish_reason is FinishReason.STOP
                found[output.request_id] = np.frombuffer(output.pooled.data, "<f4")
    assert num_tokens == NUM_TOKENS
    return np.stack([found[index] for index in range(len(asked))]), core.load()
