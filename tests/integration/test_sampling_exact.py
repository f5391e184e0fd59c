"""What a request draws is its own: alone, in a batch of 32, preempted, or cut anywhere and begun anew elsewhere.

Matrix products differ in their last bits with the number of rows, so two runs may part where the two best scores, or a
sampling threshold, lie closer together than that. Such places are recognised (the choice changes under noise of that
size), counted and printed; a difference anywhere else is a failure.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.core.native import NativeCore
from engine.runner.torch_runner import TorchRunner
from engine.wire.ids import ClientId
from engine.wire.messages import AddRequest, FinishReason
from engine.wire.sampling import SamplingParams
from tests.unit.runner.families import VOCAB_SIZE, save_family
from tests.unit.runner.sampling import sample, sequence

CLIENT = ClientId(0, 1)
NUM_TOKENS = 16
BATCH = 32
BLOCK_BYTES = 4 * 2 * 2 * 2 * 16 * 4  # block size, layers, keys and values, KV heads, dimension, float32
ROOMY = SchedulerConfig(block_size=4, max_num_seqs=BATCH, kv_cache_memory_bytes=4 << 20)
TIGHT = SchedulerConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=20, kv_cache_memory_bytes=24 * BLOCK_BYTES)
NOISE = 1e-5
"""Of the spread of the scores; float32 products of this model's size differ by a tenth of it."""


def subjects() -> list[AddRequest]:
    """Return requests of every kind of sampling."""
    sampling: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"temperature": 1.0},
        {"temperature": 1.5, "presence_penalty": 1.0, "min_tokens": 6, "stop_token_ids": (50, 60, 70, 80)},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.8},
        {"temperature": 1.0, "min_p": 0.05, "logit_bias": {9: 3.0, 30: -5.0}},
        {"temperature": 2.0, "top_k": 60, "top_p": 0.95, "repetition_penalty": 1.2, "bad_words": ((40,), (41, 42))},
    ]
    rng = random.Random(2)
    made = []
    for index, fields in enumerate(sampling):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(3 + 3 * index)]
        seeded = SamplingParams(**{"max_tokens": NUM_TOKENS, "seed": rng.getrandbits(60), **fields})
        made.append(request(index + 1, prompt, seeded))
    return made


def company() -> list[AddRequest]:
    rng = random.Random(3)
    return [
        request(
            100 + index,
            [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 30))],
            SamplingParams(max_tokens=NUM_TOKENS, temperature=rng.choice([0.0, 1.0]), seed=index),
        )
        for index in range(BATCH - len(subjects()))
    ]


def request(request_id: int, prompt: list[int], sampling: SamplingParams, output: Sequence[int] = ()) -> AddRequest:
    return AddRequest(CLIENT, request_id, request_id, 0, 0, prompt, list(output), sampling)


def run(core: NativeCore, requests: Sequence[AddRequest]) -> dict[int, list[int]]:
    """Return the whole output of each request, what it began with included."""
    for asked in requests:
        core.add_request(asked, received_at=0.0)
    answers = {asked.request_id: list(asked.output_token_ids) for asked in requests}
    while core.has_work():
        for output in core.step(now=0.0).get(CLIENT, []):
            assert output.finish_reason is not FinishReason.ERROR, output.error
            answers[output.request_id] += output.new_token_ids
            if output.stop_token_id is not None:
                answers[output.request_id].append(output.stop_token_id)
    return answers


@dataclass
class Divergences:
    """Compares outputs by the margin rule."""

    model: Any
    num_compared: int = 0
    num_near_ties: int = 0

    def compare(self, asked: AddRequest, expected: list[int], got: list[int], what: str) -> None:
        self.num_compared += 1
        if got == expected:
            return
        position = next(i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1])
        assert self._is_near_tie(asked, expected[:position]), f"{what}: {asked} parts at {position}: {expected} {got}"
        self.num_near_ties += 1
        say(f"{what}: request {asked.request_id} parts at position {position}, where two choices nearly tie")

    def _is_near_tie(self, asked: AddRequest, output: list[int]) -> bool:
        with torch.inference_mode():
            scores = self.model(torch.tensor([asked.prompt_token_ids + output])).logits[0, -1:]
        generator = torch.Generator().manual_seed(0)
        noisy = scores + NOISE * scores.std() * torch.randn(64, scores.shape[1], generator=generator)
        drawn = sequence(asked.sampling, output, prompt=asked.prompt_token_ids)
        return len({choice.token_id for choice in sample(noisy, [drawn] * len(noisy))}) > 1


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


@pytest.fixture(autouse=True)
def no_progress_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the watcher of progress bars: loading a model draws some, and its thread would count as a leak."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_family("llama", folder)
    return folder


@pytest.fixture
def divergences(folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Divergences]:
    found = Divergences(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    yield found
    with capsys.disabled():
        say(f"\n{found.num_compared} outputs compared, {found.num_near_ties} part at a near tie")
    assert found.num_near_ties <= found.num_compared // 20, "near ties are rare"


def start(folder: Path, scheduler: SchedulerConfig) -> NativeCore:
    model = ModelConfig(model=str(folder), dtype="float32", max_model_len=64)
    return NativeCore(scheduler, TorchRunner(model, scheduler, lambda what, share: None))


def test_what_a_request_draws_is_its_own(folder: Path, divergences: Divergences) -> None:
    core = start(folder, ROOMY)
    alone = {asked.request_id: run(core, [asked])[asked.request_id] for asked in subjects()}
    assert len({token for output in alone.values() for token in output}) > 40

    together = run(core, [*company(), *subjects()])
    for asked in subjects():
        divergences.compare(asked, alone[asked.request_id], together[asked.request_id], "in a batch of 32")

    cut = {}
    for asked in subjects():
        for position in range(1, len(alone[asked.request_id])):
            request_id = 1_000 * asked.request_id + position
            beginning = alone[asked.request_id][:position]
            cut[request_id] = request(request_id, asked.prompt_token_ids, asked.sampling, beginning)
    assert len(cut) > 80
    finished = run(core, list(cut.values()))
    for request_id, resumed in cut.items():
        divergences.compare(resumed, alone[request_id // 1_000], finished[request_id], "cut and resubmitted")
    core.close()


def test_preemption_changes_nothing(folder: Path, divergences: Divergences) -> None:
    core = start(folder, ROOMY)
    alone = {asked.request_id: run(core, [asked])[asked.request_id] for asked in subjects()}
    core.close()
    tight = start(folder, TIGHT)
    for _ in range(2):
        preempted = run(tight, subjects())
        for asked in subjects():
            divergences.compare(asked, alone[asked.request_id], preempted[asked.request_id], "preempted")
    assert tight.load().num_preemptions > 3
    tight.close()


def test_the_same_request_draws_other_tokens_with_another_seed(folder: Path) -> None:
    core = start(folder, ROOMY)
    asked = subjects()[2]
    other = request(9, asked.prompt_token_ids, msgspec.structs.replace(asked.sampling, seed=asked.sampling.seed + 1))
    answers = run(core, [asked, other])
    assert answers[asked.request_id] != answers[9]
    core.close()
