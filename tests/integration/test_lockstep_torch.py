"""Real mixture-of-experts models on lockstep ranks: the tokens are those of transformers, whatever happens."""

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from tests.chaos.rounds import kill_engine, run_rounds
from tests.chaos.streams import Request, differences_within_margin, mixed_requests, send_all
from tests.integration.lockstep import Inject, cluster, group, kill, pids, wait_whole
from tests.integration.scaling import scale
from tests.integration.serving import START_S, Deployment, deployment, run_shoal
from tests.unit.runner.byte_tokenizer import VOCAB_SIZE, byte_tokenizer, encode, save_byte_tokenizer
from tests.unit.runner.families import generate, save_model

NUM_PROMPTS, MAX_TOKENS, LONG_TOKENS = 16, 40, 400
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8),
    "mixtral": lambda: MixtralConfig(**SIZES, head_dim=16, num_local_experts=8),
    "olmoe": lambda: OlmoeConfig(**SIZES, num_experts=8),
}
PROMPTS = [f"{number} fish swim in {'one school and ' * (number % 4)}the sea" for number in range(NUM_PROMPTS)]


def serve_arguments(folder: Path, num_ranks: int, executor: str = "local") -> list[str]:
    return [
        *("--model", str(folder), "--served-model-name", "sim", "--executor", executor, "--enable-expert-parallel"),
        *("--dtype", "float32", "--device", "cpu", "--kv-cache-memory", "16MiB", "--max-restarts", "100"),
        *("--data-parallel-size", str(num_ranks)),
    ]


def save(model: str, folder: Path) -> Path:
    save_model(MODELS[model](), folder)
    save_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3_moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """Return the answers of transformers alone."""
    return reference(folder, PROMPTS, MAX_TOKENS)


@pytest.fixture
def served(folder: Path) -> Iterator[Deployment]:
    with deployment(*serve_arguments(folder, 2)) as running:
        running.wait_ready()
        yield running


def reference(folder: Path, prompts: Sequence[str], max_tokens: int) -> list[str]:
    answers = generate(folder, [encode(prompt) for prompt in prompts], max_tokens)
    return [_whole_characters(byte_tokenizer().decode(tokens)) for tokens in answers]


def greedy(prompt: str, max_tokens: int, **changes: Any) -> Request:
    body = {"model": "sim", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return Request("/v1/completions", {**body, "stream": True, **changes})


REQUESTS = [greedy(prompt, MAX_TOKENS) for prompt in PROMPTS]


def send(url: str, requests: Sequence[Request], meanwhile: Inject | None = None) -> list[str]:
    """Send all at once and return the texts; ``meanwhile`` runs as soon as each stream has begun."""
    answers = asyncio.run(send_all(url, requests, meanwhile))
    assert not [answer.error for answer in answers if answer.error]
    return [_whole_characters(answer.choices[0].text) for answer in answers]


def _whole_characters(text: str) -> str:
    """Return a text without what its last bytes may yet become."""
    return text.rstrip("\ufffd")


@pytest.mark.timeout(1200)
def test_killed_placed_anew_and_scaled_in_sleep_a_group_answers_as_one_process(
    served: Deployment, folder: Path, expected: list[str]
) -> None:
    """One deployment for all of it, because its start is dear."""
    url = served.wait_ready()
    wait_whole(url, 2)
    assert send(url, REQUESTS) == expected
    _rebalance(url)
    assert send(url, REQUESTS) == expected
    _kill_under_load(url, folder, expected)
    wait_whole(url, 2)
    assert send(url, REQUESTS) == expected
    _scale_in_sleep(url, expected)
    assert send(url, REQUESTS) == expected
    assert served.has_logged("has ended: exit status 0"), "a group that is closed meanwhile aborts no leaving rank"
    served.send_signal(signal.SIGTERM)
    assert served.wait_exit() == 0, served.stderr


def _rebalance(url: str) -> None:
    before = group(url)
    assert sorted(expert for held in before["experts"].values() for expert in held) == list(range(8))
    answer = run_shoal("rebalance", "--url", url)
    assert answer.returncode == 0, answer.stderr
    after = group(url)
    assert after["epoch"] > before["epoch"]
    assert after["experts"] != before["experts"]
    assert after["load_imbalance"] < before["load_imbalance"]


def _kill_under_load(url: str, folder: Path, expected: list[str]) -> None:
    """Kill rank 0 when each stream has begun: the long one, which it serves, is then under way on any machine."""
    long_prompt = "a long stream"
    victim, num_before = pids(url)[0], _num_migrated(url)

    async def kill_victim() -> None:
        kill(victim)

    answers = send(url, [*REQUESTS, greedy(long_prompt, LONG_TOKENS, data_parallel_rank=0)], kill_victim)
    assert answers == [*expected, *reference(folder, [long_prompt], LONG_TOKENS)]
    assert _num_migrated(url) > num_before, "nothing was under way when the rank was killed"


def _num_migrated(url: str) -> int:
    return int(cluster(url)["statistics"].get("moves_death", 0))


def _scale_in_sleep(url: str, expected: list[str]) -> None:
    with httpx.Client(base_url=url, timeout=START_S, trust_env=False) as http:
        http.post("/sleep?level=1").raise_for_status()
        scale(http, size=3)
        http.post("/wake_up").raise_for_status()
        assert send(url, REQUESTS) == expected
        scale(http, remove=[0], drain_timeout=0.0)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_every_family_answers_as_transformers_on_any_number_of_ranks(
    model: str, num_ranks: int, tmp_path: Path
) -> None:
    with deployment(*serve_arguments(save(model, tmp_path), num_ranks)) as served:
        url = served.wait_ready()
        wait_whole(url, num_ranks)
        assert send(url, REQUESTS) == reference(tmp_path, PROMPTS, MAX_TOKENS)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_kills_of_one_of_four_ranks_change_no_answer(model: str, seed: int, tmp_path: Path) -> None:
    requests = mixed_requests(32, 60, extra=[{"temperature": 0, "logprobs": True, "top_logprobs": 2}])
    with deployment(*serve_arguments(save(model, tmp_path), 4)) as served:
        wait_whole(served.wait_ready(), 4)
        run_rounds(served, requests, [kill_engine] * 10, seed=seed, compare=differences_within_margin)
        wait_whole(served.wait_ready(), 4)
